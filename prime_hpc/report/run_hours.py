"""The accounting of one run read from its directory, row by row: for the page of `report`, and for `usage`."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.config.run_files import ATTEMPTS_JSONL, RUN_YAML, STATUS_JSON
from prime_hpc.config.secret import anchored, hide
from prime_hpc.config.sources.files import explain_yaml
from prime_hpc.launch.monitor.run_progress import line_of
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.report.accounting import account, devices_of
from prime_hpc.report.phases import (
    ORCHESTRATOR,
    TRAINER,
    AttemptSums,
    Phases,
    orchestrator_seconds,
    together,
    trainer_seconds,
)
from prime_hpc.report.series import Curves, Faults, number_of, read_lines
from prime_hpc.report.spans import own_lives
from prime_hpc.report.timeline import ready_times
from prime_hpc.slurm.queue_facts.job_lives import JobLife
from prime_hpc.store.child_runs import list_children, parent_of
from prime_hpc.store.run_dirs import AttemptRow, SubmissionRecord, read_json, read_record, read_rows

_CONFIG_BYTES = 4 << 20
_OF_ALL_RUNS = ("step", "time", "spans", "tokens_per_s", "mfu", "num_")
"""Begin the metrics of a step that mean something beside those of another run's step."""


@dataclass(frozen=True)
class RunHours:
    """Hours of a run, and the steps of its roles by phase."""

    spent: dict[str, Any]
    """Of `account`."""
    trainer: Phases
    orchestrator: Phases
    submitted: float | None
    """Newest submission, epoch seconds."""
    lives: list[JobLife]
    """Of the run's own jobs."""


def read_hours(
    path: Path,
    config: Mapping[str, Any],
    attempts: Sequence[AttemptRow],
    *,
    is_under_way: bool,
    lives: Sequence[JobLife] = (),
    curves: Mapping[str, Curves] | None = None,
) -> RunHours:
    """Account for a run; memory does not grow with its steps.

    Args:
        is_under_way: an attempt that has written no end goes on: its job is not in the queue again.
        lives: of jobs with the run's ids, where Slurm's accounting says.
        curves: of `trainer` and `orchestrator`, that take every row too; None: nobody wants them.
    """
    ready = ready_times(metrics_file(path, "roles"))
    trainer, orchestrator = Phases(TRAINER, attempts), _orchestrators(attempts, ready)
    submission = read_record(path) or SubmissionRecord()
    submitted = number_of(submission.get("time"))
    own = own_lives(lives, attempts, submission)
    trained, served = (curves[role] if curves is not None else None for role in ("trainer", "orchestrator"))
    children = [path / name for name in list_children(path)]
    lives_of = {child.name: _begins(child) for child in children}
    for row, whose in _trainer_rows(path, trained.faults if trained is not None else Faults()):
        if trained is not None:
            trained.add(row)
        trainer.add(row, trainer_seconds(row), whose.is_lost(lives_of) if whose is not None else None)
    for row in read_lines(metrics_file(path, "orchestrator"), served.faults if served is not None else Faults()):
        if served is not None:
            served.add(row)
        orchestrator.add(row, orchestrator_seconds(row))
        orchestrator.add_evaluation(row)
    for one in (trained, served):
        if one is not None:
            one.flush()
    first = number_of(attempts[0].get("submitted")) if attempts else None
    moments = [submitted, *(number_of(row.get("began")) for row in attempts[:1])]
    spent = account(
        attempts,
        trainer.sums,
        _shared_by(children, attempts, ready) if children else orchestrator.sums,
        devices_of(config, attempts),
        submitted=first or (submitted if len(attempts) <= 1 else min(filter(None, moments), default=None)),
        until=time.time() if is_under_way else _last_word(path, attempts),
        goes_on=is_under_way,
        ready=ready,
        lives=own,
    )
    return RunHours(spent, trainer, orchestrator, submitted, own)


