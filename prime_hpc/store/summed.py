"""A file that is written in one pass by somebody else's serialiser (torch), and is summed and durable when it closes.

Used by the trainer's checkpoints. Unlike `artifact.hash_files` it need not read the file again, and it gives the kernel
each piece to write back as it comes: the final fsync is short, and other files' fsyncs do not wait behind gigabytes.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from prime_hpc.store import files
from prime_hpc.store.files import FileEntry

_WRITE_BACK_BYTES = 32 << 20
_SMALL_BYTES = 1 << 16


class SummedFile:
    """An append-only binary file, from `open_summed`. `close` is left to that: serialisers close all."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.entry: FileEntry | None = None
        """Size and sum; there once `open_summed` was left without an error."""
        self.failure: OSError | None = None
        """What a write raised: serialisers in C++ make other errors of it."""
        self._fd = fd
        self._digest = xxhash.xxh3_64()
        self._size = 0
        self._small = bytearray()
        self._written_back = 0

    def tell(self) -> int:
        """Bytes so far."""
        return self._size + len(self._small)

    def write(self, data: Any) -> int:
        """Append a buffer, all of it. Small ones are gathered: torch writes a tensor's frame in forty pieces."""
        view = memoryview(data).cast("B")
        if len(view) < _SMALL_BYTES:
            self._small += view
            if len(self._small) < _SMALL_BYTES:
                return len(view)
            self._append_small()
        else:
            self._append_small()
            self._append(view)
        return len(view)

    def _append_small(self) -> None:
        small, self._small = self._small, bytearray()
        self._append(memoryview(small))

    def _append(self, view: memoryview) -> None:
        if self._size == self._written_back:
            files._before("write", self.path)
        rest = view
        try:
            while len(rest):
                rest = rest[os.write(self._fd, rest[: 1 << 30]) :]
        except OSError as error:
            self.failure = error
            raise
        self._digest.update(view)
        self._size += len(view)
        if self._size - self._written_back >= _WRITE_BACK_BYTES:
            # Linux begins to write dirty pages when told that nobody needs them; clean ones leave the cache.
            os.posix_fadvise(self._fd, self._written_back, self._size - self._written_back, os.POSIX_FADV_DONTNEED)
            self._written_back = self._size

    def flush(self) -> None:
        """Nothing: a file is only of use when it is whole."""

    def close(self) -> None:
        """Nothing: see the class."""

    def finish(self) -> None:
        """Make the content durable and take its sum."""
        self._append_small()
        files._before("fsync", self.path)
        os.fsync(self._fd)
        self.entry = FileEntry(self._size, self._digest.hexdigest())


@contextlib.contextmanager
def open_summed(path: Path) -> Iterator[SummedFile]:
    """Create `path` (mode 0644 & ~umask); leaving the block makes it durable and fills its `entry`.

    Raises:
        StoreError: disk full, not writable, I/O error.
    """
    with files.disk_errors(path):
        files._before("create", path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, files.FILE_MODE)
        file = SummedFile(path, fd)
        try:
            yield file
            file.finish()
        except Exception as error:
            if file.failure is not None and error is not file.failure:
                raise file.failure from error
            raise
        finally:
            os.close(fd)
