"""Hours that runs cost: charged, effective, lost, queued; by run, by sweep, by user. One run is read at a time."""

import pwd
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import ATTEMPTS_JSONL, RUN_YAML
from prime_hpc.launch.monitor.status import collect
from prime_hpc.report.accounting import attempt_hours
from prime_hpc.report.run_hours import attempt_identities, read_config, read_hours
from prime_hpc.report.spans import ask_lives
from prime_hpc.runtime.failures import file_error_text
from prime_hpc.slurm.queue_facts.job_lives import JobLife
from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.child_runs import parent_of
from prime_hpc.store.run_dirs import POINTS, run_name

By = Literal["run", "sweep", "user"]
AT_ONCE = 200
"""Runs of one question to squeue and sacct."""
NO_SWEEP = "(no sweep)"
_TRAINING = ("rl", "sft")


@dataclass(frozen=True)
class Usage:
    """Hours of a run, or of several together."""

    name: str
    user: str
    sweep: str
    unit: str
    """Of device-hours: `GPU`; `CPU` of a job without GPUs; `process` where only ranks and engines can be counted."""
    charged: float
    """Device-hours: what Slurm accounted for, else what the jobs held, else what their roles had."""
    effective: float
    """Of the charged hours those in which the trainer computed steps that lasted."""
    lost: float
    """Of the charged hours those in which it computed steps that a later attempt did again."""
    queued: float
    """Hours from the submission to the first attempt, and between attempts: in the queue, or down."""
    runs: int = 1
    attempts: int = 0
    by_slurm: int = 0
    """Of the runs those of which Slurm's accounting told every attempt that has ended."""

    def __add__(self, other: "Usage") -> "Usage":
        """Return both together, under the first one's names."""
        names = ("charged", "effective", "lost", "queued", "runs", "attempts", "by_slurm")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **{key: getattr(self, key) for key in ("name", "user", "sweep", "unit", "runs", "attempts", "by_slurm")},
            **{f"{key}_hours": getattr(self, key) for key in ("charged", "effective", "lost", "queued")},
        }


def read_usage(
    runs: Iterable[tuple[Path, str]], folder: Path, since: float | None = None, left_out: dict[str, str] | None = None
) -> Iterator[Usage]:
    """Yield the usage of each run that has any. A run that shares its parent's trainer has none of its own.

    Args:
        folder: sweeps are named relative to it.
        since: epoch seconds: what was before is left out, of an attempt the part of it; None: all.
        left_out: is told which runs' hours are not known here, by name, and why.
    """
    left_out = {} if left_out is None else left_out
    rest = iter(runs)
    parents: set[Path] = set()
    counted: dict[tuple[Any, ...], str] = {}
    charged: set[JobLife] = set()
    while some := list(islice(rest, AT_ONCE)):
        states = collect([path for path, _ in some], folder)[0]
        under_way = {status.path for status in states if status.is_under_way and not status.is_between}
        own: list[tuple[Path, str]] = []
        for path, name in some:
            try:
                parent = parent_of(path)
            except OSError as error:
                left_out[name] = file_error_text(error)
                continue
            if parent is None:
                own.append((path, name))
                parents.add(path.resolve())
            elif parent not in parents:
                left_out[name] = f"its hours are its parent's: prime-hpc usage {shlex.quote(str(parent))}"
        lives = ask_lives([path for path, _ in own])
        keys = {path: _attempts_of(path) for path, _ in own}
        # of two copies the one that went on has the hours of both
        for path, name in sorted(own, key=lambda one: -len(keys[one[0]])):
            known = {number for number, key in enumerate(keys[path]) if key in counted}
            if known and len(known) == len(keys[path]):
                left_out[name] = f"a copy of {counted[keys[path][-1]]}, whose hours are counted"
                continue
            new = [life for life in lives.get(path, []) if life not in charged] if known else lives.get(path, [])
            try:
                found = _of_run(path, str(path) in under_way, lives.get(path, []), new, known, since)
            except (OSError, ConfigError) as error:
                left_out[name] = file_error_text(error)
                continue
            counted |= dict.fromkeys(keys[path], name)
            charged.update(new)
            if found is not None:
                yield replace(found, name=name, sweep=_sweep(path, folder))


def _attempts_of(path: Path) -> list[tuple[Any, ...]]:
    """Return what tells each of a run's attempts from all others; empty where they cannot be read."""
    try:
        return attempt_identities(path, read_attempts(path / ATTEMPTS_JSONL))
    except OSError:
        return []  # told of as its hours are read


