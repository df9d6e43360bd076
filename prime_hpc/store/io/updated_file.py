"""A small file that several processes update at once, none of which may lose what another has put there."""

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

from prime_hpc.store.errors import StoreError, Unreadable
from prime_hpc.store.io import files
from prime_hpc.store.io.disk import disk_errors

_MAX_UPDATES = 20  # writers racing for it; far above anything real
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def update_file(path: Path, update: Callable[[bytes], bytes]) -> None:
    """Replace a small file by `update(its content)`, in one rename, without losing what another writer put there
    meanwhile: the names are exchanged, and where the old content is not what was read, its update follows. A file that
    was not there gets its name by a link, of which there is one.

    Where the file system cannot exchange names (NFS) or link, the last writer wins.

    Args:
        path: the file; where there is none, `update` gets b"".
        update: the same twice does no harm.

    Raises:
        StoreError: disk full, not writable, I/O error.
        Unreadable: it is there, and cannot be seen.
    """
    content = expected = path.read_bytes() if path.exists() else None
    for _ in range(_MAX_UPDATES):
        new = update(content or b"")
        temporary = path.with_name(f".tmp-{path.name}-{files.unique_suffix()}")
        try:
            files.write_file(temporary, [new])
            if expected is None and not _give_name(temporary, path):  # another node's may be seen late
                try:
                    content = files.retry_read(path.read_bytes, deadline_s=files.VISIBLE_S, parent=path.parent)
                except FileNotFoundError as error:  # the name is taken, by nothing
                    raise Unreadable(path, "its name is taken, and no file is seen there", error.errno) from error
                expected = content
                continue
            found = expected
            if expected is not None and _exchange(temporary, path):
                found = temporary.read_bytes()
            elif expected is not None:
                files.rename(temporary, path)
        finally:
            with contextlib.suppress(OSError):  # never hides the reason
                temporary.unlink()
        files.fsync_dir(path.parent)
        if found == expected:
            return
        content, expected = found, new
    raise StoreError(f"{path}: other writers keep changing it")


def _give_name(temporary: Path, path: Path) -> bool:
    """Give a new file its name, unless something has it."""
    with disk_errors(path):
        try:
            files.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in files.NO_LINKS:
                raise
            files.rename(temporary, path)
    return True


def _exchange(first: Path, second: Path) -> bool:
    """Two files take each other's names in one step (Linux, renameat2(2)); False where this cannot be done here."""
    with disk_errors(second):
        files._before("rename", second)
        try:
            rename_at = ctypes.CDLL(None, use_errno=True).renameat2
        except AttributeError:  # another C library
            return False
        if rename_at(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
            return True
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOSYS, errno.ENOENT, errno.EOPNOTSUPP):
            return False
        raise OSError(number, os.strerror(number), str(second))
