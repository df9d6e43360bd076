"""Facts that the live view draws, read from the ends of a run's files: as much work for a run of ten million steps as
for one of ten."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite
from pathlib import Path
from typing import Any

from prime_hpc.config.run_files import ATTEMPTS_JSONL, RUN_YAML
from prime_hpc.launch.monitor.run_facts import RunStatus, number
from prime_hpc.launch.monitor.run_progress import line_of, tail_json, tail_rows
from prime_hpc.launch.monitor.status import Ask, collect, status_of
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.metrics import number_of
from prime_hpc.store.run_dirs import AttemptRow, list_runs, read_rows

TAIL_BYTES = 256_000
"""Read of each metrics file at a refresh."""
RECENT = 10
"""Steps over which shares of time are taken."""
TRAINER_PHASES = {
    "wait": ("wait",),
    "train": ("forward_backward", "optim"),
    "publish": ("publish",),
    "save": ("checkpoint",),
}
"""Parts of a trainer's step by the names of `time/...` in its rows; what is left of the step is `rest`."""
ORCHESTRATOR_PHASES = {
    "wait for rollouts": ("wait_rollouts",),
    "wait for weights": ("wait_weights",),
    "wait for servers": ("wait_servers",),
}
Row = Mapping[str, Any]


class RunGoneError(Exception):
    """The run's directory was deleted or renamed."""


@dataclass(frozen=True)
class LiveRun:
    """One run at a moment."""

    status: RunStatus
    kind: str = "rl"
    trained: list[dict[str, Any]] = field(default_factory=list)
    """Last rows of the trainer's steps."""
    sampled: list[dict[str, Any]] = field(default_factory=list)
    """Last rows of the orchestrator's."""
    episodes: list[dict[str, Any]] = field(default_factory=list)
    """Last rows of a run that trains nothing."""
    attempts: list[AttemptRow] = field(default_factory=list)
    space: tuple[float, float] | None = None
    """Bytes of the file system: free for this user, and in all."""


@dataclass(frozen=True)
class LiveRuns:
    """Many runs at a moment."""

    folder: Path
    runs: list[RunStatus]
    more: int = 0
    """Runs that are over and not shown."""


def read_run(path: Path, ask: Ask) -> LiveRun:
    """Read one run. Raises RunGoneError: its directory is not there any more."""
    if not path.is_dir():
        raise RunGoneError(f"{path} is not there any more: the run was deleted or renamed")
    kind = line_of(path / RUN_YAML, "kind: ") or "rl"
    return LiveRun(
        status_of(path, ask=ask),
        kind,
        tail_rows(metrics_file(path, "trainer"), TAIL_BYTES),
        tail_rows(metrics_file(path, "orchestrator"), TAIL_BYTES),
        tail_json(metrics_file(path, kind), TAIL_BYTES) if kind in ("eval", "synthesize") else [],
        read_rows(path / ATTEMPTS_JSONL),
        _space(path),
    )


def read_runs(folder: Path, ask: Ask, limit: int | None) -> LiveRuns:
    """Read all runs under a folder; see `status.collect`."""
    runs, more = collect(list_runs(folder), folder, ask=ask, limit=limit)
    return LiveRuns(folder, runs, more)


def _space(path: Path) -> tuple[float, float] | None:
    try:
        about = os.statvfs(path)
    except OSError:
        return None
    return about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize


def series(rows: Sequence[Row], key: str) -> list[float]:
    """Return a metric over the rows, oldest first; NaN where a row has none, or no finite one. [] where no row has."""
    found = [number_of(row.get(key)) for row in rows]
    if all(value is None for value in found):
        return []
    return [value if value is not None and isfinite(value) else float("nan") for value in found]


def shares(
    rows: Sequence[Row], phases: Mapping[str, Sequence[str]], rest: str
) -> tuple[float, dict[str, float]] | None:
    """Return the mean seconds of the last steps, and the share of each phase in them (0 to 1, `rest` last).

    None where no row tells its time.
    """
    whole: list[float] = []
    sums = dict.fromkeys(phases, 0.0)
    for row in rows[-RECENT:]:
        length = _seconds(row, "step")
        if length <= 0:
            continue
        whole.append(length)
        for phase, keys in phases.items():
            sums[phase] += min(length, fsum(_seconds(row, key) for key in keys))
    total = fsum(whole)
    if total <= 0:
        return None
    found = {phase: min(1.0, seconds / total) for phase, seconds in sums.items()}
    found[rest] = max(0.0, 1.0 - fsum(found.values()))
    return total / len(whole), found


def _seconds(row: Row, key: str) -> float:
    return max(0.0, number(row.get(f"time/{key}")) or 0.0)
