"""The job's time limit, which its owner or an admin may change while it runs: `scontrol update TimeLimit=...`; and the
end of the reservation that it runs in."""

import random
import re
import threading
import time
from collections.abc import Sequence

from loguru import logger

from prime_hpc.slurm.client import ASK_TIMEOUT_S, ShownJob, SlurmError, field, first_end, run_slurm, show_job
from prime_hpc.slurm.times import parse_time

LOOK_S = 150.0
FIRST_LOOK_S = 15.0
"""Longest wait before the first one."""
SLACK_S = 10.0
"""Slurm's own rounding of an end."""
CONFIG_S = 3600.0
"""So long the site's configuration is taken to be what it was: all of it is sent for the one line that is read."""


class TimeLimit:
    """When the job has to end, as Slurm says it now. `start` and `stop` around the attempt.

    Args:
        ends_at: as read at the start, epoch seconds; None: unknown or unlimited.
        look_s: between two questions.
    """

    def __init__(self, job_id: str, ends_at: float | None, look_s: float = LOOK_S) -> None:
        self._job_id = job_id
        self._look_s = look_s
        self._stated: str | None = None
        self._overrun: tuple[float, float | None] | None = None
        """When it was asked for, and what it was."""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.ends_at = ends_at
        self.reserved_until: float | None = None
        """When Slurm ends the job with its reservation, without a warning; None: never, or it is not known."""

    def start(self) -> None:
        """Begin to ask. Again: nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="time-limit", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._over.set()

    def _watch(self) -> None:
        # soon: a limit that changes before the first look would pass for one that was so all along; not at once, nor
        # in step: the jobs of a sweep began together
        wait_s = random.uniform(0.0, FIRST_LOOK_S)
        while not self._over.wait(wait_s):
            self.look()
            wait_s = self._look_s * random.uniform(0.8, 1.2)

    def look(self, timeout_s: float = ASK_TIMEOUT_S) -> None:
        """Ask once. Where Slurm does not answer, nothing changes."""
        try:
            parts = show_job(self._job_id, timeout_s)
        except SlurmError as error:
            logger.debug(f"whether the time limit has changed is unknown: {error}")
            return
        self.update(parts)
        self._look_at_reservation(parts, timeout_s)

    def _look_at_reservation(self, parts: Sequence[ShownJob], timeout_s: float) -> None:
        try:
            ends = [self._end_of(name, timeout_s) for name in {part.reservation for part in parts} if name]
        except SlurmError as error:
            logger.debug(f"when the job's reservation ends is unknown: {error}")
            return
        self.reserved_until = min((end for end in ends if end is not None), default=None)

    def _end_of(self, reservation: str, timeout_s: float) -> float | None:
        """Return when the site ends the jobs of a reservation, epoch seconds; None: never, or it is not known.
        Raises SlurmError: Slurm does not say, or there is no such reservation (any more)."""
        shown = run_slurm(["scontrol", "show", "reservation", "--oneliner", reservation], timeout_s)
        end, overrun_s = parse_time(field(shown, "EndTime")), self._overrun_s(timeout_s)
        return None if end is None or overrun_s is None else end + overrun_s

    def _overrun_s(self, timeout_s: float) -> float | None:
        """Return how long the site lets jobs run on behind their reservation's end; None: for ever, or it is not
        known. Raises SlurmError: Slurm does not say."""
        if self._overrun is None or time.monotonic() - self._overrun[0] >= CONFIG_S:
            config = run_slurm(["scontrol", "show", "config"], timeout_s)
            stated = re.search(r"^ResvOverRun\s*=\s*(\d+)", config, re.MULTILINE)  # else UNLIMITED
            self._overrun = (time.monotonic(), 60.0 * int(stated[1]) if stated else None)
        return self._overrun[1]

    def update(self, parts: Sequence[ShownJob]) -> None:
        """Take what Slurm says of the job's components.

        A preemption with grace moves the end to before the limit and leaves the limit: that is not for here. The time
        in which a job is suspended moves the end to later.
        """
        if parts[0].state != "RUNNING":
            return
        stated, end = ", ".join(part.time_limit for part in parts), first_end(parts)
        known, before, self._stated = self.ends_at, self._stated, stated
        is_new = before is not None and stated != before
        if not is_new and (end is None or (known is not None and end < known + SLACK_S)):
            return
        if known == end or (end is not None and known is not None and abs(end - known) < SLACK_S):
            return
        self.ends_at = end
        when = "never" if end is None else f"at {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(end))}"
        what = "is known now" if known is None and before is None else "has changed"
        logger.info(f"the time limit {what} ({stated}): the job ends {when}")
