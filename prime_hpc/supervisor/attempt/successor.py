"""The job that takes over from this one (`slurm.restart.how: successor`), where Slurm does not take it at once.

At a full submit limit sbatch refuses it, and a run without one dies at its time limit: so it is asked again, at a low
rate while the run goes on and once more at the attempt's end. What keeps it out stands in the submit record
(`no_successor`), where `status` finds it, and is a figure of the alarms (`run.no_successor_s`).
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from prime_hpc.slurm import sbatch_errors
from prime_hpc.slurm.client import SBATCH_TIMEOUT_S, SlurmError
from prime_hpc.slurm.queue import queue_successor
from prime_hpc.slurm.queue_facts.submit_limits import is_over_limit
from prime_hpc.slurm.submission_record import write_record
from prime_hpc.store.run_dirs import known_record, read_record

TICK_S = 1.0
NEAR_END_S = 10.0
"""Pause between two tries shortly before the time limit."""
LAST_TRIES_S = 300.0
"""At the attempt's end, with idle nodes, a slot is waited for no longer."""
LEAVE_S = 15.0
"""So long before its time limit a job stops trying: it still has to say how it ended."""
FIRST_TRY_S = 10.0
"""At an attempt's begin, with idle nodes, sbatch is not waited for longer: it is asked again while the run goes on."""
LEAST_TRY_S = 5.0
"""So long a try may take at least: at a full queue sbatch waits by itself, beyond the time limit if it may."""
CLOSE_S = 90.0
"""A try that is under way when the attempt ends is waited for: longer than squeue and sbatch may take."""


@dataclass(frozen=True)
class Refusal:
    """Why no successor waits."""

    words: str
    is_final: bool
    """Slurm would say so at any time; otherwise a limit, or nobody answered: waiting mends both."""


def try_successor(run_dir: Path, job_id: str, timeout_s: float = SBATCH_TIMEOUT_S) -> Refusal | None:
    """Have the successor wait behind a job; one that does already is kept. Noted in the submit record.
    `job_id`: of the job that runs now. `timeout_s`: of sbatch.
    Returns why none waits; None: one does."""
    try:
        queue_successor(run_dir, job_id, timeout_s=timeout_s)
        return None
    except (SlurmError, OSError) as error:  # the run goes on without
        is_silent = isinstance(error, SlurmError) and error.is_unreachable
        if is_silent and (read_record(run_dir) or {}).get("successor"):
            return None  # as far as anybody can tell now
        refusal = _refusal(error)
    try:
        write_record(run_dir, successor=None, no_successor=refusal.words)
    except OSError as error:
        logger.warning(f"the submit record could not be written: {error}")
    return refusal


def _refusal(error: SlurmError | OSError) -> Refusal:
    if not isinstance(error, SlurmError) or error.is_unreachable or error.is_full:
        return Refusal(str(error), is_final=False)
    if is_over_limit(error.stderr):
        return Refusal(sbatch_errors.error_lines(error.stderr), is_final=False)
    (problem,) = sbatch_errors.refusal(error, "packed").problems  # what to change, too
    return Refusal(f"{problem.key}: {problem.message.removeprefix(sbatch_errors.REFUSED)}", is_final=True)


class SuccessorWatch:
    """Asks again for a successor that is not there, from its making until one waits or `close`.

    Args:
        lead_s: of the warning before the time limit; from twice that on it is tried every `NEAR_END_S`.
        time_left: seconds to the time limit; None: unknown or unlimited.
        tick_s: between two looks at the clock.
    """

    def __init__(
        self,
        run_dir: Path,
        job_id: str,
        *,
        every_s: float,
        lead_s: float,
        time_left: Callable[[], float | None],
        tick_s: float = TICK_S,
    ) -> None:
        self._run_dir, self._job_id = run_dir, job_id
        self._every_s, self._lead_s, self._time_left, self._tick_s = every_s, lead_s, time_left, tick_s
        self._missing_since: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="successor", daemon=True)
        self._thread.start()

    @property
    def missing_s(self) -> float:
        """How long no successor has waited, seconds; 0: one does."""
        since = self._missing_since
        return 0.0 if since is None else max(time.monotonic() - since, self._tick_s)

    def close(self) -> None:
        """Ask no more; a try that is under way is waited for, or a job that ends for good would leave a successor."""
        self._closed.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        with suppress(OSError):  # it cannot be read now: one that waits is found as soon as it is tried
            record = known_record(self._run_dir)
            if record is None or record.get("successor"):
                return
        began = self._missing_since = time.monotonic()
        known: Refusal | None = None
        tried = began  # the job has tried it a moment ago
        while not self._closed.wait(self._tick_s):
            if known is not None and known.is_final:
                return  # once more at the attempt's end
            if time.monotonic() - tried < self._pause():
                continue
            if (read_record(self._run_dir) or {}).get("cancelled"):
                return
            known, before = try_successor(self._run_dir, self._job_id), known
            tried = time.monotonic()
            if known is None:
                self._missing_since = None
                logger.info(f"a successor waits behind this job now, after {tried - began:.0f} s")
                return
            if before is None or known.words != before.words:
                logger.warning(self._told(known))

    def _pause(self) -> float:
        left = self._time_left()
        is_near = left is not None and left < 2 * self._lead_s
        return min(self._every_s, NEAR_END_S) if is_near else self._every_s

    def _told(self, refusal: Refusal) -> str:
        when = "once more at the attempt's end" if refusal.is_final else f"every {self._every_s:g} s"
        return f"no successor waits behind this job: {refusal.words}; tried again {when}"


def require_successor(
    run_dir: Path,
    job_id: str,
    ends_at: float | None,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Refusal | None:
    """At an attempt's end: make sure that the job which is to go on waits, or the run is over.

    Args:
        job_id: of this job, whose nodes are idle meanwhile.
        ends_at: its time limit, epoch seconds; None: unknown or unlimited.

    Returns:
        why none waits: Slurm refuses it for good, or had no room for it in time; None: one does.
    """
    end = time.monotonic() + min(LAST_TRIES_S, float("inf") if ends_at is None else ends_at - LEAVE_S - time.time())
    left = end - time.monotonic()
    while (refusal := try_successor(run_dir, job_id, max(LEAST_TRY_S, min(left, SBATCH_TIMEOUT_S)))) is not None:
        left = end - time.monotonic()
        if refusal.is_final or left <= 0:
            logger.error(f"the job does not come back, for no successor waits behind it: {refusal.words}")
            return refusal
        logger.warning(f"no successor waits yet, and this job ends: tried for {left:.0f} s more: {refusal.words}")
        sleep(min(NEAR_END_S, left))
    return None
