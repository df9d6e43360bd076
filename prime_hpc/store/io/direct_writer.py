"""A large file that somebody else's serialiser (torch) writes in one pass: summed on the way, durable when it closes.

Unlike `artifact.hash_files` it need not read the file again. Data passes through three buffers: while one is filled and
summed, two threads write the others. A checkpoint is not read again soon: where the file system can, it goes past the
page cache (O_DIRECT), for gigabytes of dirty pages would hold up the fsyncs of all other files and take the memory
bandwidth of the step that goes on meanwhile. (Weight versions, which the engines read at once, are written through
`shared_writer`.)
"""

import contextlib
import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from prime_hpc.store.io import files
from prime_hpc.store.io.disk import disk_errors
from prime_hpc.store.io.files import FileEntry

NUM_WRITERS = 2
BUFFER_BYTES = 16 << 20
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
        self._handed_over = 0
        self._current: mmap.mmap | None = None
        self._filled = 0
        self._free: list[mmap.mmap] = []
        self._is_direct = False
        self._writers: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[Future[None], mmap.mmap]] = deque()

    def tell(self) -> int:
        """Bytes so far."""
        return self._size

    def write(self, data: Any) -> int:
        """Append a buffer, all of it."""
        rest: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)  # numpy copies without the interpreter's lock
        size = len(rest)
        while len(rest):
            if self._current is None:
                self._current = self._next_buffer()
            count = min(len(rest), BUFFER_BYTES - self._filled)
            np.frombuffer(self._current, np.uint8)[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            self._size += count
            rest = rest[count:]
            if self._filled == BUFFER_BYTES:
                self._hand_over()
        return size

    def _next_buffer(self) -> mmap.mmap:
        """Return an empty one: new, or that of the oldest write once it is done."""
        if len(self._pending) == NUM_WRITERS:
            self._wait_for_one()
        return self._free.pop() if self._free else mmap.mmap(-1, BUFFER_BYTES)  # page-aligned

    def _hand_over(self) -> None:
        """Sum the current buffer and give it to a writing thread."""
        files._before("write", self.path)
        buffer, count = self._current, self._filled
        assert buffer is not None
        with memoryview(buffer) as whole, whole[:count] as view:
            self._digest.update(view)
        if self._writers is None:
            self._writers = ThreadPoolExecutor(NUM_WRITERS, thread_name_prefix="write")
            self._is_direct = count == BUFFER_BYTES and self._set_direct(True)
        if self._is_direct and count % _BLOCK:  # the file's end
            self._write_cached()
        self._pending.append((self._writers.submit(self._write_out, buffer, count, self._handed_over), buffer))
        self._handed_over += count
        self._current, self._filled = None, 0

    def _wait_for_one(self) -> None:
        pending, buffer = self._pending.popleft()
        try:
            pending.result()
        except OSError as error:
            self.failure = error
            raise
        self._free.append(buffer)

    def _write_cached(self) -> None:
        """From now on through the page cache."""
        while self._pending:
            self._wait_for_one()
        self._set_direct(False)
        self._is_direct = False

    def _write_out(self, buffer: mmap.mmap, count: int, offset: int) -> None:
        """In a writing thread. After a short write, and where the file system wants another alignment, it goes on
        through the page cache."""
        with memoryview(buffer) as whole, whole[:count] as view:
            written, may_refuse = 0, self._is_direct
            middle = count // 2 // _BLOCK * _BLOCK or count // 2 if files._observers else 0
            while written < count:
                if middle and written >= middle:
                    files._before("torn", self.path)
                    middle = 0
                try:
                    written += os.pwrite(self._fd, view[written : middle or count], offset + written)
                except OSError as error:
                    if error.errno not in _CANNOT or not may_refuse:
                        raise
                    may_refuse = False
                    self._set_direct(False)

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
        while self._pending:
            self._wait_for_one()
        files._before("fsync", self.path)
        os.fsync(self._fd)
        self.entry = FileEntry(self._size, self._digest.hexdigest())

    def release(self) -> None:
        """Let the writing threads end."""
        if self._writers is not None:
            self._writers.shutdown(wait=True)


@contextlib.contextmanager
def open_summed(path: Path) -> Iterator[SummedFile]:
    """Create `path` (mode 0644 & ~umask); leaving the block makes it durable and fills its `entry`.
    `path`: the file; its directory exists.
    Raises StoreError: disk full, not writable, I/O error."""
    with disk_errors(path):
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
