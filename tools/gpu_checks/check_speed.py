"""MFU with the product's own bench, and its peak memory against what a rehearsal foretells."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mfu as bench
import yaml
from _setting import Outcome, Setting, passed, product, run, shown, skipped, tail

SMALL, LARGE, EXPERTS = bench.SHAPES
GPU_CASES = (
    *((SMALL, "rl", False), (SMALL, "rl", True), (SMALL, "sft", True)),
    *((LARGE, "rl", True), (LARGE, "sft", True), (EXPERTS, "rl", True)),
)
CPU_CASES = tuple((shape, kind, False) for shape in bench.TINY for kind in ("rl", "sft"))
ROWS = 4
"""Rows of 16,384 tokens a step: half of `tools/bench mfu`, for the time that there is."""
NEAR = 0.10
"""Measured peak against the rehearsal's."""


def mfu(setting: Setting) -> Outcome:
    """One sequence of 16,384 tokens a row: Qwen3 of 0.6B (also eager), of 4B, blocks of 30B-A3B."""
    folder = setting.folder("mfu")
    cases: list[dict[str, Any]] = []
    for shape, kind, compiled in GPU_CASES if setting.on_gpu else CPU_CASES:
        model = folder / shape.name / "model"
        if not (model / "config.json").exists():
            model.parent.mkdir(parents=True, exist_ok=True)
            bench.make_model(shape, model, setting.on_gpu)
        flags = [flag for flag in shape.flags if flag != "--model.compile"]
        sized = replace(shape, rows=min(ROWS, shape.rows), flags=(*flags, *(["--model.compile"] * compiled)))
        cases.append(_bench(setting, sized, kind, compiled, model))
        print(json.dumps(cases[-1]), flush=True)
    words = ", ".join(
        f"{c['model']} {c['kind']} {'compiled ' if c['compiled'] else ''}"
        + (f"{c['mfu']:.1%} {c['gib']:.0f} GiB" if "mfu" in c else "FAILED")
        for c in cases
    )
    holds = all("mfu" in case for case in cases)
    if setting.on_gpu and holds:  # PRIME-RL's published figures of 0.6B on an H100 are the least
        best = {
            kind: max(c["mfu"] for c in cases if c["kind"] == kind and "0.6B" in c["model"]) for kind in ("rl", "sft")
        }
        holds = all(best[kind] >= least for kind, least in bench.PUBLISHED.items())
    note = "" if setting.on_gpu else " (a tiny shape in float32: only the path is tried)"
    return passed(holds, words + note, {"cases": cases}, "tools/bench mfu")


def _bench(setting: Setting, shape: bench.Shape, kind: str, compiled: bool, model: Path) -> dict[str, Any]:
    name = f"{kind}-{'compiled' if compiled else 'eager'}"
    run_dir = model.parent / name
    argv = [*bench.command(kind, shape, model, run_dir, 1), "--clean", "--device", setting.device]
    row: dict[str, Any] = {"model": shape.name, "kind": kind, "compiled": compiled, "command": shown(argv)}
    log = model.parent / f"{name}.log"
    if run(argv, log):
        return row | {"error": tail(log)}
    report = json.loads((run_dir / "bench" / "trainer.json").read_text())
    figures = report["figures"]
    row |= {"mfu": figures["mfu"], "tokens/s": figures["tokens/s"], "gib": figures["memory, GiB"]}
    return row | {"phases": report["phases"]}


def memory(setting: Setting) -> Outcome:
    """The RL steps of the smaller model of the check `mfu`, eager and compiled, as `plan --rehearse` sees them."""
    before = setting.earlier("mfu")
    shape = SMALL if setting.on_gpu else bench.TINY[0]
    cases = [c for c in (before.figures["cases"] if before else []) if (c["model"], c["kind"]) == (shape.name, "rl")]
    measured = {bool(case["compiled"]): case["gib"] for case in cases if "gib" in case}
    if not measured:
        return skipped("the check `mfu` measured nothing")
    rows: list[dict[str, Any]] = []
    for compiled, peak in measured.items():
        argv, log = _rehearsal(setting, shape, compiled)
        if run(argv, log):
            return Outcome("fail", f"the rehearsal failed: {tail(log, 3)}", command=shown(argv))
        text = log.read_text()
        found = json.loads(text[text.index("{") :])["rehearsal"]
        rows.append({"compiled": compiled, "measured": peak, "foretold": found["peak_gib"], "rehearsal": found})
    if not setting.on_gpu:
        words = (
            f"{rows[0]['foretold']:.3f} GiB foretold; a CPU's peak is the whole process's (tests hold it against ranks)"
        )
        return passed(rows[0]["foretold"] > 0, words, {"cases": rows}, shown(argv))
    words = ", ".join(
        f"{'compiled' if row['compiled'] else 'eager'} {row['measured']:.2f} GiB measured, {row['foretold']:.2f} "
        f"foretold ({row['measured'] / row['foretold'] - 1:+.1%})"
        for row in rows
    )
    holds = all(abs(row["measured"] / row["foretold"] - 1) <= NEAR for row in rows)
    return passed(holds, words, {"cases": rows}, shown(argv))


def _rehearsal(setting: Setting, shape: bench.Shape, compiled: bool) -> tuple[list[str], Path]:
    """The command, and where its output goes."""
    folder = setting.folder("memory")
    tree = {
        "kind": "rl",
        "device": setting.device,
        "seq_len": shape.row_tokens,
        "model": {
            "name": str(setting.folder("mfu") / shape.name / "model"),
            "dtype": "bfloat16" if setting.on_gpu else "float32",
            "compile": compiled,
        },
        "trainer": {"micro_batch_tokens": shape.row_tokens},
        "orchestrator": {"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 64}},
        "inference": None,
    }
    path = folder / f"{'compiled' if compiled else 'eager'}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return [*product(setting)[:3], "plan", str(path), "--rehearse", "--json"], path.with_suffix(".log")
