"""How the points of a sweep are: each run's own status, and what the sweep alone knows."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prime_hpc.config.errors import Problem
from prime_hpc.launch.monitor.run_facts import UNDER_WAY, Queue, RunStatus
from prime_hpc.launch.monitor.status import Ask, ask_slurm, collect
from prime_hpc.launch.sweep.state import PointRow, SubmitRow, Sweep
from prime_hpc.slurm.sbatch_errors import SlurmRefused

if TYPE_CHECKING:
    from collections.abc import Iterable

RERUN = ("missing", "failed", "lost")
"""States of points that `sweep submit` sends."""
RESUME = (*RERUN, "stopped")
"""States of points that `sweep resume` sends."""


@dataclass
class PointView:
    """One point, now."""

    row: PointRow
    state: str
    """invalid, missing, or a run's state: submitting, pending, starting, running, saving, ending, requeued, completed,
    failed, stopped, lost, unreadable."""
    status: RunStatus
    note: str = ""

    @property
    def is_under_way(self) -> bool:
        """True if its job waits or runs."""
        return self.state in UNDER_WAY

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the run's status under the point's name and values."""
        return {
            **self.status.as_dict(),
            "index": self.row.index,
            "id": self.row.id,
            "name": self.row.name,
            "values": self.row.values,
            "state": self.state,
            "note": self.note,
        }


def look(sweep: Sweep, *, ask: Ask = ask_slurm) -> list[PointView]:
    """Every current point, in the order of their indices. Slurm is asked once."""
    rows = sweep.current
    statuses, _ = collect((sweep.run_dir(row) for row in rows), sweep.dir, ask=ask)
    by_path = {status.path: status for status in statuses}
    sent = sweep.last_submits()
    newest = {index: s.kind for s in sweep.submits for index in s.points}
    views = []
    for row in rows:
        status = by_path[str(sweep.run_dir(row))]
        state, note = _state(row, status, sent.get(row.index), newest.get(row.index) == "cancel")
        views.append(PointView(row, state, status, note))
    return views


def _state(row: PointRow, status: RunStatus, sent: SubmitRow | None, is_cancelled: bool) -> tuple[str, str]:
    """State and note of a point.

    Args:
        sent: the last job it was sent as.
        is_cancelled: whether the sweep has cancelled it since.
    """
    if status.state == "completed" or status.is_under_way:
        return status.state, status.note
    if row.reason is not None:
        return "invalid", row.reason
    if sent is not None and sent.state == "sending":
        return "submitting", "sbatch's answer was never written down; the next submit finds out"
    if is_cancelled:
        return "stopped", "cancelled"
    if status.state == "not started":
        if sent is not None and sent.state == "failed":
            return "failed", sent.error or "it could not be submitted"
        return "missing", ""
    return status.state, status.note


def ask_strictly(wanted: set[str], by_token: bool) -> Queue:
    """Slurm's answer, for those who act on it: without one a point that runs could be taken for lost.
    Raises SlurmRefused: Slurm cannot be asked."""
    queue = ask_slurm(wanted, by_token)
    if queue.trouble:
        text = "points were sent to Slurm, and whether they still run cannot be asked; nothing was changed"
        raise SlurmRefused(Problem(f"{text}. {queue.trouble}", "launch"))
    return queue


def counted(views: "Iterable[PointView]") -> str:
    """`2 running, 4 pending`: how many are in each state, in the order of a run."""
    counts = Counter(view.state for view in views)
    order = ("invalid", "missing", *UNDER_WAY, "completed", "stopped", "failed", "lost", "unreadable")
    return ", ".join(f"{counts[state]} {state}" for state in order if counts[state])