def attempt_identities(path: Path, attempts: Sequence[AttemptRow]) -> list[tuple[Any, ...]]:
    """Return what tells each of a run's attempts from all others: a copy, from an archive perhaps, has the same."""
    name = line_of(path / RUN_YAML, "name: ")
    return [(name, *(row.get(key) for key in ("began", "host", "pid", "process"))) for row in attempts]


def _last_word(path: Path, attempts: Sequence[AttemptRow]) -> float:
    """When the supervisor of the last attempt last wrote, epoch seconds; 0 where it did not."""
    word = read_json(path / STATUS_JSON) or {}
    is_own = bool(attempts) and word.get("attempt") == attempts[-1]["attempt"]
    return (number_of(word.get("time")) or 0.0) if is_own else 0.0


@dataclass(frozen=True)
class _ChildStep:
    """A step among the parent's rows: of one of the runs that its trainer trains."""

    run: str
    step: int
    ended: float

    def is_lost(self, begins: Mapping[str, Sequence[tuple[float, int]]]) -> bool:
        """Return whether a later attempt of that run did it again; `begins` as of `_begins`, by run."""
        return any(began > self.ended and resumed < self.step for began, resumed in begins.get(self.run, ()))


def _begins(run_dir: Path) -> list[tuple[float, int]]:
    """When each attempt of a run began, epoch seconds, and the step that it went on from."""
    rows = read_rows(run_dir / ATTEMPTS_JSONL)
    return [(number_of(row.get("began")) or 0.0, int(number_of(row.get("resume_step")) or 0)) for row in rows]


def _orchestrators(attempts: Sequence[AttemptRow], ready: Mapping[int, float]) -> Phases:
    return Phases(ORCHESTRATOR, attempts, role="orchestrator", ready=ready)


def _shared_by(
    children: Sequence[Path], attempts: Sequence[AttemptRow], ready: Mapping[int, float]
) -> list[AttemptSums]:
    """Return the work of the engines in each attempt of the parent, as the orchestrators of its runs tell it."""
    each = []
    for child in children:
        phases = _orchestrators(attempts, ready)
        for row in read_lines(metrics_file(child, "orchestrator"), Faults()):
            phases.add(row, orchestrator_seconds(row), is_lost=False)
        each.append(phases.sums)
    return [together(sums) for sums in zip(*each, strict=True)]


def _trainer_rows(path: Path, faults: Faults) -> Iterator[tuple[dict[str, Any], _ChildStep | None]]:
    """Rows of the run's trainer; of a run below one whose trainer trains many, those that the parent wrote of it; of
    the parent, whose steps are its runs' in turn, what is not about one run's learning, and whose step it was."""
    own = metrics_file(path, "trainer")
    parent = metrics_file(path.parent, "trainer")
    if own.exists() or parent_of(path) is None or not parent.exists():
        for row in read_lines(own, faults):
            step, ended = row.get("run/step"), number_of(row.get("time"))
            if "run" not in row or not isinstance(step, int) or ended is None:
                yield row, None
                continue
            yield {k: v for k, v in row.items() if k.startswith(_OF_ALL_RUNS)}, _ChildStep(str(row["run"]), step, ended)
        return
    for row in read_lines(parent, faults):
        if row.get("run") == path.name and isinstance(row.get("run/step"), int):
            yield row | {"step": row["run/step"]}, None


def read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    """Return a run's resolved config without its secrets, of this version or an older one; {} where there is none,
    which `notes` then say."""
    import yaml

    file = path / RUN_YAML
    try:
        with file.open("rb") as opened:
            text = opened.read(_CONFIG_BYTES)
        tree = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if not isinstance(tree, dict):
            raise ValueError("it is no mapping")
        hidden = hide(anchored(tree, path))
        return hidden if isinstance(hidden, dict) else {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        is_syntax = isinstance(error, yaml.YAMLError)
        notes.append(str(explain_yaml(error, str(file))) if is_syntax else f"{file}: {error}")
        return {}
