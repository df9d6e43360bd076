"""A large file that several processes of one node write at once, each its own ranges; one of them seals it.

All writers must share a page cache, so be on one node: only then is what the sealing process reads and makes durable
what the others wrote. Weights are read at once by the engines: they stay in the page cache, and each range's way to the
disk begins as soon as it is written, so that little is left for the fsync.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import xxhash

from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files
from prime_hpc.store.io.disk import disk_errors
from prime_hpc.store.io.files import FileEntry

WRITE_BYTES = 16 << 20
"""Written, and then sent on its way to the disk."""
CALL_BYTES = 1 << 20
"""Written by one call. With more, Linux takes larger blocks for its page cache: those that a virtual machine has given
back to its host when they were free, and must fault in again one by one (up to four times the whole write's time)."""
_READ_BYTES = 512 << 10  # stays in a core's cache until it is summed
_SYNC_FILE_RANGE_WRITE = 2


class RangeFile:
    """One process's view of the file, from `open_ranges`. Its calls may come from any thread, one after another."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd
        self._unannounced = 0  # bytes until an observer is told again: ranges may be many and small

    def write_at(self, offset: int, data: Any) -> None:
        """Write a C-contiguous buffer to a place in the file that nobody else writes.
        Raises StoreError: disk full, not writable, I/O error."""
        with disk_errors(self.path), memoryview(data) as whole, whole.cast("B") as view:
            for begin in range(0, len(view), WRITE_BYTES):
                with view[begin : begin + WRITE_BYTES] as part:
                    self._write(offset + begin, part)

    def _write(self, offset: int, part: memoryview) -> None:
        middle = written = 0
        if self._unannounced <= 0:
            files._before("write", self.path)
            middle = len(part) // 2 if files._observers else 0
            self._unannounced = WRITE_BYTES
        self._unannounced -= len(part)
        while written < len(part):
            if middle and written >= middle:
                files._before("torn", self.path)
                middle = 0
            with part[written : min(middle or len(part), written + CALL_BYTES)] as rest:
                written += os.pwrite(self._fd, rest, offset + written)
        _start_writeback(self._fd, offset, len(part))

    def finalize(self, size: int) -> FileEntry:
        """After all have written: make the file durable, and meanwhile take its sum from the page cache.
        Raises StoreError: I/O error, or the file is not `size` bytes long."""
        with disk_errors(self.path), ThreadPoolExecutor(1, thread_name_prefix="fsync") as beside:
            files._before("fsync", self.path)
            durable = beside.submit(os.fsync, self._fd)
            entry = self._sum()
            durable.result()
        if entry.size != size:
            raise StoreError(f"{self.path}: {entry.size} bytes arrived, {size} were written: do its writers share it?")
        return entry

    def _sum(self) -> FileEntry:
        digest = xxhash.xxh3_64()
        size = 0
        with memoryview(bytearray(_READ_BYTES)) as buffer:
            while count := os.preadv(self._fd, [buffer], size):
                digest.update(buffer[:count])
                size += count
        return FileEntry(size, digest.hexdigest())


@contextlib.contextmanager
def open_ranges(path: Path) -> Iterator[RangeFile]:
    """Open `path`, which whoever comes first creates (mode 0644 & ~umask). Leaving the block makes nothing durable.
    `path`: the file; its directory exists, and holds none of that name from before.
    Raises StoreError: not writable, disk full."""
    with disk_errors(path):
        files._before("create", path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.FILE_MODE)
    try:
        yield RangeFile(path, fd)
    finally:
        os.close(fd)


def _start_writeback(fd: int, offset: int, count: int) -> None:
    """Have the kernel begin to write these pages, without waiting. Only a hint: the fsync at the end decides."""
    with contextlib.suppress(AttributeError):  # another C library
        _libc().sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
