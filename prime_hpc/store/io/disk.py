"""Room on a file system, and what a failed write means: full, over quota, read-only, broken."""

import contextlib
import errno
import grp
import os
import pwd
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from prime_hpc.store.errors import NoRoom, StoreError

_ALMOST_NOTHING = 64 << 10  # bytes free at which a writer's error without errno is taken for a full disk
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ELSEWHERE = "choose another place (output_dir, of what a command writes --output)"
T = TypeVar("T")

UNSTATED = sys.maxsize
"""Free bytes where a file system states no size at all, as some do over FUSE."""


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the file system of `path` (or of its nearest existing parent).
    Raises OSError: the file system does not say, e.g. a directory above is not to be searched."""
    usage = _ask(shutil.disk_usage, path)
    return usage.free if usage.total else UNSTATED


def size_text(num_bytes: float) -> str:
    """Return bytes in binary units."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.{2 if size >= 2**30 else 1}f} {unit}"
    return f"{num_bytes:.0f} B"


def _ask(ask: Callable[[Path], T], path: Path) -> T:
    """Ask the file system of `path`, or of its nearest existing parent."""
    probe = path.absolute()
    while True:
        try:
            return ask(probe)
        except (FileNotFoundError, NotADirectoryError):
            if probe == probe.parent:
                raise
        probe = probe.parent


def is_full(error: BaseException) -> bool:
    """Return whether a write failed, or led to this error, for want of room or quota, by the system's own number."""
    link: BaseException | None = error
    while link is not None and not (isinstance(link, OSError) and link.errno in _FULL):
        link = link.__cause__
    return link is not None


def disk_error(error: BaseException, path: Path) -> StoreError | None:
    """Return the StoreError that a failed write under `path` means, or None where it was not the disk's fault.

    Writers of others (safetensors, torch) lose the errno: their text and the free space decide.
    """
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    full = number in _FULL or "No space left" in text or "os error 28" in text or "os error 122" in text
    opaque = number is None and isinstance(error, RuntimeError) and not isinstance(error, StoreError)
    if full or (opaque and _is_almost_full(path)):
        reason, remedy = "disk full", "free space"
        if number == errno.EDQUOT or "os error 122" in text:
            reason = f"quota exceeded, of bytes or of files, {_whose_quota(path)}"  # what is free is the file system's
        elif _has_no_inode(path):
            reason, remedy = "disk full, it takes no more files", "delete some"
        return NoRoom(f"{path}: {reason}{_free_words(path)}: {remedy} or {_ELSEWHERE}")
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StoreError(f"{path}: not writable ({os.strerror(number)}): {_ELSEWHERE}")
    if number == errno.EIO:
        return StoreError(f"{path}: the file system reports an I/O error{_free_words(path)}")
    return None


def in_words(error: BaseException) -> BaseException:
    """Return the StoreError that a full disk means, where the error names the file; any other error as it is."""
    if not isinstance(error, OSError) or not is_full(error) or not error.filename:
        return error
    return disk_error(error, Path(os.fsdecode(error.filename))) or error


def _is_almost_full(path: Path) -> bool:
    try:
        return free_bytes(path) < _ALMOST_NOTHING
    except OSError:
        return False


def _has_no_inode(path: Path) -> bool:
    """Return whether it is names that have run out; a file system that makes them as needed states none at all."""
    try:
        found = _ask(os.statvfs, path)
    except OSError:
        return False
    # one that counts names by the bytes that are free (ZFS) has none of either
    return found.f_files > 0 and found.f_favail == 0 and found.f_bavail * found.f_frsize > _ALMOST_NOTHING


def _whose_quota(path: Path) -> str:
    """Name whom a quota may be of: files are counted for their user, their group, and where there are some, the
    project of their directory."""
    user, group = str(os.geteuid()), str(os.getegid())
    with contextlib.suppress(OSError):
        found = _ask(os.stat, path if path.is_dir() else path.parent)
        group = str(found.st_gid if found.st_mode & stat.S_ISGID else os.getegid())
    with contextlib.suppress(KeyError):  # a node without the site's directory of users
        user = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(int(group)).gr_name
    return f"of user {user}, group {group} or the directory's project"


def _free_words(path: Path) -> str:
    """Say how much is free; nothing where that cannot be told, as that must not hide why a write failed."""
    try:
        free = free_bytes(path)
    except OSError:
        return ""
    return "" if free == UNSTATED else f" ({free / 2**20:,.1f} MiB free)"


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
