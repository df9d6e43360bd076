"""Results of `--bench`: one JSON file a role in the run directory, and its table.

    <run>/bench/trainer.json, <run>/bench/orchestrator.json

    {"schema": 1, "role": "trainer", "kind": "rl", "setting": {...}, "num_warm": 1, "num_steps": 4,
     "figures": {"s/step": 1.9, "tokens/s": 5100.0, ...}, "phases": {"forward_backward": 1.7, ...}, "steps": [{...}]}

`figures` and `phases` (seconds a step) are means of the measured steps, `steps` has every step's row, `setting` what
was measured on what. The roles write it; `prime-hpc diff` compares the figures and phases of two runs.
"""

import json
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_hpc.runtime.atomic_write import write_atomic

SCHEMA = 1
FOLDER = "bench"
NUM_WARM = 1
"""Steps that are left out: they allocate, compile and fill caches."""


def bench_path(run_dir: Path, role: str) -> Path:
    """Return where a role's results lie."""
    return run_dir / FOLDER / f"{role}.json"


def mean_of(
    rows: Sequence[Mapping[str, float]], key: str, weight: str | None = None, *, num_warm: int = NUM_WARM
) -> float:
    """Mean of one column over the measured rows; 0 where they lack it.
    `weight`: the column by which rows count; that of the seconds makes a mean of rates what all steps came to."""
    measured = rows[num_warm:] or rows
    weights = [1.0 if weight is None else float(row.get(weight, 0.0)) for row in measured]
    total = sum(w * float(row.get(key, 0.0)) for w, row in zip(weights, measured, strict=True))
    return total / sum(weights) if sum(weights) > 0 else 0.0


def phases_of(rows: Sequence[Mapping[str, float]], *, num_warm: int = NUM_WARM) -> dict[str, float]:
    """Mean seconds of every `time/<phase>` column but the whole step's."""
    names = dict.fromkeys(key for row in rows for key in row if key.startswith("time/") and key != "time/step")
    return {name.removeprefix("time/"): mean_of(rows, name, num_warm=num_warm) for name in names}


def build_report(
    role: str,
    *,
    kind: str,
    setting: Mapping[str, Any],
    figures: Mapping[str, float],
    phases: Mapping[str, float],
    rows: Sequence[Mapping[str, Any]],
    num_warm: int = NUM_WARM,
    **more: Any,
) -> dict[str, Any]:
    """Return the document of one role; see the module. `more` is added as it is."""
    return {
        "schema": SCHEMA,
        "role": role,
        "kind": kind,
        "setting": dict(setting),
        "num_warm": min(num_warm, max(len(rows) - 1, 0)),
        "num_steps": len(rows[num_warm:] or rows),
        "figures": dict(figures),
        "phases": dict(phases),
        "steps": [dict(row) for row in rows],
        **more,
    }


def write_report(run_dir: Path, report: Mapping[str, Any]) -> Path:
    """Write a role's document (whole or not at all); returns its path."""
    path = bench_path(run_dir, str(report["role"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(report, indent=1) + "\n", sync=False)
    return path


def read_report(run_dir: Path, role: str) -> dict[str, Any] | None:
    """Return a role's document; None where there is none that this version can read."""
    try:
        report = json.loads(bench_path(run_dir, role).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) and report.get("schema") == SCHEMA else None


def read_figures(run_dir: Path) -> dict[str, float]:
    """Figures and phases of all roles' documents, by name; {} where the run was no bench."""
    figures: dict[str, float] = {}
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        report = read_report(run_dir, path.stem)
        if report is not None:
            figures |= {f"bench {path.stem}: {name}": value for name, value in results(report).items()}
    return figures


def results(report: Mapping[str, Any]) -> dict[str, float]:
    """Return a document's figures, and the seconds a step of its phases, by name: the rows of its table."""
    phases = {f"{name}, s": float(value) for name, value in report["phases"].items()}
    return {name: float(value) for name, value in report["figures"].items()} | phases


def table(report: Mapping[str, Any]) -> str:
    """Return a document for people: the setting, then one line a figure and one a phase with its share of the step."""
    setting = ", ".join(f"{key} {_text(value)}" for key, value in report["setting"].items())
    lines = [
        f"{report['role']} bench ({report['kind']}): mean of {report['num_steps']} steps after {report['num_warm']}",
        f"  {setting}",
        *(f"  {name:<26}{_text(value):>14}" for name, value in report["figures"].items()),
    ]
    step = report["figures"].get("s/step") or sum(report["phases"].values()) or 1.0
    lines += [f"  {name + ', s':<26}{value:>14.4f}{value / step:>7.0%}" for name, value in report["phases"].items()]
    return "\n".join(lines)


def tables(run_dir: Path) -> list[str]:
    """Lines of all roles' tables, and where their documents lie."""
    reports = [(path, read_report(run_dir, path.stem)) for path in sorted((run_dir / FOLDER).glob("*.json"))]
    lines = [line for path, report in reports if report for line in (*table(report).splitlines(), f"  {path}")]
    return lines or [f"no results of a bench in {run_dir / FOLDER}; logs are in {run_dir / 'logs' / 'latest'}"]


def peak_rss_gib() -> float:
    """High-water mark of this process's resident memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _text(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"
