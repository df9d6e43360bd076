"""The points of a sweep that fit into the queue now (`sweep submit --feed`)."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.launch.sweep.prepare import Job
from prime_hpc.launch.sweep.progress import PointView
from prime_hpc.launch.sweep.queue import NOT_TRIED
from prime_hpc.launch.sweep.report import BAD_POINTS, OK, SLURM_REFUSED, Report
from prime_hpc.launch.sweep.spec import SweepFile
from prime_hpc.launch.sweep.state import Sweep
from prime_hpc.slurm.client import SlurmError, is_queue_full
from prime_hpc.slurm.placement import place_slurm
from prime_hpc.slurm.queue_facts.submit_limits import SubmitLimit, is_over_limit, num_free, queued_parts, submit_limits
from prime_hpc.slurm.script import restart_mode
from prime_hpc.store.run_dirs import read_record

LIMITS_EVERY_S = 300.0
"""After so long limits are read again: they may have changed."""


@dataclass
class Feed:
    """Points still to be sent, and how many of them fit now. Lives as long as the command."""

    file: SweepFile
    todo: set[int] | None = None
    """Points that were to be sent when the command began and are not yet; None before the first round."""
    refused: set[int] = field(default_factory=set)
    """Points that Slurm does not take, however long one waits."""
    is_cancelled: bool = False
    room_is: str = ""
    """How much room there is, and who says so, for people."""
    held_by: str = ""
    """The sweep's own limit, where that alone keeps the next point back."""
    said: str = ""
    """The last words for people."""
    _cancels: set[str] | None = None
    """Tokens of those before the first round; None before it."""
    _invalid: dict[int, str] = field(default_factory=dict)
    _most: int | None = None
    _is_cluster_full: bool = False
    _in_queue: int = 0
    _limits: list[SubmitLimit] = field(default_factory=list)
    _trouble: str = ""
    _read: float = float("-inf")
    _names: tuple[SiteConfig, str | None, str | None] | None = None

    def take(self, sweep: Sweep, jobs: Sequence[Job], views: Sequence[PointView], site: SiteConfig) -> list[Job]:
        """Return the points that are sent in this round, in order.

        Args:
            sweep: its rows get the reasons of points that an earlier round found invalid.
            jobs: points that could be sent; in the first round all that are valid.

        Raises:
            ConfigError: not even one of them can ever fit.
            SlurmError: Slurm cannot be asked.
        """
        for index, reason in self._invalid.items():
            sweep.rows[index] = replace(sweep.rows[index], reason=reason)
        cancels = {row.token for row in sweep.submits if row.kind == "cancel"}
        if self._cancels is None:
            self._cancels = cancels
        elif cancels - self._cancels:
            self.is_cancelled, self.todo = True, set()
            return []
        if self.todo is None:
            self._invalid = {row.index: row.reason for row in sweep.current if row.reason is not None}
        else:
            jobs = [job for job in jobs if job.row.index in self.todo]
        self.todo = {job.row.index for job in jobs}
        if not jobs:
            return []
        slurm = jobs[0].experiment.slurm
        self._names = (site, slurm.account or site.options.account, slurm.qos or site.options.qos)
        room, limit = self.look()
        under_way = [view for view in views if view.is_under_way]
        if room is not None:
            room -= self._to_come(sweep, jobs[0], under_way, site)
        last = sweep.last_submits()
        kinds = [last[view.row.index].kind for view in under_way if view.row.index in last]
        chosen: list[Job] = []
        self.held_by = ""
        for job in jobs:
            slots, kind = _slots(job, site)
            if limit is not None and slots > limit.most:
                words = f"point {job.row.name} takes {slots} of the {limit.most} jobs that {limit.source} allows"
                raise ConfigError(f"{words}: it can never be sent", "slurm")
            at_once = self.file.throttle if kind == "array" else self.file.lanes or self.file.throttle
            has_room, is_held = room is None or slots <= room, at_once is not None and kinds.count(kind) >= at_once
            if has_room and is_held:
                self.held_by = f"throttle or lanes of the sweep: {at_once} at once"
            if not has_room or is_held or (self._most is not None and len(chosen) >= self._most):
                break
            chosen.append(job)
            kinds.append(kind)
            room = None if room is None else room - slots
        return chosen

    def look(self) -> tuple[int | None, SubmitLimit | None]:
        """Return how many more jobs may be submitted, and the limit that says so. Raises SlurmError."""
        assert self._names is not None
        if time.monotonic() - self._read > LIMITS_EVERY_S:
            self._limits, self._trouble = submit_limits(*self._names)
            self._read = time.monotonic()
        parts = queued_parts()
        self._in_queue = len(parts)
        room, limit = num_free(self._limits, parts)
        said = f"{limit.source} allows {limit.most}" if limit else self._trouble or "no limit is known"
        if self._is_cluster_full:
            said = "the whole cluster has as many jobs as it keeps (MaxJobCount)"
        elif limit is None and self._most is not None:
            said = f"Slurm refused more at once, {self._most} are tried next"
        self.room_is = f"{self._in_queue} jobs of yours are in the queue; {said}"
        return room, limit

    def is_full(self) -> bool:
        """Ask anew; True if Slurm says that there is no room; where it cannot be asked, the next round says so."""
        try:
            return self._names is not None and self.look()[0] == 0
        except SlurmError:
            return False

    def _to_come(self, sweep: Sweep, job: Job, under_way: Sequence[PointView], site: SiteConfig) -> int:
        """Slots of successors that jobs under way have not queued yet."""
        slots, _ = _slots(job, site)
        own = len(place_slurm(job.experiment, site).components)
        if slots == own:
            return 0
        records = [read_record(sweep.run_dir(view.row)) for view in under_way]
        return own * sum(record is not None and record.get("successor") is None for record in records)

    def settle(self, report: Report) -> Report:
        """Take note of what became of a round: what Slurm took, what it refuses now, and what it refuses for good.
        Returns the round without what is tried again."""
        assert self.todo is not None
        bad = [part for part in report.parts if part["error"]]
        too_many = [part for part in bad if is_over_limit(part["error"])]
        sent = _points(part for part in report.parts if not part["error"])
        most = max((len(part["points"]) for part in too_many), default=0)
        again: list[dict[str, Any]] = []
        self._is_cluster_full = any(is_queue_full(part["error"]) for part in too_many)
        if too_many and (self._in_queue or sent or most > 1 or self._is_cluster_full):
            self._most, self._read = max(1, most // 2), float("-inf")
            again = [part for part in bad if part in too_many or part["error"].startswith(NOT_TRIED)]
        elif self._most is not None:
            self._most *= 2
        waiting = _points(again)
        self.refused |= _points(bad) - waiting
        self._invalid |= {row.index: row.reason for row in report.invalid if row.reason is not None}
        self.todo -= ({job.row.index for job in report.jobs} | set(self._invalid)) - waiting
        return replace(
            report,
            parts=[part for part in report.parts if part not in again],
            jobs=[job for job in report.jobs if job.row.index in sent],
            code=SLURM_REFUSED if self.refused else BAD_POINTS if self._invalid else OK,
        )


def _points(parts: Iterable[dict[str, Any]]) -> set[int]:
    return {index for part in parts for index in part["points"]}


def _slots(job: Job, site: SiteConfig) -> tuple[int, str]:
    """Jobs that Slurm counts for a point, its successor's too, and the kind of its submit."""
    placement = place_slurm(job.experiment, site)
    lives = 2 if restart_mode(job.experiment, site, placement) == "successor" else 1
    return lives * len(placement.components), "array" if placement.abilities.takes_arrays else "job"
