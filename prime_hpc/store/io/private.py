"""Directories and files that nobody else could have prepared or can change: what holds a key, or will be executed."""

import functools
import grp
import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path


class NotPrivateError(OSError):
    """Somebody else owns it, or may write to it."""


@functools.cache
def _trusted_owners() -> frozenset[int]:
    """Return the user and root. Where a user namespace does not know the machine's root, its files are the overflow
    id's."""
    trusted = {0, os.geteuid()}
    try:
        mapped = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
        if len(mapped) != 3 or mapped[2] != "4294967295":
            trusted.add(int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii")))
    except (OSError, ValueError):
        pass
    return frozenset(trusted)


@functools.cache
def _is_private_group(gid: int) -> bool:
    """Return whether a group has no member but the user (many systems give each user such a group, and a umask of
    002)."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _others_may_write(found: os.stat_result) -> bool:
    return bool(found.st_mode & 0o002) or (bool(found.st_mode & 0o020) and not _is_private_group(found.st_gid))


def user_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of what this user's commands keep for later ones. Raises RuntimeError: the user has no home."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prime-hpc"


def check_way(path: Path) -> None:
    """Refuse a path of which somebody else could swap a component.

    Each directory on the way, those behind symbolic links too, must belong to the user or root, and nobody else may
    write to it, unless it is sticky, as /tmp is. What does not exist yet is no fault.

    Raises:
        NotPrivateError: names the component.
        OSError: it cannot be looked at.
    """
    path = path if path.is_absolute() else Path.cwd() / path
    _check_way(path, 0)
    _check_way(path.resolve(), 0)  # a `..` behind a link leads elsewhere than it reads


def _check_way(path: Path, depth: int) -> None:
    if depth > 20:
        raise NotPrivateError(f"{path}: too many symbolic links")
    for part in [*reversed(path.parents), path]:
        try:
            found = part.lstat()
        except FileNotFoundError:
            return
        if found.st_uid not in _trusted_owners():
            raise NotPrivateError(f"{part} belongs to user {found.st_uid}")
        if stat.S_ISLNK(found.st_mode):
            rest = path.relative_to(part)
            _check_way(part.parent / part.readlink() / rest, depth + 1)
            return
        if stat.S_ISDIR(found.st_mode) and not found.st_mode & stat.S_ISVTX and _others_may_write(found):
            raise NotPrivateError(f"others may write to {part}")


def make_private_dir(path: Path) -> None:
    """Make a directory that the user alone may use, where it is missing; nobody else can put another in its place.

    Raises:
        NotPrivateError: it, or a directory on the way to it, is not the user's (or root's) alone.
        OSError: it cannot be made.
    """
    check_way(path.parent)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    check_way(path)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or _others_may_write(found):
        raise NotPrivateError(f"{path} is not this user's alone")


def open_private(path: Path, flags: int) -> int:
    """Open a file that the user alone may read; with O_CREAT it is made so. Returns the descriptor.

    Raises:
        NotPrivateError: it is a link, or not the user's, or others may read or write it.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(descriptor)
        raise NotPrivateError(f"{path} is not this user's alone: remove it")
    return descriptor
