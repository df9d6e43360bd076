"""Requests to a running attempt to save or to end: signals, the time limit, and the files SAVE and STOP.

The supervisor polls `Controls` at every tick; it decides nothing itself but what kind of ending was asked for.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from loguru import logger

from prime_hpc.config.run_files import SAVE, STOP
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.client import SlurmError
from prime_hpc.slurm.termination import (
    AT_LIMIT,
    END_TIMEOUT_S,
    JobLog,
    cancelled_component,
    granted_until,
    why_terminated,
)
from prime_hpc.slurm.time_limit import TimeLimit
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files
from prime_hpc.supervisor.attempt.restart_policy import FINAL
from prime_hpc.supervisor.stalls.collect import WHY

LOOK_S = 2.0
SAVE_BUDGET_S = 600.0
"""Longest wait for a save that nothing else limits."""
LIMIT_MARGIN_S = 10.0
CANCELLED_BUDGET_S = 10.0
"""Left to a save that is under way when the job is cancelled: KillWait after the signal (30 s) nothing is left."""


@dataclass(frozen=True)
class StopRequest:
    """How and why the attempt is to end."""

    reason: str
    outcome: str
    """Of the attempt's row: stopped, interrupted, requeued, preempted, failed."""
    code: int
    save: bool
    budget_s: float
    """How long the workers may take to save and end."""
    by_slurm: bool = False
    """Slurm starts the job again by itself."""
    lost_nodes: tuple[str, ...] = ()
    """Nodes whose loss is the reason."""


class Stop(NamedTuple):
    """An end that is under way: the workers save."""

    request: StopRequest
    deadline: float
    """By the supervisor's clock."""


