"""Every model family on the GPU: log-probabilities of packed samples against transformers' own code on the CPU."""

import contextlib
import json
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _setting import Outcome, Setting, passed

PROCESSES = 8
SOME = 8
"""Families that are tried without a GPU (`tools/proofs families` has all of them there)."""
BOUND = 1e-3
"""Nats in float32: rounding and the order of sums are below, a leak is above 1e-2."""
TIMES_OWN, FLOOR = 4.0, 0.1
"""bfloat16: at most so many times as far as transformers' own code in bfloat16, and this beside it."""


def families(setting: Setting) -> Outcome:
    """Tiny random models, in float32 and in bfloat16."""
    from tests.support.every_family import family_names

    names = family_names() if setting.on_gpu else family_names()[::16][:SOME]
    with ProcessPoolExecutor(PROCESSES if setting.on_gpu else 1, get_context("spawn")) as pool:
        rows = dict(zip(names, pool.map(judged, names, [setting.device] * len(names)), strict=True))
    tried = {name: row for name, row in rows.items() if "float32" in row or "error" in row}
    wrong = {name: row for name, row in tried.items() if not _holds(row)}
    for name, row in rows.items():
        print(name, json.dumps(row), flush=True)
    words = f"{len(tried) - len(wrong)} of {len(tried)} families hold ({len(rows) - len(tried)} refused or not built)"
    return passed(not wrong, words + (f"; not: {', '.join(wrong)}" if wrong else ""), {"families": rows})


def judged(family: str, device: str) -> dict[str, Any]:
    """One family's largest differences, in nats; `own` is transformers' own in bfloat16. In a process of the pool."""
    import torch

    from prime_hpc.config.families import family_of
    from tests.proofs.prove_families import alone, one_rank, samples, worst_gap
    from tests.support.every_family import CannotBuildError, tiny_config, tiny_model

    torch.set_num_threads(1)
    if family_of({"model_type": family}).refused:
        return {"refused": family_of({"model_type": family}).refusal}
    try:
        model = tiny_model(tiny_config(family))
    except CannotBuildError as error:
        return {"not built": str(error)}
    batch, ids = samples()
    expected = alone(model, ids)
    if not expected.isfinite().all() or float(expected.std()) < 1e-3:
        return {"not built": "its small model does not answer"}
    with tempfile.TemporaryDirectory() as folder, one_rank(device):
        model.save_pretrained(folder)
        if family_of(config := json.loads((Path(folder) / "config.json").read_text())).refused:
            return {"refused": family_of(config).refusal}
        row: dict[str, Any] = {}
        try:
            for dtype in ("float32", "bfloat16"):
                if family_of(config).dtype_problem(dtype):
                    continue
                row[dtype] = worst_gap(Path(folder), batch, expected, device, dtype)
        except Exception as error:  # noqa: BLE001 - any way in which a family can break is a row of the table
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        with contextlib.suppress(Exception):  # some have no bfloat16 of their own
            row["own"] = float((alone(model.to(device, torch.bfloat16), ids) - expected).abs().max())
    return row


def _holds(row: dict[str, Any]) -> bool:
    half = row.get("bfloat16", 0.0)  # of a family that has none: refused
    return "error" not in row and row["float32"] <= BOUND and half <= TIMES_OWN * row.get("own", 1) + FLOOR