def _of_run(
    path: Path,
    is_under_way: bool,
    lives: Sequence[JobLife],
    new: Sequence[JobLife],
    known: Collection[int],
    since: float | None,
) -> Usage | None:
    """Return a run's usage; None where it had none in that time.

    Args:
        lives: of jobs with the run's ids.
        new: of these, the ones that no copy of the run was charged for.
        known: its first attempts that a copy has counted, numbered from 0.

    Raises:
        OSError, ConfigError: its files do not tell.
    """
    notes: list[str] = []
    config = read_config(path, notes)
    attempts = read_attempts(path / ATTEMPTS_JSONL)
    hours = read_hours(path, config, attempts, is_under_way=is_under_way, lives=lives)
    spent = hours.spent
    is_gpu = spent["unit"] == "GPU"
    rows = spent["rows"]
    is_held = bool(rows) and all(row["held_hours"] is not None for row in rows)
    # hours of CPUs are not added to those of processes
    is_by_slurm = spent["slurm"] is not None and (is_gpu or is_held or not rows)
    parts = {"charged": 0.0, "effective": 0.0, "lost": 0.0, "queued": 0.0}
    num_attempts = 0
    for number, (row, hours_of_row) in enumerate(zip(rows, attempt_hours(spent), strict=True)):
        if number in known:
            continue
        share = _share(row["began"], row["began"] + row["wall"], since)
        parts["queued"] += row["waited"] * _share(row["began"] - row["waited"], row["began"], since) / 3600
        device_hours = hours_of_row * share
        if not (is_by_slurm and row["by_slurm"]):
            parts["charged"] += device_hours
        num_attempts += share > 0
        if row["wall"] > 0 and config.get("kind", "rl") in _TRAINING:
            parts["effective"] += device_hours * row["trainer"]["train"] / row["wall"]
            parts["lost"] += device_hours * row["trainer"]["lost"] / row["wall"]
    if is_by_slurm:
        parts["charged"] += _charged([life for life in hours.lives if life in new], is_gpu, since)
    if not any(parts.values()):
        if notes and (attempts or (path / RUN_YAML).exists()):
            raise ConfigError(notes[0])
        return None
    unit = "GPU" if is_gpu else "CPU" if is_held or is_by_slurm else "process"
    return Usage(
        name=path.name,
        user=_user(path),
        sweep=NO_SWEEP,
        unit=unit,
        charged=parts["charged"],
        effective=parts["effective"],
        lost=parts["lost"],
        queued=parts["queued"],
        attempts=num_attempts,
        by_slurm=int(is_by_slurm and not spent["slurm"]["unknown_attempts"]),
    )


def _share(begin: float, end: float, since: float | None) -> float:
    """Return which share of a time is not before `since`."""
    if since is None or begin >= since:
        return 1.0
    return (end - since) / (end - begin) if end > since else 0.0


def _charged(lives: Sequence[JobLife], is_gpu: bool, since: float | None) -> float:
    """Return device-hours of jobs, as Slurm accounts for them."""
    now = time.time()
    hours = ((life.gpu_s if is_gpu else life.cpu_s) * _share(life.start, life.end or now, since) for life in lives)
    return sum(hours) / 3600


def _user(path: Path) -> str:
    """Return who owns a run directory."""
    try:
        uid = path.stat().st_uid
    except OSError:
        return "unknown"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _sweep(path: Path, folder: Path) -> str:
    """Name the sweep of which a run is a point."""
    found = next((above for above in list(path.parents)[:2] if (above / POINTS).exists()), None)
    if found is None:
        return NO_SWEEP
    name = run_name(found, folder)
    return found.resolve().name if name == "." else name


def grouped(usages: Iterable[Usage], by: By) -> list[Usage]:
    """Add up, the most expensive first; hours of different units are never added."""
    found: dict[tuple[str, str], Usage] = {}
    for number, usage in enumerate(usages):
        name = usage.name if by == "run" else getattr(usage, by)
        key = (str(number) if by == "run" else name, usage.unit)
        known = found.get(key)
        found[key] = replace(usage, name=name) if known is None else known + usage
    return sorted(found.values(), key=lambda one: (one.unit, -one.charged, one.name))


def totals(rows: Sequence[Usage]) -> list[Usage]:
    """Return the sum of each unit."""
    found: dict[str, Usage] = {}
    for row in rows:
        total = replace(row, name="total", user="", sweep="")
        found[row.unit] = found[row.unit] + total if row.unit in found else total
    return list(found.values())


def accounted_note(rows: Sequence[Usage]) -> str:
    """Say whose word the charged hours are."""
    by_slurm, runs = sum(row.by_slurm for row in rows), sum(row.runs for row in rows)
    if by_slurm == runs:
        return "charged: as Slurm accounted for"
    known = f"as Slurm accounted for of {by_slurm} of {runs} runs, else " if by_slurm else ""
    return f"charged: {known}what the jobs held times their time, else their roles' devices"
