"""A shared file system in one process, as hostile as the schedule says, and deterministic.

    world = World(folder, random.Random(7))
    trainer, node2 = world.client("trainer"), world.client("node2")
    with world.installed():                       # patches os, io and shutil for paths below the clients
        write_batch(RunPaths(trainer.root), ...)  # what one client sees: its own changes at once ...
        read_rank_batch(RunPaths(node2.root).rollouts_step(1), 0)   # ... the others' when the schedule shows them

One directory is the server, each client has a directory of its own that holds what it sees. A change goes to the
server, which decides (exclusive creates, renames, "not empty"), and to the view of the client that made it; files are
shared by hard links. A view follows the server directory by directory, when `World.show` picks one: a listing may be
old, a new directory may appear before its files, a file may be short. Time is `World.clock`: whoever sleeps lets it
pass, and with it views follow. So a wait of 90 s takes milliseconds, and the same seed makes the same run.

Faults: `client.kill_at(k)` ends the client at its k-th changing call as SIGKILL does (nothing of it runs on, a write is
torn), `client.fail_at(k, errno)` makes that call fail, `client.stale_reads` makes look-ups answer ESTALE now and then.
"""

import contextlib
import errno
import io
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from prime_hpc.store import waiting
from prime_hpc.store.io import files
from prime_hpc.store.messaging import file_transfer

VISIBLE_AFTER_S = 60.0
"""Whatever the schedule does: a change that old is seen by everybody."""
_STALE_SHARE = 0.15


class Killed(BaseException):
    """The client's process is gone: whoever runs on in its name gets this again."""


class Client:
    """One node's view."""

    def __init__(self, world: "World", name: str, root: Path) -> None:
        self.world, self.name, self.root = world, name, root
        self.num_changes = 0
        self.stale_reads = False
        self._killed = False
        self._kill_at: int | None = None
        self._fail_at: tuple[int, int] | None = None

    def kill_at(self, k: int | None) -> None:
        """Kill at the k-th changing call from now on, counted from 0; None: never."""
        self._kill_at = None if k is None else self.num_changes + k

    def fail_at(self, k: int | None, number: int = errno.EIO) -> None:
        """Let that call fail with an errno; None: no more."""
        self._fail_at = None if k is None else (self.num_changes + k, number)

    def revive(self) -> None:
        """A new process on the same node; the node's caches stay."""
        self._killed, self._kill_at, self._fail_at = False, None, None

    def before_change(self) -> bool:
        """Called before each changing call; returns whether a write is to be torn.

        Raises:
            Killed, OSError: as scheduled.
        """
        if self._killed:
            raise Killed(self.name)
        number, self.num_changes = self.num_changes, self.num_changes + 1
        if number == self._kill_at:
            self._killed = True
            return True
        if self._fail_at is not None and number == self._fail_at[0]:
            raise OSError(self._fail_at[1], os.strerror(self._fail_at[1]), self.name)
        return False

    def before_look(self) -> None:
        """Called before each look-up, open and listing.

        Raises:
            Killed, OSError: as scheduled.
        """
        if self._killed:
            raise Killed(self.name)
        if self.stale_reads and self.world.random.random() < _STALE_SHARE:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), self.name)


