"""The store's few file-system operations: durable writes, sums, renames, listings.

Every other module of the store goes through here, so that one place knows modes, fsync order and error messages,
and so that a fault harness sees (and may interrupt) each operation: see `observe_operations`.
"""

import contextlib
import errno
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from loguru import logger

from prime_hpc.runtime.atomic_write import sync_names
from prime_hpc.store.errors import ArtifactError, StoreError, Unreadable
from prime_hpc.store.io.disk import disk_errors

FILE_MODE = 0o644
_CHUNK = 8 << 20
VISIBLE_S = 90.0
"""How long a finished file may stay unseen by another node: NFS clients believe a cached miss for up to 60 s."""
GONE_S = 5.0
"""A directory that cannot be opened for so long was deleted."""
STALE_S = 2.0
"""How long a directory may answer ESTALE before that is its answer."""
_MAX_VIEWS = 512  # buffers of one writev, below every system's limit
NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES)
"""Errors of a file system that allows no link, or no more hard ones."""
_NOT_YET = (errno.ENOTEMPTY, errno.ESTALE, errno.EBUSY)
_LONGEST_REMOVAL_PAUSE_S = 0.7
# A reader on a network file system meets these while a name is being replaced; they pass.
_TRANSIENT = (errno.ESTALE, errno.ENOENT, errno.EIO)

T = TypeVar("T")
Observer = Callable[[str, Path], None]
_observers: list[Observer] = []


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and xxh3_64 sum (16 hex digits) of one file."""

    size: int
    xxh3: str


@contextlib.contextmanager
def observe_operations(observer: Observer) -> Iterator[None]:
    """Call `observer(operation, path)` before each changing operation; what it raises, the operation raises.

    Operations: create, write, fsync, mkdir, link, rename, remove; and `torn` in the middle of a write (half of the
    bytes are there) and of the removal of a tree (some of its files are gone).
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _before(operation: str, path: Path) -> None:
    for observer in _observers:
        observer(operation, path)


def _write_all(fd: int, views: Sequence[memoryview], path: Path) -> None:
    """Write byte buffers one after another, with few calls: on a network file system each is a message."""
    _before("write", path)
    if _observers:
        views, rest = _halves(views)
        _write_views(fd, views)
        _before("torn", path)
        views = rest
    _write_views(fd, views)


def _write_views(fd: int, views: Sequence[memoryview]) -> None:
    left = [view for view in views if len(view)]
    while left:
        count = os.writev(fd, left[:_MAX_VIEWS])
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _halves(views: Sequence[memoryview]) -> tuple[list[memoryview], list[memoryview]]:
    """Return the first half of the bytes, and the others."""
    room = sum(map(len, views)) // 2
    first, second = [], []
    for view in views:
        first.append(view[:room])
        second.append(view[room:])
        room -= len(first[-1])
    return first, second


def _in_groups(chunks: Iterable[Any]) -> Iterator[list[memoryview]]:
    """Byte views of the chunks that are not empty, about `_CHUNK` bytes at a time."""
    group: list[memoryview] = []
    size = 0
    for chunk in chunks:
        view = memoryview(chunk)
        if view.nbytes:
            group.append(view.cast("B"))
            size += view.nbytes
        if size >= _CHUNK or len(group) == _MAX_VIEWS:
            yield group
            group, size = [], 0
    if group:
        yield group


