"""When would it start, and which of its shapes first? Each shape of an experiment is asked about, none is submitted.

ranking = ask_when(argv, loaded)
print(ranking.text())
best = ranking.best            # None: Slurm names a time for none
"""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from prime_hpc.config import ConfigError, Experiment, Loaded, Problem, load_run
from prime_hpc.config.sources.load import load_experiment
from prime_hpc.launch.estimate.epochs import expected_steps
from prime_hpc.launch.estimate.step_time import step_seconds
from prime_hpc.launch.lint.lint import lint_errors
from prime_hpc.launch.monitor.run_progress import tail_rows
from prime_hpc.launch.prepare import for_evaluation
from prime_hpc.launch.submission import uses_slurm
from prime_hpc.observe.console import in_seconds
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.table import align
from prime_hpc.slurm.client import ASK_TIMEOUT_S
from prime_hpc.slurm.queue import Submission, render_submission
from prime_hpc.slurm.queue_facts.expected_start import ExpectedStart, expected_start
from prime_hpc.slurm.sbatch_errors import SlurmRefused
from prime_hpc.slurm.times import format_time, parse_time_s
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.checkpoint.import_checkpoint import find_checkpoint
from prime_hpc.store.errors import StoreError
from prime_hpc.store.run_paths import RunPaths

AT_ONCE = 4
"""Questions to Slurm's controller at the same time."""
AS_STATED = "as stated"
"""The row of an experiment without `slurm.shapes`."""
StepOf = Callable[[Experiment], tuple[float, str] | None]
"""Predicts a step of an experiment: seconds, and how they are known."""


@dataclass(frozen=True)
class ShapeRow:
    """One shape, with what Slurm says of it."""

    name: str
    answer: ExpectedStart
    loaded: Loaded
    made: Submission | None = None
    """Its job; None: it cannot be placed."""
    run_s: float | None = None
    """Seconds from the job's start to the last step."""
    run_from: str = ""
    """How they are known."""

    @property
    def start(self) -> float | None:
        """When it is expected to start, in seconds since the epoch."""
        return self.answer.start

    @property
    def result(self) -> float | None:
        """When its last step is expected to be done, in seconds since the epoch."""
        return None if self.start is None or self.run_s is None else self.start + self.run_s

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        leader = self.made.placement.components[0].options if self.made else {}
        return {
            "name": self.name,
            "word": self.answer.word,
            "start": self.start,
            "is_earliest": self.answer.is_earliest,
            "nodes_expected": self.answer.nodes or None,
            "why": self.answer.why or None,
            "layout": self.made.placement.layout if self.made else None,
            "nodes": self.made.placement.num_nodes if self.made else None,
            "partition": leader.get("partition"),
            "time": leader.get("time"),
            "run_s": self.run_s,
            "run_from": self.run_from or None,
            "result": self.result,
        }


@dataclass(frozen=True)
class Ranking:
    """The shapes, the best first."""

    asked: float
    """Seconds since the epoch."""
    by: Literal["result", "start"]
    rows: tuple[ShapeRow, ...]
    notes: tuple[str, ...] = ()
    """For people, about all of them."""

    @property
    def best(self) -> ShapeRow | None:
        """The first that Slurm names a time for."""
        return self.rows[0] if self.rows and self.rows[0].start is not None else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        best = self.best
        rows = [row.as_dict() for row in self.rows]
        known = {"asked": self.asked, "by": self.by, "best": best.name if best else None}
        return {**known, "shapes": rows, "notes": list(self.notes)}

    def text(self) -> str:
        """For people: a table, then how its times are known."""
        lines = align([("", "SHAPE", "LAYOUT", "NODES", "PARTITION", "TIME", "STARTS", "LAST STEP"), *self._cells()])
        lines += [f"{row.name}: {row.answer.word}: {row.answer.why}" for row in self.rows if row.answer.why]
        lines += [f"{row.name}: last step after {row.run_from}" for row in self.rows if row.run_from]
        lines.append(f"ranked by {self._reason()}; `sbatch --test-only` says when, from the time limits of jobs")
        lines += [
            f"{row.name}: not before that: Slurm tested each component alone, and gave {row.answer.nodes} to several"
            for row in self.rows
            if row.answer.is_earliest
        ]
        lines += self.notes
        return "\n".join(lines) + "\n"

    def choice(self) -> str:
        """Return one line about the best: what it is, when it starts, and how much later the next one does."""
        best = self.rows[0]
        assert best.start is not None
        text = f"shape {best.name}: the first of {len(self.rows)} by {self._reason()}, "
        text += f"expected to start at {_when(best.start, self.asked)}"
        others = [f"{row.name} {_when(row.start, self.asked)}" for row in self.rows[1:] if row.start is not None]
        others += [f"{row.name} {row.answer.word}" for row in self.rows[1:] if row.start is None]
        return text + (f"; {', '.join(others)}" if others else "")

    def _cells(self) -> list[tuple[str, ...]]:
        found = []
        for number, row in enumerate(self.rows, 1):
            facts = row.as_dict()
            place = [str(facts[key] if facts[key] is not None else "-") for key in ("layout", "nodes", "partition")]
            start = row.answer.word if row.start is None else _when(row.start, self.asked)
            start = f"from {start}" if row.answer.is_earliest else start
            result = "-" if row.result is None else _when(row.result, self.asked)
            rank = str(number) if row.start is not None else "-"
            found.append((rank, row.name, *place, str(facts["time"] or "-"), start, result))
        return found

    def _reason(self) -> str:
        if self.by == "result":
            return "the time of the last step"
        unknown = [row.name for row in self.rows if row.start is not None and row.run_s is None]
        known = len(unknown) < sum(row.start is not None for row in self.rows)
        return "start" + (f" (how long a step takes is not known of {', '.join(unknown)})" if known else "")


