"""A file of lines to which one process of an attempt appends."""

import errno
from pathlib import Path

from loguru import logger

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_HELD = 16 << 20
"""Bytes of lines that may wait for room: a trainer's of some ten thousand steps."""


class LineFile:
    """Every line is in the file when `append` returns. What a full disk or a quota refuses is held and follows with a
    later line, from the byte at which it stopped: a few bytes of metrics are no reason to end a run."""

    def __init__(self, path: Path) -> None:
        """Open it, and its folder where there is none. Raises OSError: it cannot be opened."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._held = bytearray()
        self._refused = False
        if ends_torn(path):  # an earlier attempt was killed while it wrote: its half line stays one
            self.append("\n")

    def append(self, lines: str) -> None:
        """Write whole lines. Raises OSError: it is not for want of room that they cannot be written, or more than
        `MOST_HELD` bytes wait; names the file."""
        self._held += lines.encode(errors="replace")  # half a surrogate pair is no UTF-8
        error = self._write()
        if error is not None and (error.errno not in _FULL or len(self._held) > MOST_HELD):
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        if error is not None and not self._refused:
            logger.warning(f"{self._path}: {error.strerror}: lines wait in memory until it takes them (said once)")
        elif error is None and self._refused:
            logger.info(f"{self._path} is written again: the lines that waited are in it")
        self._refused = error is not None

    def _write(self) -> OSError | None:
        """Write what is held; return what kept it from that."""
        try:
            while self._held:
                del self._held[: self._file.write(self._held)]
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Close the file; what it still does not take is lost, and said."""
        error = self._write()
        if error is not None:
            logger.error(f"{self._path}: {error.strerror}: {len(self._held)} bytes of lines are lost")
        self._held.clear()
        self._file.close()


def ends_torn(path: Path) -> bool:
    """Return whether a file of lines ends within one: its writer was killed."""
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"
