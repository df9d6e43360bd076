"""Host memory that this process may still take, of the machine and of the cgroup in which its job runs, and what the
kernel did when there was none."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

HEADROOM = 0.9
"""Share of what is available that the processes of a node may take for copies of what they hold."""
PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_MEMORY = (
    ("memory.max", "memory.current", ("active_file", "inactive_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
)
"""Limit, use, and what of it the kernel gives back (pages of files), as MemAvailable has it: cgroups v2, v1."""


RECENT_S = 60.0
_OOM_COUNTS = ("memory.events", "memory.oom_control")
"""Files of cgroups v2 and v1."""


def available_bytes() -> int:
    """Return how much may be taken now: what the machine has, and each limit above this process leaves."""
    lines = (PROC / "meminfo").read_text(encoding="ascii").splitlines()
    machine = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), 0)
    return int(max(0, min([machine, *(_left(folder) for folder in _cgroups())])))


def oom_kills() -> int | None:
    """Count the processes of this one's cgroup that the kernel ended for want of memory; None: it does not say."""
    for folder in _cgroups():
        for name in _OOM_COUNTS:
            with contextlib.suppress(OSError, StopIteration):
                rows = (line.split() for line in (folder / name).read_text().splitlines())
                return next(int(row[1]) for row in rows if row[0] == "oom_kill")
    return None


class RecentOomKills:
    """Of a process that looks now and then: what the kernel ended lately, which may be why others end now. What was
    survived long ago is not."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock, self._counts, self._next_at = clock, [oom_kills()] * 2, clock() + RECENT_S

    def look(self) -> None:
        """Forget what is older than twice `RECENT_S`."""
        if self._clock() >= self._next_at:
            self._counts, self._next_at = [self._counts[1], oom_kills()], self._clock() + RECENT_S

    def count(self) -> int | None:
        """Return how many there were in the last `RECENT_S`, or up to twice that; None: the kernel does not say."""
        now, before = oom_kills(), self._counts[0]
        return None if now is None or before is None else now - before


def _cgroups() -> Iterator[Path]:
    """Yield the folders of the cgroups that this process's memory counts in, the innermost first."""
    try:
        lines = (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        inner = root / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _left(folder: Path) -> int | float:
    """Return the bytes that one cgroup leaves; infinite where it has no limit, or its files are not to be seen."""
    for limit, used, given_back in _MEMORY:
        with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
            most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
            rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return most - taken + sum(int(row[1]) for row in rows if row[0] in given_back)
    return float("inf")
