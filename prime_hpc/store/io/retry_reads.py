"""Waiting while something cannot be read: a server that fails over, a client that was evicted, a mount that comes late.

One `Patience` per start of an attempt: its deadline is for all that the start reads together. What was read and is
wrong (`ArtifactError`) is no matter of patience, and passes through.
"""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from loguru import logger

from prime_hpc.store.errors import PROOFS, InDoubt, NoRoom, StoreError, Unreadable

T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 15.0
SAY_EVERY_S = 30.0
SLICE_S = 0.2
"""How soon somebody who wants the process to end is heard."""
FILE_S = 30.0
"""How long `patiently` waits."""


class Patience:
    """Tries reads again until they succeed, at most `limit_s` seconds of waiting in all."""

    def __init__(
        self,
        limit_s: float,
        *,
        on_wait: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        limited_by: str | None = "supervisor.read_timeout_s",
    ) -> None:
        """Args:
        on_wait: called all along while it waits; what it raises ends the wait.
        limited_by: key that sets the limit; None: there is none.
        """
        self._limited_by = f" ({limited_by})" if limited_by is not None else ""
        self.limit_s, self._left_s = limit_s, limit_s
        self._on_wait, self._clock, self._sleep = on_wait, clock, sleep
        self._next_word = 0.0

    def __call__(self, read: Callable[[], T]) -> T:
        """Return what `read` returns. It may be called many times.
        Raises Unreadable, NoRoom: it could not be read, or not write, until the deadline; says for how long it was
        tried."""
        pause = FIRST_PAUSE_S
        while True:
            trouble: StoreError | None
            try:
                return read()
            except NoRoom as error:  # of what is written down in between
                trouble = error
            except (StoreError, OSError) as error:
                trouble = as_unreadable(error)
                if trouble is None:
                    raise
            if isinstance(trouble, InDoubt):  # a wait of its own, whose end is known
                logger.warning(str(trouble))
                self._pause(trouble.left_s)
                continue
            if self._left_s <= 0:
                raise self._in_vain(trouble) from trouble
            self._say(trouble)
            self._left_s -= self._pause(min(pause, max(self._left_s, FIRST_PAUSE_S)))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _in_vain(self, trouble: StoreError) -> StoreError:
        waited = f"waited {self.limit_s:.0f} s{self._limited_by}"
        if isinstance(trouble, Unreadable):
            return Unreadable(trouble.file, f"{trouble.why}; {waited}", trouble.errno)
        return NoRoom(f"{trouble}; {waited}")

    def _say(self, trouble: StoreError) -> None:
        now = self._clock()
        if now >= self._next_word:
            self._next_word = now + SAY_EVERY_S
            logger.warning(f"{trouble}; tried again, for {max(0.0, self._left_s):.0f} s at most")

    def _pause(self, seconds: float) -> float:
        began = self._clock()
        while (left := began + seconds - self._clock()) > 0:
            self._on_wait()
            self._sleep(min(left, SLICE_S))
        return max(self._clock() - began, FIRST_PAUSE_S)


def read_bytes(path: Path, most: int = -1) -> bytes:
    """Return what a file that is no artifact holds, at most so many bytes. Raises as `patiently`."""

    def read() -> bytes:
        with path.open("rb") as file:
            return file.read(most)

    return patiently(read, path)


def patiently(read: Callable[[], T], path: Path) -> T:
    """Return what `read` finds in a file that is no artifact; waits while it cannot be read.
    Raises OSError, with the file's name: with an errno of `PROOFS` it is not there; with another one nothing is known
    of it."""

    def named() -> T:
        try:
            return read()
        except OSError as error:
            if error.filename is None and error.errno is not None:  # of a read, not of an open
                raise OSError(error.errno, error.strerror, str(path)) from error
            raise

    try:
        return Patience(FILE_S, limited_by=None)(named)
    except Unreadable as error:  # which does not travel between processes
        raise OSError(error.errno, error.why, str(path)) from None


def as_unreadable(error: BaseException | None) -> Unreadable | None:
    """Return the same as an `Unreadable`; None where the file system answered, and the answer will not change."""
    if isinstance(error, Unreadable):
        return error
    if isinstance(error, StoreError):
        cause = error.__cause__
        passes = isinstance(cause, OSError) and cause.errno in (errno.EIO, errno.EACCES)  # EACCES: a ticket ran out
        return Unreadable.of(cause) if isinstance(cause, OSError) and passes else None
    if not isinstance(error, OSError) or error.errno is None or error.errno in PROOFS:
        return None
    return Unreadable.of(error)