def write_file(path: Path, chunks: Iterable[Any], *, sync: bool = True) -> FileEntry:
    """Write buffers one after another to a new (or truncated) file of mode 0644 & ~umask; fsync; its entry.

    Args:
        path: the file; its directory exists.
        chunks: objects with the buffer protocol, C-contiguous, e.g. bytes or numpy arrays.
        sync: False only where losing the file on a power cut costs nothing.

    Raises:
        StoreError: disk full, not writable, I/O error.
    """
    digest = xxhash.xxh3_64()
    size = 0
    with disk_errors(path):
        _before("create", path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            for views in _in_groups(chunks):
                _write_all(fd, views, path)
                for view in views:
                    digest.update(view)
                    size += len(view)
            if sync:
                _before("fsync", path)
                os.fsync(fd)
        finally:
            os.close(fd)
    return FileEntry(size, digest.hexdigest())


def replace_link(path: Path, target: str) -> bool:
    """Make `path` a symbolic link to `target`, in one rename where it was one to something else; False where the file
    system has none (SMB shares, mounted object stores)."""
    temporary = path.with_name(f".tmp-{path.name}-{unique_suffix()}")
    with disk_errors(path):
        _before("link", path)
        try:
            temporary.symlink_to(target)
        except OSError as error:
            if error.errno in NO_LINKS and error.errno != errno.EACCES:
                return False
            raise
    try:
        rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # never hides the reason
            temporary.unlink()
        raise
    return True


def write_atomic(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace a small file in one rename: readers see the old content or the new, never a part.
    `sync`: False only where losing the change on a power cut costs nothing.
    Raises StoreError: disk full, not writable, I/O error."""
    temporary = path.with_name(f".tmp-{path.name}-{unique_suffix()}")
    try:
        write_file(temporary, [data], sync=sync)
        rename(temporary, path)
    except FileNotFoundError as error:
        if not path.exists() or path.read_bytes() != data:  # else it was renamed, and only the answer was lost
            raise StoreError(
                f"{path}: {error.filename} is gone: another process has removed the directory, or swept up the "
                "unfinished file (a newer attempt of the run does, on its start)"
            ) from error
    except BaseException:
        with contextlib.suppress(OSError):  # never hides the reason
            temporary.unlink()
        raise
    if sync:
        fsync_dir(path.parent)


def create_exclusive(path: Path) -> bool:
    """Create an empty file; False where it already exists. The file server decides, also between nodes."""
    with disk_errors(path):
        _before("create", path)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        except FileExistsError:
            return False
        os.fsync(fd)
        os.close(fd)
        return True


def hash_bytes(data: Any) -> FileEntry:
    """Size and sum of a buffer."""
    return FileEntry(memoryview(data).nbytes, xxhash.xxh3_64_hexdigest(data))


def hash_file(path: Path) -> FileEntry:
    """Read a file once and return its size and sum."""
    digest = xxhash.xxh3_64()
    size = 0
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(_CHUNK)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
            size += count
    return FileEntry(size, digest.hexdigest())


def finalize_file(path: Path, mode: int) -> FileEntry:
    """Make a file that someone else wrote fit for an artifact: mode, fsync, then its size and sum.

    safetensors and others create files with mode 0600, which a colleague's evaluation could not read.
    """
    with disk_errors(path):
        _before("fsync", path)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _set_mode(fd, mode)
            os.fsync(fd)
        finally:
            os.close(fd)
        return hash_file(path)


def _set_mode(fd: int, mode: int) -> None:
    try:
        os.fchmod(fd, mode)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):  # its mode is the mount's
            raise


def fsync_dir(path: Path) -> None:
    """Make the names in a directory durable."""
    with disk_errors(path):
        _before("fsync", path)
        sync_names(path)


def make_dir(path: Path, *, exist_ok: bool = True) -> None:
    """Create a directory and its parents.

    Raises:
        StoreError: not writable, disk full, or a file is in the way.
        FileExistsError: it exists and `exist_ok` is False.
    """
    with disk_errors(path):
        if exist_ok and path.is_dir():
            return
        _before("mkdir", path)
        try:
            path.mkdir(parents=True, exist_ok=exist_ok)
        except NotADirectoryError as error:
            raise StoreError(f"{path}: a part of this path is a file, not a directory") from error
        except FileExistsError:
            if not exist_ok:
                raise
            _await_dir(path)


def _await_dir(path: Path) -> None:
    """Wait for a directory that the server has and this node does not see: another node's, not visible yet, or a file.
    Raises StoreError: a file is in the way, or it stays unseen."""

    def look() -> None:
        if path.name not in list_dir(path.parent):
            raise Unreadable(path, "it exists, and this node does not see it yet")
        if not path.is_dir():
            raise ArtifactError(
                path, "a directory", "a file" if path.exists() else "a name that cannot be looked up yet"
            )

    retry_read(look, deadline_s=0.0 if path.exists() else VISIBLE_S, parent=path.parent)


def rename(source: Path, target: Path) -> None:
    """One atomic rename."""
    with disk_errors(target):
        _before("rename", target)
        source.rename(target)


def list_dir(path: Path) -> list[str]:
    """Names in a directory, unsorted; [] where it does not exist, or is none.

    A stale handle is asked for again by its path: the directory was replaced, or its server came back.
    Raises OSError: it cannot be listed now; of ESTALE, after `STALE_S`.
    """
    end = time.monotonic() + STALE_S
    while True:
        try:
            return [entry.name for entry in path.iterdir()]
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return []
            if error.errno != errno.ESTALE or time.monotonic() > end:
                raise
        time.sleep(0.05)


def await_name(path: Path, *, deadline_s: float = VISIBLE_S) -> None:
    """Wait until `path` is listed in its directory, 0.01 .. 0.5 s apart.

    Looked up by name too early, a network client would remember the miss, for up to a minute; a listing leaves none.
    Opening a directory asks the server: where the directory itself is gone for `GONE_S`, nothing will appear in it.

    Raises:
        ArtifactError: it is not listed until the deadline.
        StoreError: its directory was deleted.
    """

    def look() -> None:
        if path.name not in list_dir(path.parent):
            raise ArtifactError(path, f"this name in {path.parent} within {deadline_s:g} s", "none")

    retry_read(look, deadline_s=deadline_s, parent=path.parent)


def remove_tree(path: Path) -> None:
    """Delete a directory tree; names that are already gone do not matter.

    What cannot be deleted yet is left for the next clean-up, with a warning: a file that this node does not see, or one
    that is open somewhere (NFS keeps it as `.nfs...`, and the directory stays "not empty").
    """

    def already_gone(function: object, name: str, info: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(info[1], FileNotFoundError):
            raise info[1]

    pause = 0.02
    with disk_errors(path):
        _before("remove", path)
        if _observers:
            for file in [p for p in path.rglob("*") if not p.is_dir()][::2]:
                file.unlink(missing_ok=True)
            _before("torn", path)
        while True:
            try:
                shutil.rmtree(path, onerror=already_gone)
                return
            except OSError as error:
                if error.errno not in _NOT_YET:
                    raise
                if pause > _LONGEST_REMOVAL_PAUSE_S:
                    logger.warning(f"{path} cannot be deleted yet ({error.strerror}); the next clean-up will")
                    return
            time.sleep(pause)
            pause *= 2


def clear_away(path: Path) -> None:
    """Remove what a failed try left. Never hides the reason why it failed: where this fails too, it is only logged."""
    try:
        remove_tree(path)
    except (OSError, StoreError) as error:
        logger.warning(f"{path}: could not be removed ({error}); the next attempt's clean-up will")


def remove_file(path: Path) -> None:
    """Delete one file; that it is already gone does not matter."""
    with disk_errors(path):
        _before("remove", path)
        path.unlink(missing_ok=True)


def link(source: Path, target: Path) -> None:
    """Give a file a second name. Raises OSError: as the system says; many file systems and mounts allow none."""
    _before("link", target)
    os.link(source, target)


def move_aside(path: Path) -> Path:
    """Take a directory out of sight in one rename; returns its new name, which clean-ups know as rubbish."""
    trash = path.with_name(f".trash-{path.name}-{unique_suffix()}")
    rename(path, trash)
    return trash


def discard(path: Path) -> None:
    """Take a directory that nobody else writes out of sight in one rename, then delete it."""
    remove_tree(move_aside(path))


def unique_suffix() -> str:
    """Differs between all writers on all nodes; says who it was."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def retry_read(read: Callable[[], T], *, deadline_s: float, parent: Path | None = None) -> T:
    """Call `read` until it succeeds or `deadline_s` seconds have passed (0: once), pausing 0.01 .. 0.5 s between.

    Retried: ArtifactError (size or content not yet what the manifest says), Unreadable, and ESTALE, ENOENT, EIO, which
    a network file system answers while names change. After the deadline the last error is raised.

    Args:
        parent: directory of what is read; where it is gone for `GONE_S`, nothing will appear in it.

    Raises:
        StoreError: `parent` was deleted.
    """
    began = time.monotonic()
    pause = 0.01
    while True:
        try:
            return read()
        except (ArtifactError, Unreadable, OSError) as error:
            transient = isinstance(error, StoreError) or error.errno in _TRANSIENT
            waited = time.monotonic() - began
            if not transient or waited + pause > deadline_s:
                raise
            if parent is not None and waited > GONE_S and _is_gone(parent):
                raise StoreError(f"{parent} was deleted while it was read: {error}") from error
        time.sleep(pause)
        pause = min(pause * 2, 0.5)


def _is_gone(directory: Path) -> bool:
    """Return whether a directory was deleted; opening it asks the server, a look by name does not."""
    with contextlib.suppress(OSError):
        return not list_dir(directory) and not directory.is_dir()
    return False