class Controls:
    """Everything that may ask. `install` and `restore` around the attempt.

    Args:
        run_dir: where people put SAVE and STOP.
        allocation: Slurm's, or the run's pods; None on one machine.
        lead_s: how long before it the attempt has to be saving (`slurm.restart.signal_lead_s`).

    `needs_s` tells what one more step and a save take, as measured so far, seconds.
    """

    def __init__(
        self,
        run_dir: Path,
        allocation: Allocation | None,
        lead_s: float,
        needs_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._run_dir = run_dir
        self._allocation = allocation
        by_slurm = allocation is not None and allocation.by_slurm
        self._limit = TimeLimit(allocation.job_id, allocation.ends_at) if allocation and by_slurm else None
        self._began = time.time()
        self._of_slurm: StopRequest | None = None
        self._log = JobLog()
        self._warned = self._asked_at_warning = self._saves_in_doubt = False
        self._asking_s = 0.0
        self._saved_for: float | None = None
        """The end of the reservation before which a save was asked for."""
        self._lead_s = lead_s
        self.needs_s = needs_s
        self._signals: list[int] = []
        self._previous: dict[int, object] = {}
        self._terminals: list[int] = []
        """File numbers of this process's output that were a terminal at `install`."""
        self._next_look = self._next_look_for_why = 0.0
        self._asked_to_stop: str | None = None
        self._taken: set[str] = set()
        """Files that were heeded and are still there."""
        self.num_saves = 0
        """How often a save was asked for after which the run goes on: by SAVE, or by a warning in doubt."""
        self.is_asked_why = False
        """WHY was found, and nobody has taken note."""

    def install(self) -> None:
        """Listen to signals, and to changes of the limit; what came since an earlier `install` is not forgotten."""
        if self._limit is not None:
            self._limit.start()
        if self._previous:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._previous[number] = signal.signal(number, self._on_signal)
        if self._allocation is None and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup ignores it
            self._terminals = [number for number in (1, 2) if os.isatty(number)]
            self._previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_hangup)

    def restore(self) -> None:
        """Put the handlers back as they were."""
        if self._limit is not None:
            self._limit.stop()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    @property
    def _ends_at(self) -> float | None:
        """Epoch seconds of the time limit as it is now; None: unknown or unlimited."""
        return None if self._limit is None else self._limit.ends_at

    @property
    def force_requested(self) -> bool:
        """True if somebody asked a second time: no more patience. A second warning (SIGUSR1) says nothing new."""
        again = [number for number in self._signals[1:] if number != signal.SIGUSR1]
        return self._signals.count(signal.SIGINT) > 1 or (self._allocation is None and bool(again))

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        """Write no more to a terminal that was closed, which would raise, and end."""
        for gone in (one for one in self._terminals if not os.isatty(one)):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, gone)
            os.close(null)
        self._on_signal(number, frame)

    def note_warning(self, number: int = signal.SIGTERM) -> None:
        """Note a step's signal: with a grace time Slurm tells the steps of a preemption, the batch process not; and
        `scancel -s USR1` without `--batch` goes to the steps alone."""
        if number != signal.SIGUSR1:
            self._warned = True
        elif number not in self._signals:
            self._signals.append(number)

    def ask_to_stop(self, reason: str) -> None:
        """Somebody of this process wants the run to save and end. Any thread."""
        self._asked_to_stop = self._asked_to_stop or reason

    @property
    def time_left_s(self) -> float | None:
        """Seconds to the time limit; None: unknown or unlimited."""
        return None if self._ends_at is None else self._ends_at - time.time()

    def take_asking_s(self) -> float:
        """Return the seconds that asking Slurm took since the last call: a controller that is slow holds nobody up."""
        seconds, self._asking_s = self._asking_s, 0.0
        return seconds

    @contextmanager
    def _asking(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._asking_s += time.monotonic() - began

    def was_stopped(self, seconds: float) -> None:
        """Move the end by the time that the job was suspended, as Slurm has: it did not count."""
        if self._allocation is not None and self._limit is not None and self._limit.ends_at is not None:
            end = None
            with suppress(SlurmError), self._asking():
                end = granted_until(self._allocation.job_id)
            self._limit.ends_at = end if end is not None else self._limit.ends_at + seconds
            logger.info(f"the job's time limit is {self._limit.ends_at - time.time():.0f} s away")

    def poll(self) -> StopRequest | None:
        """Return what was asked for since the start, if anything; asked again, the same."""
        if self._signals:
            return self.cancelled() or self._of_signal(self._signals[0])
        if self._asked_to_stop is not None:
            return self._of_request()
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + LOOK_S
        if self._warned and (request := self._of_grace()) is not None:
            return request
        self._save_before_reservation_ends()
        return self._of_files() or self._of_limit()

    def cancelled(self, outcome: str | None = None) -> StopRequest | None:
        """Return the end that a scancel asks for, whatever was asked for before it.
        `outcome`: of the end that is under way; one after which the job does not come back is left as it is.
        None: the job was not cancelled."""
        is_slurms = self._allocation is not None and self._allocation.by_slurm
        if not is_slurms or outcome in FINAL or signal.SIGTERM not in self._signals:
            return None
        request = self._of_signal(signal.SIGTERM)
        return replace(request, budget_s=CANCELLED_BUDGET_S) if request.outcome == "interrupted" else None

    def final_request(self, outcome: str | None = None) -> StopRequest | None:
        """Return an end after which the job does not come back, whatever else the attempt ends of: a scancel, Ctrl-C,
        or what the file STOP, which is looked for, or an alarm has asked for. `outcome`: as for `cancelled`."""
        if outcome in FINAL:
            return None
        if (cancel := self.cancelled()) is not None:
            return cancel
        if self._allocation is not None and signal.SIGINT in self._signals:
            return self._of_signal(signal.SIGINT)
        self._look_for_stop(self._names())  # `poll` looks for none once a signal has come, nor at the very end
        return self._of_request()

    def stop_or_cancel(self, stop: Stop, now: float) -> Stop:
        """Return the end that is under way; a scancel that came since takes its place, and Slurm may have put the job
        back into the queue meanwhile. Looks for WHY, as `poll` does no more: people ask about a save that takes
        long."""
        request = stop.request
        if time.monotonic() >= self._next_look_for_why:  # `poll` moves its own on, with a grace time too
            self._next_look_for_why = time.monotonic() + LOOK_S
            self._look_for_why(self._names())
        cancel = self.cancelled(request.outcome)
        if cancel is None:
            is_again = self._of_slurm is not None and self._of_slurm.by_slurm
            return stop._replace(request=replace(request, by_slurm=True)) if is_again else stop
        logger.warning(f"{cancel.reason}: the save under way has {cancel.budget_s:.0f} s more, the job stays ended")
        cancel = replace(cancel, reason=f"{cancel.reason}; before that: {request.reason}")
        return Stop(cancel, min(stop.deadline, now + cancel.budget_s))

    def _of_signal(self, number: int) -> StopRequest:
        name = signal.Signals(number).name
        if number == signal.SIGUSR1:
            near_s = 3 * self._lead_s + 60
            left = self.time_left_s
            if self._limit is not None and not self._asked_at_warning and (left is None or left > near_s):
                self._asked_at_warning = True  # every tick comes here, while the save is under way, too
                with self._asking():  # somebody may have shortened it; in a grace time there is no time to wait long
                    self._limit.look(END_TIMEOUT_S)
                left = self.time_left_s
            if left is not None and left > near_s:
                reason = f"warned by {name} (a preemption, or scancel -s)"
                return StopRequest(reason, "preempted", 0, True, self._lead_s)
            words = "" if left is None else f", {left:.0f} s before the time limit"
            return StopRequest(f"warned by {name}{words}", "requeued", 0, True, self._budget())
        if number == signal.SIGINT or self._allocation is None:
            code = 130 if number == signal.SIGINT else 128 + number
            return StopRequest(f"interrupted by {name}", "interrupted", code, False, 0.0)
        if not self._allocation.by_slurm:
            reason = f"told to end by {name} (eviction, a drained node, or the Job was deleted)"
            return StopRequest(reason, "preempted", 128 + number, True, self._budget())
        if self._of_slurm is None:  # asked once: the answer is about the moment of the signal
            job, said = self._allocation, self._log.words()
            with self._asking():
                end = why_terminated(job.job_id, job.restarts, self._began, self._ends_at, job.all_hosts, said)
            save = end.outcome not in ("interrupted", "node_lost")
            is_reserved = end.reason == AT_LIMIT and self._saved_for is not None and time.time() >= self._saved_for
            reason = "its reservation ended before everything was saved" if is_reserved else end.reason
            self._of_slurm = StopRequest(
                reason, end.outcome, 128 + number, save, self._budget(), end.by_slurm, end.nodes
            )
        return self._of_slurm

    def _names(self) -> set[str]:
        """Names in the run directory: NFS may cache the miss of a lookup."""
        try:
            return {path.name for path in self._run_dir.iterdir()}
        except OSError as error:
            logger.warning(f"{self._run_dir} cannot be listed: {error}")
            return set()

    def _take(self, name: str, names: set[str]) -> bool:
        """Return whether a file asks for something, and remove it; one that cannot be removed asks once."""
        is_known = name in self._taken
        if name not in names:
            if names:  # the directory can be listed
                self._taken.discard(name)
            return False
        self._taken.add(name)
        try:
            files.remove_file(self._run_dir / name)
        except (StoreError, OSError) as error:
            if not is_known:
                logger.warning(f"{self._run_dir / name} is heeded, but cannot be removed: {error}")
        else:
            self._taken.discard(name)
        return not is_known

    def _look_for_stop(self, names: set[str]) -> None:
        if self._take(STOP, names):
            self.ask_to_stop("the file STOP was found")

    def _look_for_why(self, names: set[str]) -> None:
        if self._take(WHY, names):
            self.is_asked_why = True

    def _of_files(self) -> StopRequest | None:
        names = self._names()
        if self._take(SAVE, names):
            self.num_saves += 1
        self._look_for_why(names)
        self._look_for_stop(names)
        return self._of_request()

    def _of_request(self) -> StopRequest | None:
        """Return what a file that is gone, or this process, has asked for: that holds until the attempt is over."""
        reason = self._asked_to_stop
        return None if reason is None else StopRequest(reason, "stopped", 0, True, self._budget())

    def _of_grace(self) -> StopRequest | None:
        """Notice a preemption with grace: it moves the end of the job, and says nothing else. Or the end of one
        component."""
        job = self._allocation
        if job is not None and not job.by_slurm:
            return StopRequest("a pod of the run is told to end", "preempted", 0, True, self._budget())
        end, is_at_limit = None, self._ends_at is not None and time.time() >= self._ends_at - LIMIT_MARGIN_S
        try:
            with self._asking():
                if job is not None and job.is_het and not is_at_limit:
                    gone = cancelled_component(job.job_id, job.restarts, self._began, job.all_hosts)
                    if gone is not None:
                        return StopRequest(f"{gone} was cancelled (scancel)", "interrupted", 143, True, self._budget())
                end = granted_until(job.job_id) if job is not None else None
        except SlurmError as error:
            logger.warning(f"whether the job is preempted, with a grace time, is asked again: {error}")
            if not self._saves_in_doubt:  # Slurm may stay silent until the grace is over
                self._saves_in_doubt = True
                self.num_saves += 1
            return None
        if end is None or (self._ends_at is not None and end > self._ends_at - LIMIT_MARGIN_S):
            self._warned = self._saves_in_doubt = False
            return None
        left = end - time.time()  # the questions took time
        return StopRequest(f"preempted, with {left:.0f} s of grace", "preempted", 0, True, max(5.0, left))

    def _save_before_reservation_ends(self) -> None:
        """Have a save made, once, and go on: a job that came back now would get the rest of the reservation again."""
        end = None if self._limit is None else self._limit.reserved_until
        if end is None or end == self._saved_for or end - time.time() > self._near_s:
            return
        self._saved_for = end
        if self._ends_at is None or end < self._ends_at:
            logger.warning(f"the job's reservation ends in {end - time.time():.0f} s, and the job with it: saving")
            self.num_saves += 1

    @property
    def _near_s(self) -> float:
        """So long before its end an attempt has to be saving."""
        return max(min(self._lead_s, 60.0), self.needs_s() + LIMIT_MARGIN_S)

    def _of_limit(self) -> StopRequest | None:
        """Ask for the end by the measured time: the signal comes a minute early or late, and its lead is a guess."""
        if self._ends_at is None:
            return None
        left = self._ends_at - time.time()
        if left > self._near_s:
            return None
        reason = f"{left:.0f} s before the time limit: one more step and a save may not fit"
        return StopRequest(reason, "requeued", 0, True, self._budget())

    def _budget(self) -> float:
        left = self.time_left_s
        if self._allocation is not None and self._allocation.notice_s is not None:
            return max(5.0, min(SAVE_BUDGET_S, self._allocation.notice_s - LIMIT_MARGIN_S))
        return SAVE_BUDGET_S if left is None else max(5.0, min(SAVE_BUDGET_S, left - LIMIT_MARGIN_S))
