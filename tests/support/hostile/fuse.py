"""A FUSE pass-through that behaves like one client of a lagging shared file system; `mount.py` starts it.

    python -m tests.support.hostile.fuse BACKING MOUNT --client n1 --names 5 --misses 30 --attributes 5 --control FILE

What it does to the calls that come from its own node:
- names that *other* clients made, or renamed to, are unknown to look-ups and listings for `--names` seconds; where they
  replaced something, that is seen in their place. Own names are there at once, and an exclusive create or a mkdir
  meets names that are still hidden, as the server decides those.
- misses are cached for `--misses` seconds, names and attributes (so sizes) for `--attributes` seconds: by the kernel
  itself, these are its own dentry and attribute caches.
- the control file (JSON, read when it changes) makes calls fail or wait:
  {"latency_s": 0.01, "faults": [{"op": "write", "errno": "ENOSPC", "match": "rollouts", "nth": 3, "times": 2}]}:
  the third and fourth write below a path that holds `rollouts` fail. Without `nth` the next ones do. With `slow`, a
  list of such operations, these alone wait.
- `--rate BYTES` bytes a second are read, and as many written, one after another as over a wire; what was read stays in
  the kernel's cache then, as a client of a network file system keeps it.

Stamps (client and time of the last change of a name) are extended attributes of the backing files.
"""

import argparse
import errno
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mfusepy import FUSE, FuseOSError, Operations

STAMP = "user.hostile"
REPLACED = ".hostile-replaced"
"""Directory of the backing store: what was replaced, for as long as other clients still see it."""
_FAULTY = {
    "getattr": "stat",
    "readdir": "list",
    "create": "create",
    "open": "open",
    "read": "read",
    "write": "write",
    "fsync": "fsync",
    "mkdir": "mkdir",
    "unlink": "remove",
    "rmdir": "remove",
    "rename": "rename",
}


class Control:
    """What the control file asks for."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None
        self._latency_s = 0.0
        self._slow: list[str] = []
        self._faults: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def before(self, op: str, path: str) -> None:
        """Wait, and raise where a fault is due."""
        if self._path is None:
            return
        with self._lock:
            self._refresh()
            number = next((f["errno"] for f in self._faults if self._is_due(f, op, path)), None)
        if self._latency_s and (not self._slow or op in self._slow):
            time.sleep(self._latency_s)
        if number is not None:
            raise FuseOSError(getattr(errno, number))

    def _refresh(self) -> None:
        assert self._path is not None
        try:
            stat = self._path.stat()
            if self._seen != (stat.st_mtime_ns, stat.st_ino):
                content = json.loads(self._path.read_text())
                self._latency_s, self._faults = content.get("latency_s", 0.0), content.get("faults", [])
                self._slow = content.get("slow", [])
                self._seen = stat.st_mtime_ns, stat.st_ino
        except FileNotFoundError:
            self._latency_s, self._faults, self._seen = 0.0, [], None

    @staticmethod
    def _is_due(fault: dict[str, Any], op: str, path: str) -> bool:
        if fault["op"] != op or fault.get("match", "") not in path:
            return False
        fault["count"] = fault.get("count", 0) + 1
        first = fault.get("nth", 1)
        return first <= fault["count"] < first + fault.get("times", 1)


class Wire:
    """So many bytes a second, one call after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at, self._lock = bytes_per_s, 0.0, threading.Lock()

    def carry(self, count: int) -> None:
        """Wait until so many bytes have passed."""
        if not self._bytes_per_s:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._bytes_per_s
            end = self._free_at
        time.sleep(max(0.0, end - time.monotonic()))


