"""`prime-hpc doctor --path DIR`: measure a directory and say what to set, or whether to avoid it.

    measured = measure(DIR)                  # about 10 s, at most 1 GiB for a moment, everything removed at the end
    findings = advise(measured)              # in doctor_advice

Between two nodes (or two mounts of one directory) it is also measured how late one sees what the other did.
"""

import mmap
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.doctor.fs_view import FolderView, ViewLost
from prime_hpc.store.io import lustre

GIB = 2**30
BLOCK = 8 << 20
MOST_BYTES = GIB
FREE_SHARE = 0.05
WRITE_S, READ_S, SMALL_S, WATCH_S = 2.0, 1.5, 1.0, 8.0
POLL_S = 0.005


@dataclass
class Visibility:
    """How late the other view saw four changes, in seconds; None: not within `limit_s`."""

    other: str
    limit_s: float
    new_name_s: float | None = None
    """A new file, listed and opened by name for the first time."""
    missed_name_s: float | None = None
    """A new file whose name had been asked for in vain before (a cached miss)."""
    grown_s: float | None = None
    """A longer file whose size had been asked for before."""
    replaced_s: float | None = None
    """New content after a rename over a file that had been read before."""
    exclusive: bool | None = None
    """O_EXCL refuses a name that the other created."""
    locks: dict[str, bool | None] = field(default_factory=dict)
    """By kind, whether the lock excludes the other; None: not supported."""
    problem: str = ""
    """Why nothing could be measured."""


