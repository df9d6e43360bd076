"""Errors of the store. Caught by roles and the supervisor."""

import errno
import os
from pathlib import Path

PROOFS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
"""Errors by which a file system that answers speaks of a name. Every other error of a read tells nothing of what lies
there."""


class StoreError(RuntimeError):
    """The store could not do what was asked; the message says which path and what to do."""


class ArtifactError(StoreError):
    """A file of an artifact is not what its manifest says.

    Args:
        expected: what the manifest (or the protocol) promises.
        found: what is on disk.
    """

    def __init__(self, file: Path, expected: str, found: str) -> None:
        super().__init__(f"{file}: expected {expected}, found {found}")
        self.file = file
        self.expected = expected
        self.found = found


class Unreadable(StoreError):
    """It cannot be read now, so nothing is known of it: whether it is whole, or whether it is there at all.
    `number`: errno, where the system gave one."""

    def __init__(self, file: Path | str, why: str, number: int | None = None) -> None:
        code = f" [{errno.errorcode.get(number, number)}]" if number is not None else ""
        super().__init__(f"{file}: cannot be read now: {why}{code}")
        self.file, self.why, self.errno = Path(file), why, number

    @classmethod
    def of(cls, error: OSError, path: Path | str | None = None) -> "Unreadable":
        """From what the system says."""
        where = path if path is not None else os.fsdecode(error.filename or "a file")
        return cls(where, error.strerror or str(error), error.errno)


class NoRoom(StoreError):
    """A disk that is full or a quota that is used up refused a write, which may be tried again.
    `needs`: bytes that all of it takes, where that is known."""

    attempt_exit_code = 74
    """EX_IOERR (sysexits.h), of the attempt that waited for room in vain."""

    def __init__(self, words: str, needs: int = 0) -> None:
        super().__init__(words)
        self.needs = needs


class InDoubt(Unreadable):
    """It was read, and was not what it should be; it is believed only when it is so again `left_s` seconds later."""

    def __init__(self, file: Path, why: str, left_s: float) -> None:
        super().__init__(file, why)
        self.args = (f"{file}: {why}; it is read again in {left_s:.0f} s before that is believed",)
        self.left_s = left_s


class ArtifactExists(StoreError):
    """Another artifact with other content already has this name; a finished artifact is never replaced."""


class ArtifactTimeout(StoreError, TimeoutError):
    """An artifact that was awaited did not appear in time."""


class WaitCancelled(StoreError):
    """The caller's `cancelled()` became true while an artifact was awaited."""


class FencedError(StoreError):
    """A newer attempt of this run has begun: this process must write nothing more and end."""


class OtherRunError(StoreError, ValueError):
    """A checkpoint is of another model, optimizer or kind of run than the config names: so it is at every attempt."""


def failed_read(error: OSError, path: Path, expected: str) -> ArtifactError | Unreadable:
    """Return what a failed read proves: something only where the file system answered."""
    if error.errno in PROOFS:
        return ArtifactError(path, expected, error.strerror or str(error))
    return Unreadable.of(error, path)
