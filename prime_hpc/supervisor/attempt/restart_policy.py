"""How a job comes back: one policy for time limits, preemption, lost nodes and crashes.

`decide` is pure; `return_to_queue` asks Slurm, after an attempt has ended and is written down.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config import Experiment, load_run
from prime_hpc.config.sections.slurm import RestartConfig
from prime_hpc.config.site import read_site
from prime_hpc.slurm.client import SlurmError
from prime_hpc.slurm.options import Mode
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.slurm.requeue import PATIENCE_S, RequeueDisabled, requeue_for_good
from prime_hpc.slurm.script import restart_mode
from prime_hpc.store.run_dirs import AttemptRow, SubmissionRecord, known_record

EXIT_AGAIN = 75
"""EX_TEMPFAIL (sysexits.h): the job's exit code when another attempt follows (a successor, queued with afternotok, is
to take over), or when one has begun elsewhere that this job must not disturb."""
LOOK_S = 5.0

FINAL = ("completed", "stopped", "interrupted")
SLURMS_DOING = ("preempted",)
"""Outcomes that say nothing about the run itself: they never count as an attempt without progress."""


def mode_of_run(run_dir: Path) -> Mode:
    """How the run in `run_dir` comes back: as its script says.
    Raises ConfigError: it holds no run, its profile is wrong, or it cannot be placed."""
    experiment, site = load_run(run_dir), read_site(run_dir)
    return restart_mode(experiment, site, place_slurm(experiment, site))


@dataclass(frozen=True)
class Decision:
    """True if the job comes back, and why or why not."""

    again: bool
    why: str


def attempts_without_progress(rows: Sequence[Mapping[str, Any]], *, is_service: bool = False) -> int:
    """How many attempts in a row, counted from the last, ended without a checkpoint newer than they began with.

    Not than the newest there ever was: a run may go on from an earlier step, and of runs below a parent, whose steps
    are counted together, one may be deleted. A service that served to its time limit has done its work, whether or not
    its clients saved. Those before one that somebody ended are not counted, nor is that: it says nothing of the run.
    """
    count, fine = 0, (*SLURMS_DOING, *(("requeued",) if is_service else ()))
    for row in reversed(rows):
        if (row.get("saved_step") or 0) > (row.get("saved_before") or 0) or row.get("outcome") in FINAL:
            break
        if row.get("outcome") not in fine:
            count += 1
    return count


def _too_short(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what to do where the time of each attempt was over before its roles were ready, or before it had saved."""
    if not all("time limit" in (row.get("cause") or "") for row in rows):
        return ""
    if any((row.get("seconds") or {}).get("run", 1.0) for row in rows):
        return "; their time was over before a save was done: a longer slurm.restart.signal_lead_s, or slurm.time"
    return "; their time was over while they started: a longer slurm.time, or a shorter slurm.restart.signal_lead_s"


def _repeats_itself(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the last two attempts saved nothing and ended with one error, word for word, of which the role
    that failed says that it would come again; versions before said nothing of it."""
    cause, last = rows[-1].get("cause"), rows[-2:]
    is_same = len(last) == 2 and all(row.get("cause") == cause and row["outcome"] == "failed" for row in last)
    return is_same and all(row.get("permanent") for row in last) and attempts_without_progress(last) == 2


def since_submitted(run_dir: Path, rows: Sequence[AttemptRow]) -> list[AttemptRow]:
    """Return the attempts since somebody submitted the run last, who has looked at why those before ended. The newest
    is always one: clocks of nodes differ. Raises OSError: when that was cannot be read now."""
    submitted = (known_record(run_dir) or SubmissionRecord()).get("time") or 0.0
    return [row for row in rows if row is rows[-1] or (row.get("began") or 0.0) >= submitted]


def decide_for(experiment: Experiment, run_dir: Path, rows: Sequence[AttemptRow], mode: Mode) -> Decision:
    """`decide` of a run, by all its attempts so far. Raises OSError as `since_submitted`."""
    own = since_submitted(run_dir, rows)
    is_service = experiment.trainer.tinker is not None
    return decide(own, experiment.slurm.restart, mode, is_service=is_service, num_before=len(rows) - len(own))


def decide(
    rows: Sequence[Mapping[str, Any]],
    config: RestartConfig,
    mode: Mode,
    *,
    is_service: bool = False,
    num_before: int = 0,
) -> Decision:
    """Return whether the attempt that `rows` end with is followed by another.

    Args:
        rows: the attempts since the run was submitted, the last one ended.
        is_service: it has no last step, and no work to do where nobody asks.
        num_before: attempts of earlier submissions.
    """
    last = rows[-1]
    outcome = last["outcome"]
    if outcome in FINAL:
        return Decision(False, outcome)
    if mode == "off":
        return Decision(False, "slurm.restart.how = off")
    if last.get("exit_code") == 2:
        return Decision(False, "the config cannot run here: another attempt would fail in the same way")
    if _repeats_itself(rows):
        return Decision(False, "two attempts ended with the same error of what they were given: a third would too")
    num_attempts = num_before + len(rows)
    if num_attempts >= config.max_attempts:
        return Decision(False, f"slurm.restart.max_attempts = {config.max_attempts} attempts were made")
    idle = attempts_without_progress(rows, is_service=is_service)
    if idle > config.max_crashes:
        why = f"{idle} attempts in a row saved nothing new (slurm.restart.max_crashes = {config.max_crashes})"
        return Decision(False, why + _too_short(rows[-idle:]))
    return Decision(True, f"attempt {num_attempts + 1} follows" + (f", {idle} without progress so far" if idle else ""))


def return_to_queue(
    job_id: str,
    mode: Mode,
    num_nodes: int,
    exclude: Sequence[str] = (),
    *,
    restarts: int,
    if_disabled: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Requeue this job, leaving out bad nodes; the caller dies of it soon. False: Slurm refuses.

    While the controller is away it is asked again: a job that ended meanwhile would not come back, and nobody else
    gets its nodes either.

    With `successor` nothing is asked: the exit code releases the job that waits with afternotok.

    Args:
        num_nodes: that the job needs; a homogeneous job that lost a node (--no-kill) would come back smaller. 0: any.
        exclude: nodes that the next attempt must not get.
        if_disabled: called where Slurm requeues no such job at all; returns whether the run comes back otherwise.
        restarts: of the caller's attempt; a job that was started more often meanwhile has another, which is left alone.
    """
    if mode == "successor":
        return True
    end = clock() + PATIENCE_S
    while True:
        try:
            requeue_for_good(job_id, num_nodes, restarts, exclude, clock=clock, sleep=sleep)
            return True
        except RequeueDisabled as error:
            logger.error(f"job {job_id} could not be requeued: {error}")
            return if_disabled()
        except SlurmError as error:
            if not error.is_unreachable or clock() >= end:
                logger.error(f"job {job_id} could not be requeued: {error}")
                return False
            logger.warning(f"job {job_id} is to be requeued as soon as Slurm can be asked: {error}")
            sleep(LOOK_S)