class World:
    """The server, its clients and their clock."""

    def __init__(self, folder: Path, seed: random.Random) -> None:
        self.folder, self.random = folder, seed
        self.server = folder / "server"
        self.server.mkdir(parents=True)
        self.clients: dict[str, Client] = {}
        self.now = self._settled = 1000.0
        self.on_sleep: Callable[[], None] | None = None
        """What else happens while somebody waits: another client's work."""
        self._real = SimpleNamespace(
            open=os.open, stat=os.stat, lstat=os.lstat, listdir=os.listdir, rename=os.rename, mkdir=os.mkdir,
            unlink=os.unlink, rmdir=os.rmdir, link=os.link, write=os.write, fsync=os.fsync, scandir=os.scandir,
            close=os.close, writev=os.writev, io_open=io.open,
        )  # fmt: skip
        self._writers: dict[int, Client] = {}

    def client(self, name: str) -> Client:
        """A node that sees everything that there is now."""
        root = self.folder / "clients" / name
        root.mkdir(parents=True)
        self.clients[name] = client = Client(self, name, root)
        self.settle()
        return client

    # Views follow the server.

    def settle(self) -> None:
        """Everybody sees everything."""
        self._settled = self.now
        for name in self.clients:
            self.settle_one(name)

    def settle_one(self, name: str) -> None:
        """One node sees everything."""
        self._follow(self.server, self.clients[name].root, deep=True)

    def show(self) -> None:
        """One client sees one directory as it is on the server, or nearly."""
        client = self.random.choice([self.clients[name] for name in sorted(self.clients)])
        place = ""
        while self.random.random() < 0.75:
            below = sorted(n for n in self._real.listdir(client.root / place) if self._is_dir(client.root / place / n))
            if not below:
                break
            place = os.path.join(place, self.random.choice(below))
        if not self._is_dir(self.server / place):
            place = ""  # it is gone or renamed: that shows above
        self._follow(self.server / place, client.root / place, deep=False)

    def _follow(self, source: Path, view: Path, *, deep: bool) -> None:
        real = self._real
        there, here = set(real.listdir(source)), set(real.listdir(view))
        for name in sorted(here - there):
            self._forget(view / name)
        for name in sorted(there):
            mine, theirs = view / name, source / name
            if self._is_dir(theirs):
                if name in here and not self._is_dir(mine):
                    self._forget(mine)
                if not self._exists(mine):
                    real.mkdir(mine)
                    if not deep and self.random.random() < 0.5:
                        continue  # its name is here before its content
                    self._follow(theirs, mine, deep=True)
                elif deep:
                    self._follow(theirs, mine, deep=True)
            elif name not in here or real.stat(mine).st_ino != real.stat(theirs).st_ino:
                if name in here:
                    self._forget(mine)
                if deep or self.random.random() < 0.8:
                    real.link(theirs, mine)
                else:  # its size is old
                    with real.io_open(theirs, "rb") as file:
                        content = file.read()
                    with real.io_open(mine, "wb") as file:
                        file.write(content[: self.random.randrange(len(content) + 1)])

    def _forget(self, path: Path) -> None:
        if self._is_dir(path):
            for name in self._real.listdir(path):
                self._forget(path / name)
            self._real.rmdir(path)
        else:
            self._real.unlink(path)

    def _exists(self, path: Path) -> bool:
        try:
            self._real.lstat(path)
        except OSError:
            return False
        return True

    def _is_dir(self, path: Path) -> bool:
        return self._exists(path) and stat.S_ISDIR(self._real.lstat(path).st_mode)

    # Time.

    def sleep(self, seconds: float) -> None:
        """Time passes: views follow, others work."""
        self.now += seconds
        for _ in range(int(seconds) + (self.random.random() < seconds % 1)):
            self.show()
        if self.random.random() < seconds / VISIBLE_AFTER_S or self.now - self._settled >= VISIBLE_AFTER_S:
            self.settle()
        if self.on_sleep is not None:
            self.on_sleep()

    # The patched calls.

    def _whose(self, path: Any) -> tuple[Client, str] | None:
        """The client below whose root a path lies, and the path from there."""
        if isinstance(path, int):
            return None
        try:
            parts = Path(os.fsdecode(path)).relative_to(self.folder / "clients").parts
        except (ValueError, TypeError):
            return None
        return (self.clients[parts[0]], os.path.join("", *parts[1:])) if parts and parts[0] in self.clients else None

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        found = self._whose(path)
        if found is None or dir_fd is not None:
            return self._real.open(path, flags, mode, dir_fd=dir_fd)
        client, name = found
        if not flags & os.O_CREAT:
            client.before_look()
            return self._real.open(path, flags, mode)
        torn = client.before_change()
        fd = self._create(client, name, flags, mode)
        if torn:
            self._real.close(fd)
            raise Killed(client.name)
        self._writers[fd] = client
        return fd

    def _create(self, client: Client, name: str, flags: int, mode: int) -> int:
        if not self._is_dir((client.root / name).parent):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(client.root / name))
        fd = self._real.open(self.server / name, flags, mode)
        view = client.root / name
        if self._exists(view):
            self._forget(view)
        self._real.link(self.server / name, view)
        return fd

    def _io_open(self, path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        found = self._whose(path)
        if found is not None:
            client, name = found
            if any(letter in mode for letter in "wax+"):
                torn = client.before_change()
                self._real.close(self._create(client, name, os.O_CREAT | os.O_RDWR, 0o666))
                if torn:
                    raise Killed(client.name)
            else:
                client.before_look()
        return self._real.io_open(path, mode, *arguments, **options)

    def _write(self, fd: int, data: Any) -> int:
        client = self._writers.get(fd)
        if client is not None and client.before_change():
            self._real.write(fd, bytes(data)[: len(data) // 2])
            raise Killed(client.name)
        return self._real.write(fd, data)

    def _writev(self, fd: int, views: Any) -> int:
        client = self._writers.get(fd)
        if client is not None and client.before_change():
            whole = b"".join(views)
            self._real.write(fd, whole[: len(whole) // 2])
            raise Killed(client.name)
        return self._real.writev(fd, views)

    def _fsync(self, fd: int) -> None:
        client = self._writers.pop(fd, None)
        if client is not None and client.before_change():
            raise Killed(client.name)

    def _close(self, fd: int) -> None:
        self._writers.pop(fd, None)
        self._real.close(fd)

    def _looking(self, call: str) -> Callable[..., Any]:
        real = getattr(self._real, call)

        def look(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            found = None if options.get("dir_fd") is not None else self._whose(path)
            if found is not None:
                found[0].before_look()
            return real(path, *arguments, **options)

        return look

    def _changing(self, call: str) -> Callable[..., Any]:
        """mkdir, unlink, rmdir: on the server, then in the view."""
        real = getattr(self._real, call)

        def change(path: Any, *arguments: Any, **options: Any) -> None:
            found = None if options.get("dir_fd") is not None else self._whose(path)
            if found is None:
                real(path, *arguments, **options)
                return
            client, name = found
            if client.before_change():
                raise Killed(client.name)
            view = client.root / name
            if call != "mkdir" and not self._exists(view):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            if call == "mkdir" and not self._is_dir(view.parent):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            try:
                real(self.server / name, *arguments, **options)
            finally:  # whatever the server said: now this client knows
                if call == "mkdir":
                    if not self._exists(view) and self._is_dir(self.server / name):
                        self._real.mkdir(view)
                elif not self._exists(self.server / name) and self._exists(view):
                    self._forget(view)

        return change

    def _rename(self, source: Any, target: Any, **options: Any) -> None:
        found, to = self._whose(source), self._whose(target)
        if found is None or to is None:
            self._real.rename(source, target, **options)
            return
        client, name = found
        if client.before_change():
            raise Killed(client.name)
        old, new = client.root / name, client.root / to[1]
        if not self._exists(old):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
        self._real.rename(self.server / name, self.server / to[1])
        if self._exists(new):
            self._forget(new)
        self._real.rename(old, new)
        # What the client held of the old name may have been old; under the new one it looks afresh.
        if self._is_dir(new):
            self._follow(self.server / to[1], new, deep=True)

    @contextlib.contextmanager
    def installed(self) -> Iterator["World"]:
        """Within the block, calls on paths below the clients behave as this module says, and time is the world's."""
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep, time=lambda: self.now)
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context
            for module in (files, waiting, file_transfer):
                patch(mock.patch.object(module, "time", clock))
            for call, replacement in (
                ("open", self._open),
                ("write", self._write),
                ("writev", self._writev),
                ("fsync", self._fsync),
                ("close", self._close),
            ):
                patch(mock.patch.object(os, call, replacement))
            for call in ("stat", "lstat", "listdir", "scandir"):
                patch(mock.patch.object(os, call, self._looking(call)))
            for call in ("mkdir", "unlink", "rmdir"):
                patch(mock.patch.object(os, call, self._changing(call)))
            patch(mock.patch.object(os, "rename", self._rename))
            patch(mock.patch.object(io, "open", self._io_open))
            patch(mock.patch.object(shutil, "_use_fd_functions", False))  # rmtree by paths
            yield self
