"""Room on a file system, and what a failed write means: full, over quota, read-only, broken."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from prime_hpc.store.errors import StoreError

_ALMOST_NOTHING = 64 << 10  # bytes free at which a writer's error without errno is taken for a full disk
_FULL = (errno.ENOSPC, errno.EDQUOT)


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the file system of `path` (or of its nearest existing parent)."""
    probe = path.absolute()
    while not probe.exists() and probe != probe.parent:
        probe = probe.parent
    return shutil.disk_usage(probe).free


def disk_error(error: BaseException, path: Path) -> StoreError | None:
    """Return the StoreError that a failed write under `path` means, or None where it was not the disk's fault.

    Writers of others (safetensors, torch) lose the errno: their text and the free space decide.
    """
    number = error.errno if isinstance(error, OSError) else None
    free = free_bytes(path)
    text = str(error)
    full = number in _FULL or "No space left" in text or "os error 28" in text or "os error 122" in text
    opaque = number is None and isinstance(error, RuntimeError) and not isinstance(error, StoreError)
    if full or (opaque and free < _ALMOST_NOTHING):
        reason = "quota exceeded" if number == errno.EDQUOT or "os error 122" in text else "disk full"
        return StoreError(f"{path}: {reason} ({free / 2**20:,.1f} MiB free): free space or choose another output_dir")
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreError(f"{path}: not writable ({os.strerror(number)}): choose another output_dir")
    if number == errno.EIO:
        return StoreError(f"{path}: the file system reports an I/O error ({free / 2**20:,.1f} MiB free)")
    return None


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn full disks, quotas, missing permissions and I/O errors of a write into a StoreError that names `path`."""
    try:
        yield
    except OSError as error:
        explained = disk_error(error, path)
        if explained is None:
            raise
        raise explained from error
