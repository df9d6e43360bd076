"""What can go wrong in the store. Raised by every module of this room, caught by roles and the supervisor."""

from pathlib import Path


class StoreError(RuntimeError):
    """The store could not do what was asked; the message says which path and what to do."""


class ArtifactError(StoreError):
    """A file of an artifact is not what its manifest says.

    Args:
        file: the file at fault.
        expected: what the manifest (or the protocol) promises.
        found: what is on disk.
    """

    def __init__(self, file: Path, expected: str, found: str) -> None:
        super().__init__(f"{file}: expected {expected}, found {found}")
        self.file = file
        self.expected = expected
        self.found = found


class ArtifactExists(StoreError):
    """Another artifact with other content already has this name; a finished artifact is never replaced."""


class ArtifactTimeout(StoreError, TimeoutError):
    """An artifact that was awaited did not appear in time."""


class WaitCancelled(StoreError):
    """The caller's `cancelled()` became true while an artifact was awaited."""


class FencedError(StoreError):
    """A newer life of this run has begun: this process must write nothing more and end."""