class Client(Operations):
    """One client's view of the backing directory."""

    use_ns = True

    def __init__(self, root: Path, client: str, names_s: float, control: Control, rate: float = 0.0) -> None:
        self.wires = Wire(rate), Wire(rate)
        self.root, self.client, self.names_s, self.control = os.path.realpath(root), client, names_s, control
        os.makedirs(f"{self.root}/{REPLACED}", exist_ok=True)

    def __getattribute__(self, name: str) -> Any:
        method = object.__getattribute__(self, name)
        if name not in _FAULTY:
            return method

        def call(path: str, *arguments: Any) -> Any:
            self.control.before(_FAULTY[name], path)
            return method(path, *arguments)

        return call

    # Who sees what.

    def _is_hidden(self, full: str) -> bool:
        """Whether another client changed this name too short a time ago."""
        try:
            client, _, moment = os.getxattr(full, STAMP, follow_symlinks=False).decode().partition(":")
        except OSError:
            return False
        return client != self.client and time.time() - float(moment) < self.names_s

    def _mark(self, full: str) -> None:
        try:
            os.setxattr(full, STAMP, f"{self.client}:{time.time()}".encode(), follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOENT):  # symlinks take no such attribute
                raise

    def _before_it(self, full: str) -> str:
        return f"{self.root}/{REPLACED}/{os.path.relpath(full, self.root).replace('/', '%')}"

    def _see(self, path: str) -> str:
        """The backing path that this client sees under `path`."""
        full = self.root
        for part in path.strip("/").split("/") if path != "/" else []:
            full = f"{full}/{part}"
            if self._is_hidden(full):
                full = self._before_it(full)
                if not os.path.lexists(full):
                    raise FuseOSError(errno.ENOENT)
        return full

    def _parent(self, path: str) -> str:
        return f"{self._see(os.path.dirname(path))}/{os.path.basename(path)}"

    # Operations.

    def getattr(self, path: str, fi: Any = None) -> dict[str, Any]:
        stat = os.fstat(fi.fh) if fi is not None else os.lstat(self._see(path))
        plain = {k: getattr(stat, k) for k in ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")}
        return plain | {k: getattr(stat, f"{k}_ns") for k in ("st_atime", "st_mtime", "st_ctime")}

    def readdir(self, path: str, fi: Any) -> Iterator[str]:
        directory = self._see(path)
        names = [name for name in os.listdir(directory) if name != REPLACED]
        seen = []
        for name in names:
            full = f"{directory}/{name}"
            if not self._is_hidden(full) or os.path.lexists(self._before_it(full)):
                seen.append(name)
        return iter([".", "..", *seen])

    def create(self, path: str, mode: int, fi: Any) -> int:
        full = self._parent(path)
        fi.fh = os.open(full, os.O_RDWR | os.O_CREAT | (fi.flags & os.O_EXCL), mode)
        self._mark(full)
        return 0

    def open(self, path: str, fi: Any) -> int:
        fi.fh = os.open(self._see(path), fi.flags & ~(os.O_CREAT | os.O_EXCL | os.O_DIRECT))
        return 0

    def read(self, path: str, size: int, offset: int, fi: Any) -> bytes:
        content = os.pread(fi.fh, size, offset)
        self.wires[0].carry(len(content))
        return content

    def write(self, path: str, data: bytes, offset: int, fi: Any) -> int:
        self.wires[1].carry(len(data))
        return os.pwrite(fi.fh, data, offset)

    def truncate(self, path: str, length: int, fi: Any = None) -> None:
        os.truncate(fi.fh if fi is not None else self._see(path), length)

    def flush(self, path: str, fi: Any) -> int:
        return 0

    def fsync(self, path: str, datasync: int, fi: Any) -> int:
        os.fsync(fi.fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fi: Any) -> int:
        return 0

    def release(self, path: str, fi: Any) -> int:
        os.close(fi.fh)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        full = self._parent(path)
        os.mkdir(full, mode)
        self._mark(full)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._see(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._see(path))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._parent(target))
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._see(path))

    def link(self, target: str, source: str) -> int:
        os.link(self._see(source), self._parent(target))
        return 0

    def rename(self, old: str, new: str) -> int:
        source, target = self._see(old), self._parent(new)
        if os.path.isfile(target) and not self._is_hidden(target):
            before = self._before_it(target)
            if os.path.lexists(before):
                os.unlink(before)
            os.link(target, before)
            os.removexattr(before, STAMP)
        self._mark(source)
        os.rename(source, target)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._see(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.lchown(self._see(path), uid, gid)
        return 0

    def utimens(self, path: str, times: Any = None) -> int:
        os.utime(self._see(path), ns=times)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        stat = os.statvfs(self.root)
        names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize")
        return {name: getattr(stat, name) for name in names} | {"f_namemax": 255}


def main() -> None:
    """Serve the mount in the foreground until it is unmounted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("mount", type=Path)
    parser.add_argument("--client", required=True)
    parser.add_argument("--names", type=float, default=0.0)
    parser.add_argument("--misses", type=float, default=0.0)
    parser.add_argument("--attributes", type=float, default=0.0)
    parser.add_argument("--control", type=Path)
    parser.add_argument("--rate", type=float, default=0.0)
    args = parser.parse_args()
    FUSE(
        Client(args.root, args.client, args.names, Control(args.control), args.rate),
        str(args.mount),
        raw_fi=True,
        foreground=True,
        hard_remove=True,
        negative_timeout=args.misses,
        entry_timeout=args.attributes,
        attr_timeout=args.attributes,
        fsname="hostile",
        subtype=args.client,
        default_permissions=True,
        kernel_cache=bool(args.rate),
        big_writes=bool(args.rate),  # libfuse 2: not a page a call
    )


if __name__ == "__main__":
    main()
