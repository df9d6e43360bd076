"""A large file that somebody else's serialiser (torch) writes in one pass: summed on the way, durable when it closes.

Used by the trainer's checkpoints. Unlike `artifact.hash_files` it need not read the file again. Data passes through two
buffers: while one is filled and summed, a thread writes the other. Where the file system can, it writes past the page
cache (O_DIRECT): a checkpoint is not read again soon, and gigabytes of dirty pages would hold up the fsyncs of all
other files and take the memory bandwidth of the step that goes on meanwhile.
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from prime_hpc.store import files
from prime_hpc.store.files import FileEntry

BUFFER_BYTES = 32 << 20
"""Multiple of every block size in use."""
_BLOCK = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


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
        self._buffers: list[mmap.mmap] = []
        self._current = 0
        self._filled = 0
        self._is_direct: bool | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def tell(self) -> int:
        """Bytes so far."""
        return self._size

    def write(self, data: Any) -> int:
        """Append a buffer, all of it."""
        view = memoryview(data).cast("B")
        rest = view
        while len(rest):
            if not self._buffers:
                self._buffers = [mmap.mmap(-1, BUFFER_BYTES), mmap.mmap(-1, BUFFER_BYTES)]  # page-aligned
            count = min(len(rest), BUFFER_BYTES - self._filled)
            with memoryview(self._buffers[self._current]) as buffer:
                buffer[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            self._size += count
            rest = rest[count:]
            if self._filled == BUFFER_BYTES:
                self._hand_over()
        return len(view)

    def _hand_over(self) -> None:
        """Sum the filled buffer, and give it to the writing thread once that is done with the other one."""
        files._before("write", self.path)
        with memoryview(self._buffers[self._current]) as whole, whole[: self._filled] as view:
            self._digest.update(view)
        self._wait()
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._pending = self._writer.submit(self._write_out, self._buffers[self._current], self._filled)
        self._current, self._filled = 1 - self._current, 0

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except OSError as error:
                self.failure = error
                raise

    def _write_out(self, buffer: mmap.mmap, count: int) -> None:
        """In the writing thread."""
        with memoryview(buffer) as whole, whole[:count] as view:
            if self._is_direct is None:
                self._is_direct = count == BUFFER_BYTES and self._set_direct(True)
            whole_blocks = count - count % _BLOCK if self._is_direct else 0
            if whole_blocks:
                self._write_direct(view[:whole_blocks])
            if self._is_direct and whole_blocks < count:
                self._set_direct(False)
            _write_all(self._fd, view[whole_blocks:])

    def _write_direct(self, view: memoryview) -> None:
        try:
            written = os.write(self._fd, view)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            written = 0
        if written < len(view):  # not aligned as this file system wants it, or nearly full: through the page cache
            self._is_direct = False
            self._set_direct(False)
            _write_all(self._fd, view[written:])

    def _set_direct(self, on: bool) -> bool:
        """Switch O_DIRECT; False where the file system does not know it."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
        except OSError as error:
            if error.errno not in _CANNOT:
                raise
            return False
        return bool(_O_DIRECT)

    def flush(self) -> None:
        """Nothing: a file is only of use when it is whole."""

    def close(self) -> None:
        """Nothing: see the class."""

    def finish(self) -> None:
        """Make the content durable and take its sum."""
        if self._filled:
            self._hand_over()
        self._wait()
        files._before("fsync", self.path)
        os.fsync(self._fd)
        self.entry = FileEntry(self._size, self._digest.hexdigest())

    def release(self) -> None:
        """Let the writing thread end and the buffers go."""
        if self._writer is not None:
            self._writer.shutdown(wait=True)
        self._buffers = []


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(fd, view) :]


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
            file.release()
            os.close(fd)
