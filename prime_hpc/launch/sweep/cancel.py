"""`sweep cancel`: what waits leaves the queue, what runs saves and ends.

The points are asked together, by their STOP files, and Slurm about all of them at once: a sweep may have hundreds that
run. No job is ended that does not carry a token of this sweep.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass

from prime_hpc.config.errors import Problem
from prime_hpc.config.run_files import STOP
from prime_hpc.launch.cancel import GONE_TIMEOUT_S, Say, cancel_run
from prime_hpc.launch.how_ended import has_saved
from prime_hpc.launch.monitor.status import PatientAsk
from prime_hpc.launch.sweep.progress import PointView, ask_strictly, look
from prime_hpc.launch.sweep.queue import resolve_pending_submits
from prime_hpc.launch.sweep.state import Sweep, new_submit, read_sweep
from prime_hpc.runtime.clock import Backoff
from prime_hpc.slurm.client import ASK_TIMEOUT_S, SlurmError, run_slurm
from prime_hpc.slurm.hostlist import index_ranges
from prime_hpc.slurm.jobs import JobInfo, jobs
from prime_hpc.slurm.sbatch_errors import SlurmRefused
from prime_hpc.slurm.submission_record import add_to_record, submitting
from prime_hpc.store.run_dirs import read_record

POLL_S, LONGEST_POLL_S = 1.0, 15.0
ASK_EVERY_S = 5.0
_IDS_AT_ONCE = 100
_THREADS = 4


@dataclass
class Cancelled:
    """Result of cancelling the points that were under way."""

    waiting: int
    """Taken out of the queue."""
    saved: int
    """Saved and ended."""
    ended: int
    """Ended without a save of their own."""
    left: list[str]
    """Names of those that are still there."""

    @property
    def is_done(self) -> bool:
        """True if nothing of the sweep waits or runs any more."""
        return not self.left

    def describe(self) -> str:
        """For people."""
        if not (self.waiting or self.saved or self.ended or self.left):
            return "nothing of this sweep waits or runs: nothing to cancel"
        text = f"{self.waiting} taken out of the queue, {self.saved} saved and ended, {self.ended} ended without a save"
        return text + (f"; still there: {', '.join(self.left)} (see squeue)" if self.left else "")

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self) | {"done": self.is_done}


def cancel_sweep(sweep: Sweep, *, save: bool, timeout_s: float, say: Say) -> Cancelled:
    """End every point that waits or runs; `sweep resume` goes on with them.

    Args:
        save: let those that run save first.
        timeout_s: so long they may take; then they are ended all the same.

    Raises:
        SlurmRefused: Slurm cannot be asked; nothing was done.
        ConfigError: the sweep is being submitted right now.
    """
    if here := _points_here(sweep):
        return _cancel_here(sweep, here, save=save, timeout_s=timeout_s, say=say)
    with submitting(sweep.dir):
        sweep = read_sweep(sweep.dir)
        resolve_pending_submits(sweep)
        live = [view for view in look(sweep, ask=ask_strictly) if view.is_under_way]
        if not live:
            return Cancelled(0, 0, 0, [])
        sweep.update(new_submit("cancel", [view.row.index for view in live]), state="sent")
        try:
            return _end(sweep, live, save=save, timeout_s=timeout_s, say=say)
        except SlurmError as error:
            raise SlurmRefused(Problem(str(error), "launch")) from error


def _points_here(sweep: Sweep) -> list[PointView]:
    """Return the points under way, if they run without Slurm; the command that started them may be gone."""
    last = {index: row.kind for index, row in sweep.last_submits().items()}
    if "local" not in last.values():
        return []
    live = [view for view in look(sweep) if view.is_under_way]
    return live if all(last.get(view.row.index) == "local" for view in live) else []


def _cancel_here(sweep: Sweep, before: list[PointView], *, save: bool, timeout_s: float, say: Say) -> Cancelled:
    """Ask the command that runs the points to start no other, and the points to end."""
    (sweep.dir / STOP).touch()
    say(f"asked the points of {sweep.dir}, and the command that runs them, to end")
    for view in before:
        if save:
            (sweep.run_dir(view.row) / STOP).touch()
        else:
            cancel_run(sweep.run_dir(view.row), now=True, timeout_s=timeout_s, say=say)
    left = _wait(sweep, before, timeout_s, PatientAsk(ASK_EVERY_S))
    return _counted(sweep, before, waiting=0, left=left)


def _end(sweep: Sweep, live: Sequence[PointView], *, save: bool, timeout_s: float, say: Say) -> Cancelled:
    infos = _jobs_of(sweep, live)
    pending = [info for info in infos if info.is_waiting]
    _scancel(pending)  # first: nothing new begins meanwhile, no successor takes over
    waiting = {info.job_id for info in pending}
    if waiting:  # those that began before scancel came held nodes
        with suppress(SlurmError):
            waiting -= {info.job_id for info in _jobs_of(sweep, live) if info.nodes}
    running = [view for view in live if view.status.job_id not in waiting]
    _note_cancel(sweep, [view for view in live if view not in running])
    ask = PatientAsk(ASK_EVERY_S)
    if running and save:
        points = f"{len(running)} point{'s' if len(running) > 1 else ''}"
        say(f"asked {points} to save and end; waiting up to {timeout_s:.0f} s")
        for view in running:
            (sweep.run_dir(view.row) / STOP).touch()
        try:
            _wait(sweep, running, timeout_s, ask)
        finally:
            for view in running:  # it would stop the point's next attempt at its first step
                (sweep.run_dir(view.row) / STOP).unlink(missing_ok=True)
    if _end_left(sweep, live, say):
        _note_cancel(sweep, running)
    left = _wait(sweep, live, GONE_TIMEOUT_S, PatientAsk(POLL_S))
    return _counted(sweep, running, waiting=len(live) - len(running), left=left)


def _note_cancel(sweep: Sweep, views: Sequence[PointView]) -> None:
    """Have the records of points that were told to end say so: `status` looks there."""

    def note(view: PointView) -> None:
        if read_record(run_dir := sweep.run_dir(view.row)) is not None:
            add_to_record(run_dir, cancelled=time.time(), successor=None)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(note, views))


def _end_left(sweep: Sweep, live: Sequence[PointView], say: Say) -> bool:
    """End what is left; a controller that does not answer now is asked again. False: it never did."""
    began, pause = time.monotonic(), Backoff(POLL_S, LONGEST_POLL_S)
    while True:
        try:
            _scancel(info for info in _jobs_of(sweep, live) if info.is_active)
        except SlurmError as error:
            if time.monotonic() - began > GONE_TIMEOUT_S:
                say(f"what has not ended by itself is left: {error}")
                return False
        else:
            return True
        time.sleep(pause.next())


def _wait(sweep: Sweep, views: Sequence[PointView], timeout_s: float, ask: PatientAsk) -> list[PointView]:
    """Wait until none of these points is under way; returns those that still are."""
    wanted = {view.row.index for view in views}
    began, pause = time.monotonic(), Backoff(POLL_S, LONGEST_POLL_S)
    while True:
        left = [view for view in look(sweep, ask=ask) if view.row.index in wanted and view.is_under_way]
        if not left or time.monotonic() - began > timeout_s:
            return left
        time.sleep(pause.next())


def _counted(sweep: Sweep, running: Sequence[PointView], *, waiting: int, left: Sequence[PointView]) -> Cancelled:
    """Sort the points that ran by how they ended."""
    names = [view.row.name for view in left]
    wanted = {view.row.index for view in running} - {view.row.index for view in left}
    now = [view for view in look(sweep) if view.row.index in wanted]
    saved = sum(has_saved(sweep.run_dir(view.row), view.status.outcome) for view in now)
    return Cancelled(waiting, saved, len(now) - saved, names)


def _jobs_of(sweep: Sweep, views: Sequence[PointView]) -> list[JobInfo]:
    """Return the jobs of these points and their successors, if they carry a token of theirs. Raises SlurmError."""
    records = [read_record(sweep.run_dir(view.row)) or {} for view in views]
    ids = {str(i) for record in records for i in (record.get("job_id"), record.get("successor")) if i}
    tokens: set[object] = {row.token for row in sweep.submits}
    for record in records:  # a successor that runs has made its own token the record's
        tokens |= {record.get("token"), record.get("successor_token")}
    return [info for key, info in jobs(ids, ASK_TIMEOUT_S).items() if key in ids and info.token in tokens - {None}]


def _scancel(infos: Iterable[JobInfo]) -> None:
    """End jobs, tasks of one array by their ranges. Raises SlurmError."""
    tasks: dict[str, list[int]] = defaultdict(list)
    ids: list[str] = []
    for info in infos:
        base, _, task = info.job_id.partition("_")
        if task:
            tasks[base].append(int(task))
        else:
            ids.append(base)
    for base, numbers in tasks.items():
        for start in range(0, len(numbers), _IDS_AT_ONCE):
            ids.append(f"{base}_[{index_ranges(numbers[start : start + _IDS_AT_ONCE])}]")
    for start in range(0, len(ids), _IDS_AT_ONCE):
        run_slurm(["scancel", *ids[start : start + _IDS_AT_ONCE]], ASK_TIMEOUT_S)
