"""Files of rows, read again while they cannot be read: a server that fails over, a handle that went stale."""

import io
import os
from pathlib import Path
from typing import Any

from prime_hpc.store.errors import PROOFS
from prime_hpc.store.io.retry_reads import patiently
from prime_hpc.trainer.data.messages import DataChangedError, SFTDataError


def version_of(path: Path | int) -> tuple[int, int]:
    """Return what tells a file, by its path or open, from another one of its path: size and time of change."""
    try:
        stat = os.fstat(path) if isinstance(path, int) else patiently(path.stat, path)
    except OSError as error:
        if error.errno not in PROOFS:
            raise  # nothing is known of the file: these are no bad data
        raise SFTDataError(f"sft.data.path = {path}: {error.strerror or error}") from error
    return stat.st_size, stat.st_mtime_ns


class PatientFile(io.RawIOBase):
    """A file whose reads wait while it cannot be read, each time through a new handle: the former may be stale for
    ever."""

    def __init__(self, path: Path) -> None:
        """Look at the file, which is opened by the first read. Raises SFTDataError: it is not there."""
        self._file: int | None = None  # first: a file that is not there is closed, too
        self._at = 0
        self._path, self._version = path, version_of(path)

    def pread(self, size: int, offset: int) -> bytes:
        """Return what is there. Raises OSError: it cannot be read now; DataChangedError: another file has its path."""

        def read() -> bytes:
            if self._file is None:
                self._file = self._open()
            try:
                return os.pread(self._file, size, offset)
            except OSError:
                self._close()
                raise

        return patiently(read, self._path)

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if version_of(file) != self._version:
                raise DataChangedError(f"{self._path} has changed since the run began")
        except BaseException:
            os.close(file)
            raise
        return file

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def seekable(self) -> bool:
        """Return that it is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from where the file is; returns how far. Raises as `pread`."""
        found = self.pread(len(buffer), self._at)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place, as files of Python do."""
        self._at = offset + (0, self._at, self._version[0])[whence]
        return self._at

    def close(self) -> None:
        """Give the handle back."""
        self._close()
        super().close()


def open_patiently(path: Path) -> io.BufferedReader:
    """Open a file as `PatientFile` reads it."""
    return io.BufferedReader(PatientFile(path), 2**20)
