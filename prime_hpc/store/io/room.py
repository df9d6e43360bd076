"""Waiting for room: what a full disk or a quota has refused is written again, as a whole, when there is some. So is
what met an error of the file system that passes (`retry_reads.as_unreadable`).

    wait = RoomWait("batch 12", paths.rollouts, limit_s)
    while True:
        try:
            write()
        except NoRoom as error:
            time.sleep(wait.next_pause(error))
            ... for as long as not wait.has_room ...
        else:
            wait.over()

Not the single call goes on where it failed: a network file system tells of a full disk when it is to make durable what
it took before, and has dropped that by then.
"""

import time
from collections.abc import Callable
from pathlib import Path

from loguru import logger

from prime_hpc.runtime import activity
from prime_hpc.store.errors import NoRoom, StoreError, Unreadable
from prime_hpc.store.io.disk import free_bytes, size_text
from prime_hpc.store.io.retry_reads import as_unreadable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0
SAY_EVERY_S = 30.0
WAITS = "cannot be written now"
"""In the words of whoever cannot go on meanwhile."""


class RoomWait:
    """One writer's patience. A refusal after `over` begins a new wait."""

    def __init__(self, what: str, where: Path, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Args:
        what: is to be written, for people.
        where: a path on its file system.
        limit_s: longest wait; `supervisor.write_timeout_s`.
        """
        self._what, self.where, self._limit_s, self._clock = what, where, limit_s, clock
        self._began: float | None = None
        self._pause, self._next_word, self._needs = FIRST_PAUSE_S, 0.0, 0

    def next_pause(self, error: NoRoom | Unreadable) -> float:
        """Return for how many seconds to pause before the next look; says so in the log, `status` and `why`.
        Raises NoRoom: the time is over."""
        now = self._clock()
        if self._began is None:
            self._began, self._pause, self._next_word = now, FIRST_PAUSE_S, now
        self._needs = error.needs if isinstance(error, NoRoom) else 0
        left_s = self._began + self._limit_s - now
        if left_s <= 0:
            waited = NoRoom(f"{error}; waited {now - self._began:.0f} s (supervisor.write_timeout_s)", self._needs)
            self._end()
            raise waited from error
        activity.blocked(self._what, f"{self._what} {WAITS}: {error}")
        if now >= self._next_word:
            self._next_word = now + SAY_EVERY_S
            logger.warning(f"{self._what} {WAITS}: {error}; tried again, for {left_s:.0f} s at most")
        pause, self._pause = min(self._pause, left_s), min(2 * self._pause, LONGEST_PAUSE_S)
        return pause

    @property
    def has_room(self) -> bool:
        """Tell whether a next try is worth it: as much is free as it takes, or nobody can tell, as of a quota."""
        return has_room(self.where, self._needs)

    def over(self) -> None:
        """Note that it is written."""
        if self._began is not None:
            logger.info(f"{self._what} could be written after {self._clock() - self._began:.0f} s")
            self._end()

    def give_up(self, why: str) -> None:
        """Note that nobody waits for it any more."""
        if self._began is not None:
            logger.warning(f"{self._what} is not written: {why}")
            self._end()

    def _end(self) -> None:
        self._began = None
        activity.blocked(self._what, "")


def has_room(where: Path, needs: int) -> bool:
    """Tell whether so many bytes are free on a path's file system, as far as that is known."""
    try:
        return free_bytes(where) >= needs
    except OSError:
        return True


def as_refused(error: StoreError | OSError) -> NoRoom | Unreadable | None:
    """Return why a write of this process failed, where it may be tried again; else None."""
    if isinstance(error, NoRoom | Unreadable):
        return error
    return NoRoom(str(error)) if as_unreadable(error) is not None else None


def takes(error: NoRoom, num_bytes: int) -> NoRoom:
    """Return the same with how much the whole of it takes, which is looked for before the next try."""
    return NoRoom(f"{error}; it takes about {size_text(num_bytes)}", num_bytes)