def ask_when(
    argv: Sequence[str],
    loaded: Loaded,
    *,
    timeout_s: float = ASK_TIMEOUT_S,
    step_of: StepOf | None = None,
    notes: Sequence[str] = (),
) -> Ranking:
    """Ask Slurm about every shape of an experiment.

    Args:
        argv: the experiment's command line, to which the shape is added.
        timeout_s: Slurm may take so long for an answer. Shapes whose turn has not come after twice that are not asked.
        step_of: predicts a step of a shape in which none was stated or measured; None: nobody can.

    Returns:
        the shapes that start first (or, where it is known of all, that are done first) before the others.
    """
    asked = time.time()
    stated = loaded.experiment.slurm.shapes
    assert isinstance(stated, list), "`auto` is derived before"
    shapes = [(s.name, load_experiment([*argv, "--slurm.shape", s.name], "submit"), s.step_s) for s in stated]
    shapes = shapes or [(loaded.experiment.slurm.shape or AS_STATED, loaded, None)]
    waits = loaded.experiment.slurm.waits
    rows = [_draft(name, for_evaluation(one, waits=waits), step_s, step_of) for name, one, step_s in shapes]
    give_up = time.monotonic() + 2 * timeout_s
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(lambda row: _asked(row, timeout_s, give_up), rows))
    starting = [row for row in rows if row.start is not None]
    by: Literal["result", "start"] = "start"
    if starting and all(row.result is not None for row in starting):
        by = "result"
    rows.sort(key=lambda row: _rank(row, by))
    return Ranking(asked, by, tuple(rows), tuple(notes))


def _rank(row: ShapeRow, by: str) -> tuple[float, bool, float]:
    """Key of the order: shapes without a time last, one that may start later behind its equal."""
    if row.start is None:
        return float("inf"), True, 0.0
    return (row.result or 0.0) if by == "result" else row.start, row.answer.is_earliest, row.start


def _draft(name: str, loaded: Loaded, step_s: float | None, step_of: StepOf | None) -> ShapeRow:
    """Return a row before Slurm was asked: placed, or refused by the plan or by lint."""
    try:
        made = render_submission(loaded, as_rendered=True)
    except ConfigError as error:
        return ShapeRow(name, ExpectedStart("refused", why="; ".join(map(str, error.problems))), loaded)
    if errors := lint_errors(made.experiment, made.site):
        why = "; ".join(f"{f.key}: {f.message}; {f.remedy} ({f.code})" for f in errors)
        return ShapeRow(name, ExpectedStart("refused", why=why), loaded, made)
    run_s, run_from = _time_to_result(made, step_s, step_of)
    return ShapeRow(name, ExpectedStart("no answer"), loaded, made, run_s, run_from)


def _asked(row: ShapeRow, timeout_s: float, give_up: float) -> ShapeRow:
    made = row.made
    if made is None or row.answer.word == "refused":
        return row
    left_s = min(timeout_s, give_up - time.monotonic())
    if left_s <= 0:
        why = "not asked: Slurm took too long over the shapes before it (`scontrol ping` asks the controller)"
        return replace(row, answer=ExpectedStart("no answer", why=why))
    return replace(row, answer=expected_start(made.text, made.placement, cluster=made.other, timeout_s=left_s))


