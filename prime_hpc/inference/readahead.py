"""The files of a weight version come into the node's page cache while the engines still generate.

Engines map these files: the first look at a page that is not in memory waits for the disk or the file server, and an
engine looks at them while generation is paused. One server of a node reads them for all; a part that is there already,
such as what the trainer has just written on this node, is only asked for.
"""

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

BLOCK_BYTES = 4 << 20
_PROBE_BYTES = 1
_NO_ANSWER = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""A file system that cannot say what is in memory."""


def read_ahead(files: Iterable[Path]) -> int:
    """Read what of these files is not in the page cache; returns how many bytes.

    Never raises for a file that cannot be read: who opens it next says what is wrong.
    """
    total = 0
    with memoryview(bytearray(BLOCK_BYTES)) as buffer:
        for path in files:
            with contextlib.suppress(OSError):
                total += _read(path, buffer)
    return total


def _read(path: Path, buffer: memoryview) -> int:
    total = 0
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        os.posix_fadvise(fd, 0, size, os.POSIX_FADV_SEQUENTIAL)
        for offset in range(0, size, BLOCK_BYTES):
            ends = offset, min(offset + BLOCK_BYTES, size) - _PROBE_BYTES
            if not all(_is_cached(fd, end) for end in ends):
                total += os.preadv(fd, [buffer], offset)
    finally:
        os.close(fd)
    return total


def _is_cached(fd: int, offset: int) -> bool:
    """Return whether a byte is in memory; False where that cannot be seen."""
    try:
        return os.preadv(fd, [bytearray(_PROBE_BYTES)], offset, os.RWF_NOWAIT) == _PROBE_BYTES
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_ANSWER:
            return False
        raise
