"""Figures of a run from the ends of its files: step, reward, pace, checkpoint, logs."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prime_hpc.config.run_files import ENGINE_ROLES, RUN_YAML, TINKER_URL
from prime_hpc.launch.monitor.run_facts import Evidence, RunStatus, integer, number
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.metrics import READ_BYTES, STEP_KEYS, parse_row
from prime_hpc.store.run_paths import list_steps

_TAIL_BYTES = 96_000


def add_figures(status: RunStatus, one: Evidence, *, brief: bool = False) -> None:
    """Step, reward or loss, their trend and the time that is left.
    `brief`: of a run that is over the supervisor's last word is enough, if it tells the reward."""
    if status.max_steps is None and not status.runs and _states_steps(one.path) and not _trains_many(one.path):
        text = line_of(one.path / RUN_YAML, "max_steps: ")
        if text is None:
            text = line_of(one.path / "roles" / "trainer" / RUN_YAML, "max_steps: ")
        status.max_steps = int(text) if text and text.isdigit() else None
    reward = number((one.word or {}).get("reward"))
    if not (brief and status.is_final and status.step is not None and reward is not None):
        _from_metrics(status, one.path)
    if status.figure is None and reward is not None:  # of episodes there is no other word
        status.figure, status.value = "reward", reward


def _states_steps(path: Path) -> bool:
    """Return whether the config says how many steps it has: episodes are none, and the trainer counts epochs."""
    has_steps = line_of(path / RUN_YAML, "kind: ") not in ("eval", "synthesize")
    return has_steps and line_of(path / RUN_YAML, "    num_epochs: ", after="sft:") in (None, "null")


def _trains_many(path: Path) -> bool:
    """Return whether it is a trainer of many runs, which has no last step."""
    return (line_of(path / RUN_YAML, "  max_concurrent_runs: ", after="trainer:") or "1") != "1"


def _from_metrics(status: RunStatus, path: Path) -> None:
    rewards = values_of(tail_rows(metrics_file(path, "orchestrator")), "reward/mean")
    trained = tail_rows(metrics_file(path, "trainer"))
    series = rewards or ([] if status.runs else values_of(trained, "loss"))  # of many runs: each has its own
    if series:
        status.figure, status.value, status.trend = "reward" if rewards else "loss", series[-1], series[-40:]
    if trained:
        status.step = integer(trained[-1].get("step"))
        if status.max_steps is None and "run" not in trained[-1]:  # of `sft.data.num_epochs` the trainer has counted it
            status.max_steps = integer(trained[-1].get("run/max_steps"))
    last = trained[-20:]
    waits = [(number(row.get("time/wait")), number(row.get("time/step"))) for row in last]
    known = [(wait, step) for wait, step in waits if wait is not None and step is not None]
    whole = sum(step for _, step in known)
    status.idle_share = min(1.0, sum(wait for wait, _ in known) / whole) if whole > 0 else None
    times = sorted(values_of(last, "time/step"))
    if times and status.state in ("running", "saving") and status.max_steps and status.step is not None:
        status.eta_s = times[len(times) // 2] * max(0, status.max_steps - status.step)


def tail_rows(path: Path, num_bytes: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the last rows of a metrics file, oldest first; those of an earlier attempt that were done again are left
    out."""
    # an evaluation of an earlier version may come after a later batch: it is no step's row
    rows = [row for row in tail_json(path, num_bytes) if not row.keys().isdisjoint(STEP_KEYS)]
    newest = {row["step"]: row for row in rows}
    last = rows[-1]["step"] if rows else 0
    return [newest[step] for step in sorted(newest) if step <= last]


def tail_json(path: Path, num_bytes: int) -> list[dict[str, Any]]:
    """Return the JSON objects with a `step` in the end of a file: at least one, where there is one, for of a hundred
    environments a row is long. Torn lines are left out, an absent file has none."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
            file.seek(start)
            lines = file.read(num_bytes).splitlines()
    except OSError:
        return []
    found = list(_with_step(lines[1:] if start else lines))
    return found if found or not start else tail_json(path, 8 * num_bytes)


def iterate_json(path: Path) -> Iterator[dict[str, Any]]:
    """Yield those of the whole file, one at a time: all rows of a hundred thousand steps take gigabytes."""
    with contextlib.suppress(OSError), path.open("rb", buffering=READ_BYTES) as file:
        yield from _with_step(file)


def _with_step(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    return (row for row in map(parse_row, lines) if row is not None and isinstance(row.get("step"), int))


def add_service(status: RunStatus, path: Path) -> None:
    """Add where the tinker service of a run under way answers, once it does."""
    try:
        status.service = (path / TINKER_URL).read_text(encoding="utf-8").strip() if status.roles else None
    except OSError:
        return


def add_checkpoint(status: RunStatus, path: Path) -> None:
    """Add the newest checkpoint and when it was made."""
    elsewhere = line_of(path / RUN_YAML, "  path: ", after="ckpt:")
    parent = Path(elsewhere) if elsewhere and elsewhere != "null" else path / "checkpoints"
    try:
        steps = list_steps(parent, digits=0)
    except OSError:  # not ours to read
        return
    if steps:
        status.checkpoint = steps[-1]
        try:
            status.checkpoint_time = (parent / f"step_{steps[-1]}" / "manifest.json").stat().st_mtime
        except OSError:  # removed meanwhile by the run's own retention
            status.checkpoint_time = None


def log_paths(path: Path, attempt: int | None) -> dict[str, str]:
    """Return the log files worth opening, by role, that exist."""
    logs = path / "logs"
    found: dict[str, str] = {}
    if os.access(logs / "supervisor.log", os.F_OK):  # Path.exists raises where the folder is not ours to read
        found["supervisor"] = str(logs / "supervisor.log")
    if (output := newest_file(logs.glob("slurm-*.out"))) is not None:
        found["slurm"] = str(output)
    folder = logs / f"attempt_{attempt}"
    with contextlib.suppress(PermissionError):  # `status` says that they are not to be read
        for file in sorted(folder.glob("*/*.log")) if attempt is not None else []:
            if file.stem == file.parent.name or file.parent.name in ENGINE_ROLES:
                found[file.stem] = str(file)
    return found


def newest_file(paths: Iterable[Path]) -> Path | None:
    """Return the file that was changed last; None where none is there. Links that lead nowhere (a sweep's log, of a
    point that was moved out of it) are passed over."""
    found: list[tuple[float, Path]] = []
    for path in paths:
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return max(found)[1] if found else None


def last_row_time(path: Path) -> float | None:
    """When the trainer last finished a step, epoch seconds."""
    rows = tail_rows(metrics_file(path, "trainer"), 8_000)
    return number(rows[-1].get("time")) if rows else None


def line_of(path: Path, start: str, after: str = "") -> str | None:
    """Return the rest of the first line that begins with `start` (below the root key `after`).

    For one value a YAML parser would cost more than all the rest.
    """
    inside = not after
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not inside:
                    inside = line.startswith(after)
                elif line.startswith(start):
                    return line[len(start) :].strip().strip("'\"")
                elif after and not line.startswith((" ", "-")):
                    return None
    except OSError:
        pass
    return None


def values_of(rows: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Return a metric's values, those that are no finite numbers left out."""
    return [value for row in rows if (value := number(row.get(key))) is not None]