def _time_to_result(made: Submission, step_s: float | None, step_of: StepOf | None) -> tuple[float | None, str]:
    """Return seconds from the job's start to the last step, and how they are known; None: nobody has said, measured or
    predicted a step in this shape."""
    experiment, said = made.experiment, "as slurm.shapes states"
    if step_s is None:
        step_s, said = _measured(experiment), "measured in this run directory"
    if step_s is None and step_of is not None and (predicted := step_of(experiment)) is not None:
        step_s, said = predicted
    last = expected_steps(experiment)
    if step_s is None or not experiment.trains or last is None:
        return None, ""
    steps = last - _steps_done(experiment, last)
    run_s = made.site.startup_s + steps * step_s
    words = f"{format_time(run_s)}: {steps} steps of {in_seconds(step_s)} ({said}), "
    words += f"{made.site.startup_s:g} s until the first"
    return run_s, words + _returns(made, run_s)


def _returns(made: Submission, run_s: float) -> str:
    """Say that a job has to come back, where its time limit ends before its last step."""
    limit = made.placement.components[0].options.get("time")
    limit_s = parse_time_s(str(limit)) if limit is not None else None
    if limit_s is None:
        return ""
    warned_s = limit_s - made.experiment.slurm.restart.signal_lead_s  # then everyone saves, and it goes back
    if run_s <= warned_s:
        return ""
    useful_s = warned_s - made.site.startup_s
    if useful_s <= 0:
        return f"; its time limit of {limit} holds no step"
    times = math.ceil((run_s - warned_s) / useful_s)
    return f"; its time limit of {limit} ends before: it waits in the queue {times} more times, which is not counted"


def _measured(experiment: Experiment) -> float | None:
    """Return the median of the last steps in the run directory, if they were made in this shape."""
    times = step_seconds(tail_rows(metrics_file(experiment.run_dir, "trainer")))
    if not times:
        return None
    try:
        before = load_run(experiment.run_dir)
    except ConfigError:
        return None  # nobody knows how it ran
    return median(times) if before.slurm.shape == experiment.slurm.shape else None


def _steps_done(experiment: Experiment, last: int) -> int:
    """Return how many steps need not be made, in whatever shape: those before the checkpoint that the run goes on from;
    0 where that cannot be told now."""
    ckpt = experiment.ckpt
    if ckpt is None or ckpt.resume_step is None:
        return 0
    asked = ckpt.resume_step
    try:
        if isinstance(asked, Path):
            asked = find_checkpoint(asked).step
        elif asked == "latest":
            asked = resolve_resume(RunPaths(experiment.run_dir, ckpt.path).checkpoints, asked, deep=False).step
    except (StoreError, OSError):
        return 0
    return min(int(asked), last)


def _when(moment: float, asked: float) -> str:
    """`14:02:11 (now)`, `16:01:00 (in 1:59:00)`, with the day where it is another one."""
    here, now = time.localtime(moment), time.localtime(asked)
    clock = time.strftime("%H:%M:%S" if here[:3] == now[:3] else "%b %d %H:%M", here)
    wait = moment - asked
    return f"{clock} (now)" if wait < 2 else f"{clock} (in {format_time(wait)})"


def refuse_without_slurm(experiment: Experiment, flag: str) -> None:
    """Raise a ConfigError where a run starts on this machine, without a queue to ask."""
    if not uses_slurm(experiment):
        raise ConfigError(f"{flag} asks a queue, and this run starts on this machine, at once", "launch")


def best_shape(
    argv: Sequence[str], loaded: Loaded, *, step_of: StepOf | None = None, notes: Sequence[str] = ()
) -> tuple[ShapeRow, Ranking]:
    """Return the first of the ranking, for `submit --best`. Arguments as of `ask_when`.

    Raises:
        ConfigError: there is nothing to choose from.
        SlurmRefused: Slurm names a time for no shape.
    """
    slurm = loaded.experiment.slurm
    if not slurm.shapes:
        words = f"slurm.shape = {slurm.shape} is chosen already" if slurm.shape else "slurm.shapes states none"
        raise ConfigError(f"--best chooses among the shapes of the experiment, and {words}", "slurm.shapes")
    ranking = ask_when(argv, loaded, step_of=step_of, notes=notes)
    best = ranking.best
    if best is None:
        said = "; ".join(f"{row.name}: {row.answer.word}: {row.answer.why}" for row in ranking.rows)
        words = f"Slurm names a start for no shape, nothing was submitted; choose one: --slurm.shape NAME. {said}"
        raise SlurmRefused(Problem(words, "slurm.shapes"))
    return best, ranking