@dataclass
class Measured:
    """Measurements of a directory. Rates per second, sizes in bytes."""

    path: str
    seconds: float = 0.0
    fs_type: str = "unknown"
    source: str = ""
    options: str = ""
    free: int = 0
    total: int = 0
    free_inodes: int | None = None
    """None: the file system does not count them."""
    write_rate: float = 0.0
    """Sequential, the final fsync included."""
    read_rate: float = 0.0
    written: int = 0
    fsync_s: float = 0.0
    """Median of 4 KiB appended and synced."""
    fsync_worst_s: float = 0.0
    metadata_rate: float = 0.0
    """Create + rename + unlink."""
    renames: int = 0
    rename_torn: int = 0
    """Reads that were neither the old nor the new content."""
    rename_missing: int = 0
    """Reads that found no file while it was being replaced."""
    exclusive: bool = False
    """O_EXCL has one winner among processes of this machine."""
    locks: dict[str, bool | None] = field(default_factory=dict)
    mmap: bool = False
    stripe: str | None = None
    """Output of `lfs getstripe -d`; None: no Lustre."""
    osts: dict[str, float] = field(default_factory=dict)
    """Used share by OST."""
    visibility: Visibility | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def measure(
    path: Path, other: Callable[[str], FolderView] | None = None, budget: float = 1.0, watch_s: float = WATCH_S
) -> Measured:
    """Measure a directory.

    Args:
        path: must exist and be writable; a sub-directory is made and removed.
        other: gives the view of the sub-directory of that name through another mount, or from another node.
        budget: factor on the time that each part measures for; the slowest file system gets one block of it.
        watch_s: seconds that the other view gets to show a change.

    Raises:
        ConfigError: not a directory, not writable, or full.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory")
    began = time.monotonic()
    found = Measured(str(path))
    _describe(path, found)
    folder = path / f".prime-hpc-doctor-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        _stream(folder, found, budget)
        _sync(folder, found, budget)
        _metadata(folder, found, budget)
        _replace(folder, found, budget)
        found.exclusive = _exclusive(folder)
        found.locks = {kind: _lock_works(folder, kind) for kind in ("flock", "fcntl")}
        found.mmap = _mmap_works(folder / "mapped")
        if other is not None:
            found.visibility = _visibility(folder, other(folder.name), watch_s)
    except (OSError, subprocess.TimeoutExpired) as error:  # a lock that never comes, say
        words = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} could not be measured: {words}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found.seconds = round(time.monotonic() - began, 2)
    return found


def _describe(path: Path, found: Measured) -> None:
    found.fs_type, found.source, found.options = lustre.mount_of(path)
    stats = os.statvfs(path)
    found.free, found.total = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    found.free_inodes = stats.f_favail if stats.f_files else None
    if lustre.has_lfs(path):
        found.stripe = _stripe(path)
        found.osts = {ost.name: ost.used_share for ost in lustre.osts(path)}


def _stripe(path: Path) -> str | None:
    try:
        return lustre.lfs(["getstripe", "-d", str(path)])
    except (OSError, subprocess.TimeoutExpired):
        return None


def _stream(folder: Path, found: Measured, budget: float) -> None:
    """Sequential write with one fsync, then a read that the page cache is asked not to answer."""
    block = os.urandom(BLOCK)  # a file system that compresses must not win by zeros
    most = int(min(MOST_BYTES, found.free * FREE_SHARE))
    path = folder / "stream"
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        while not found.written or (found.written < most and time.perf_counter() - began < WRITE_S * budget):
            found.written += file.write(block)
        os.fsync(file.fileno())
        found.write_rate = found.written / (time.perf_counter() - began)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    done, began = 0, time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while got := len(file.read(BLOCK)):
            done += got
            if time.perf_counter() - began >= READ_S * budget:
                break
    found.read_rate = done / max(time.perf_counter() - began, 1e-9)
    path.unlink()


def _sync(folder: Path, found: Measured, budget: float) -> None:
    spans: list[float] = []
    end = time.perf_counter() + SMALL_S * budget
    with (folder / "synced").open("wb", buffering=0) as file:
        while len(spans) < 3 or (time.perf_counter() < end and len(spans) < 50):
            began = time.perf_counter()
            file.write(b"x" * 4096)
            os.fsync(file.fileno())
            spans.append(time.perf_counter() - began)
    found.fsync_s, found.fsync_worst_s = statistics.median(spans), max(spans)


def _metadata(folder: Path, found: Measured, budget: float) -> None:
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < SMALL_S * budget or not count:
        (folder / "new").touch(exist_ok=False)
        (folder / "new").rename(folder / "final")
        (folder / "final").unlink()
        count += 1
    found.metadata_rate = count / (time.perf_counter() - began)


def _replace(folder: Path, found: Measured, budget: float) -> None:
    """Open a file again and again while it is replaced: a reader must always see one whole content."""
    path, over = folder / "replaced", threading.Event()
    contents = [bytes([65 + i]) * 4096 for i in range(2)]
    path.write_bytes(contents[0])

    def read() -> None:
        while not over.is_set():
            try:
                data = path.read_bytes()
            except OSError:  # ENOENT, ESTALE: some network file systems answer so; the store's readers try again
                found.rename_missing += 1
                continue
            found.rename_torn += data not in contents

    reader = threading.Thread(target=read)
    reader.start()
    try:
        end = time.perf_counter() + SMALL_S * budget
        while time.perf_counter() < end or not found.renames:
            (folder / "next").write_bytes(contents[(found.renames + 1) % 2])
            (folder / "next").rename(path)
            found.renames += 1
    finally:
        over.set()
        reader.join()


_RACE = """
import os, sys
wins = 0
for number in range(100):
    try:
        os.close(os.open(f"{sys.argv[1]}/race-{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        wins += 1
    except FileExistsError:
        pass
print(wins)
"""
_TRY_LOCK = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
take = fcntl.flock if sys.argv[2] == "flock" else fcntl.lockf
try:
    take(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("taken")
except BlockingIOError:
    print("held")
"""


def _exclusive(folder: Path) -> bool:
    """Have processes race for the same names: each must have exactly one winner."""
    racers = [
        subprocess.Popen([sys.executable, "-c", _RACE, str(folder)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        return sum(int(racer.communicate(timeout=30)[0] or 0) for racer in racers) == 100
    finally:
        for racer in racers:
            racer.kill()  # where one took too long


def _lock_works(folder: Path, kind: str) -> bool | None:
    """Return whether a lock keeps another process out; None: not supported here."""
    with closing(FolderView(folder)) as view:
        if view.ask("lock", "locked", kind) is not True:
            return None
        words = [sys.executable, "-c", _TRY_LOCK, str(folder / "locked"), kind]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        return done.stdout.strip() == "held"


def _mmap_works(path: Path) -> bool:
    path.write_bytes(bytes(mmap.PAGESIZE))
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as view:
            view[:4] = b"seen"
            view.flush()
    except OSError:
        return False
    return path.read_bytes()[:4] == b"seen"


def _visibility(folder: Path, other: FolderView, limit_s: float) -> Visibility:
    """Change things here and ask there. All four waits run at once, so that they share one deadline."""
    here = FolderView(folder)
    found = Visibility(str(other.folder.parent), limit_s)
    with closing(here), closing(other):
        try:
            found.other = f"{other.ask('hello')}:{other.folder.parent}"
            _watch(folder, here, other, found)
            _contend(here, other, found)
        except ViewLost as error:
            found.problem = str(error)
    return found


def _watch(folder: Path, here: FolderView, other: FolderView, found: Visibility) -> None:
    (folder / "grown").write_text("one")
    (folder / "swapped").write_text("old")
    end = time.monotonic() + found.limit_s
    while other.ask("size", "grown") != 3 or other.ask("read", "swapped") != "old":
        if time.monotonic() > end:
            raise ViewLost(f"it does not show within {found.limit_s:g} s what is written here: another directory?")
        time.sleep(POLL_S)
    other.ask("size", "missed")  # this answer may now be cached there
    with (folder / "grown").open("a") as file:
        file.write(" and more")
        file.flush()
        os.fsync(file.fileno())
    (folder / "next-swapped").write_text("new")
    (folder / "next-swapped").rename(folder / "swapped")
    here.ask("create", "missed", "x")
    here.ask("create", "fresh", "x")
    began = time.monotonic()
    waits: dict[str, Callable[[], bool]] = {
        "new_name_s": lambda: other.ask("listed", "fresh") is True and other.ask("read", "fresh") == "x",
        "missed_name_s": lambda: other.ask("size", "missed") == 1,
        "grown_s": lambda: other.ask("size", "grown") == 12,
        "replaced_s": lambda: other.ask("read", "swapped") == "new",
    }
    while waits and time.monotonic() - began < found.limit_s:
        for name in [name for name, seen in waits.items() if seen()]:
            setattr(found, name, round(time.monotonic() - began, 3))
            del waits[name]
        time.sleep(POLL_S)


def _contend(here: FolderView, other: FolderView, found: Visibility) -> None:
    """Test what keeps two nodes apart: exclusive creation, locks."""
    here.ask("create", "claimed", "here")
    found.exclusive = other.ask("create", "claimed", "there") is False
    for kind in ("flock", "fcntl"):
        taken = here.ask("lock", f"{kind}-across", kind) is True
        answer = other.ask("lock", f"{kind}-across", kind)
        found.locks[kind] = answer is False if taken and isinstance(answer, bool) else None
