"""Preference training on CPU in real trainer processes: exact resumes, ranks, adapters, the file of the reference."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_hpc.config import Experiment
from prime_hpc.config.snapshot import write_snapshot
from prime_hpc.observe.metrics import read_metrics
from prime_hpc.store.run_paths import RunPaths
from tests.integration.test_trainer import assert_done, environment, run_trainer, weights
from tests.support import forked
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
STEPS, HALF = 8, 5
TRAINER = {"optim": {"lr": 3e-3}, "threads_per_rank": 1, "scheduler": {"type": "constant", "warmup_steps": 2}}
SHOWN = ("loss", "grad_norm", "rewards/margins", "rewards/chosen", "logps/rejected")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("preference") / "model").parent
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    rows: list[Any] = [
        {"prompt": f"reverse {w} {i % 3}", "chosen": w[::-1], "rejected": w[: 3 + i % 4]}
        for i, w in enumerate(words * 6)
    ]
    rows.insert(5, {"prompt": "b" * 100, "chosen": "too long", "rejected": "too"})
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    held = [{"prompt": f"reverse {w} 7", "chosen": w[::-1], "rejected": w} for w in words]
    (folder / "held.jsonl").write_text("\n".join(map(json.dumps, held)), encoding="utf-8")
    return folder


def run(
    folder: Path, name: str, num_ranks: int = 1, *, preference: dict[str, Any] | None = None, **changes: Any
) -> RunPaths:
    tree: dict[str, Any] = {
        "kind": "sft",
        "name": name,
        "output_dir": str(folder),
        "max_steps": STEPS,
        "seq_len": 64,
        "model": {"name": str(folder / "model"), "dtype": "float32"},
        "trainer": TRAINER,
        "sft": {
            "data": {"path": str(folder / "pairs.jsonl"), "batch_size": 8},
            "preference": preference or {},
            "eval": {"path": str(folder / "held.jsonl"), "interval": 4},
        },
    }
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values if isinstance(values, dict) else values
    write_snapshot(Experiment.model_validate(tree), folder / name, ["test"])
    paths = RunPaths(folder / name)
    assert_done(run_trainer(paths, num_ranks), paths)
    return paths


def go_on(half: RunPaths, num_ranks: int = 1) -> None:
    """Train a run of the first steps to its end, from its checkpoint."""
    text = half.run_yaml.read_text(encoding="utf-8").replace(f"max_steps: {HALF}", f"max_steps: {STEPS}")
    half.run_yaml.write_text(text.replace("resume_step: null", "resume_step: latest"))
    result = run_trainer(half, num_ranks)
    assert_done(result, half)
    assert f"step_{HALF}: step {HALF}" in result.stdout, result.stdout  # "resumed from"


def rows_of(paths: RunPaths) -> dict[int, dict[str, float]]:
    return {row["step"]: row for row in read_metrics(paths.metrics("trainer"))}


@pytest.fixture(scope="module")
def whole(folder: Path) -> RunPaths:
    """An uninterrupted run."""
    return run(folder, "whole")


@pytest.fixture(scope="module")
def half(folder: Path) -> RunPaths:
    """The first steps, with a checkpoint."""
    return run(folder, "half", max_steps=HALF, ckpt={})


def test_the_chosen_side_wins(whole: RunPaths) -> None:
    rows = rows_of(whole)
    assert rows[1]["loss"] == pytest.approx(math.log(2), abs=1e-5)  # policy and reference are the same weights
    assert rows[1]["rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert rows[STEPS]["loss"] < 0.5 * math.log(2) and rows[STEPS]["rewards/accuracies"] == 1
    assert rows[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[STEPS]["eval/rewards/accuracies"] == 1 and rows[STEPS]["eval/num_pairs"] == 5
    assert rows[STEPS]["eval/loss"] < rows[4]["eval/loss"] < rows[0]["eval/loss"]
    assert rows[1]["num_sequences"] == 16 and rows[1]["shared_tokens"] > 0  # a prompt is computed once
    assert rows[STEPS]["data/overlong"] >= 1


def test_a_resumed_run_compares_with_the_same_numbers_to_the_last_bit(
    folder: Path, whole: RunPaths, half: RunPaths
) -> None:
    file = half.reference_sums
    before = dict(np.load(file))
    assert any(np.isnan(table).any() for table in before.values())  # of the row that is too long
    go_on(half)
    after = np.load(file)
    for name, table in before.items():
        known = ~np.isnan(table)
        assert (after[name][known] == table[known]).all()
    mine, theirs = rows_of(whole), rows_of(half)
    assert all(mine[step][key] == theirs[step][key] for step in range(1, STEPS + 1) for key in SHOWN)
    a, b = weights(whole, STEPS), weights(half, STEPS)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_two_ranks_train_the_same(folder: Path, whole: RunPaths) -> None:
    mine, theirs = rows_of(whole), rows_of(run(folder, "two", 2))
    for step in range(1, STEPS + 1):
        for key in SHOWN:
            assert theirs[step][key] == pytest.approx(mine[step][key], rel=1e-3, abs=1e-4), (step, key)
    assert theirs[STEPS]["eval/loss"] == pytest.approx(mine[STEPS]["eval/loss"], rel=1e-3)


@pytest.mark.exhaustive
def test_ranks_that_split_the_row_train_the_same(folder: Path, whole: RunPaths) -> None:
    mine, theirs = rows_of(whole), rows_of(run(folder, "cp", 2, trainer={"num_ranks": 2, "parallel": {"cp": 2}}))
    for step in range(1, STEPS + 1):
        for key in SHOWN:
            assert theirs[step][key] == pytest.approx(mine[step][key], rel=1e-3, abs=1e-4), (step, key)


def test_an_adapter_is_compared_with_its_base(folder: Path, whole: RunPaths) -> None:
    adapted = run(folder, "lora", model={"lora": {"rank": 4}})
    rows = rows_of(adapted)
    assert rows[1]["loss"] == pytest.approx(math.log(2), abs=1e-5) and rows[STEPS]["loss"] < rows[1]["loss"]
    [mine, theirs] = [dict(np.load(paths.reference_sums)) for paths in (whole, adapted)]
    for one, other in zip(mine.values(), theirs.values(), strict=True):  # the same base, by the same names
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_without_a_reference_none_is_computed(folder: Path) -> None:
    simpo = {"reference": False, "length_normalized": True, "beta": 2.0, "margin": 0.5}
    paths = run(folder, "simpo", preference=simpo, max_steps=3)
    assert not paths.reference_sums.exists()
    assert rows_of(paths)[3]["loss"] < rows_of(paths)[1]["loss"]


def test_steps_are_computed_again(folder: Path, whole: RunPaths) -> None:
    command = ["prime_hpc.trainer.replay", str(whole.root), str(folder / "again"), "--until", "2"]
    assert forked.run(command, env=environment()).returncode == 0
    again = {row["step"]: row for row in read_metrics(RunPaths(folder / "again").metrics("trainer"))}
    assert again[2]["loss"] == rows_of(whole)[2]["loss"] and again[2]["rewards/margins"] != 0
