"""Waiting: a clock that stands still while this process is stopped, for every deadline that is about others' silence;
and the pauses between looks at something that many others look at as well.

A process that was stopped (SIGSTOP, `scontrol suspend`, a machine that slept) heard nobody, and that is nobody's fault.
`time.monotonic` runs on under SIGSTOP; here a gap between two readings counts for `MAX_GAP_S` at most, so somebody must
read it more often than that: a thread that touches no file, or an event loop (`event_loops`).
"""

import random
import threading
import time
from collections.abc import Callable

MAX_GAP_S = 1.0
STOPPED_S = 4.0
"""A gap of which more than this did not count is no busy machine: the process was stopped."""
GROWTH, JITTER = 1.5, 0.2
"""Of pauses: each is that much longer than the one before, give or take this share of it."""


class AwakeClock:
    """Seconds during which this process was running.

    Args:
        raw: a clock that runs on while the process is stopped.
        max_gap_s: the most that a gap between two readings counts for.
    """

    def __init__(self, raw: Callable[[], float] = time.monotonic, max_gap_s: float = MAX_GAP_S) -> None:
        self._raw, self._max_gap_s = raw, max_gap_s
        self._lock = threading.Lock()
        self._last = raw()
        self._now = self._last
        self._missed = 0.0

    def now(self) -> float:
        """Seconds, of a clock that only ever moves by readings close to each other."""
        with self._lock:
            self._read()
            return self._now

    def missed(self) -> float:
        """Seconds so far that did not count."""
        with self._lock:
            self._read()
            return self._missed

    def _read(self) -> None:
        raw = self._raw()
        gap, self._last = raw - self._last, raw
        if gap > self._max_gap_s:
            self._missed += gap - self._max_gap_s
            gap = self._max_gap_s
        self._now += gap


class Backoff:
    """Lengths of the next pauses, seconds: between looks at Slurm's controller, a shared file system.

    They grow, for what has not come soon will not come soon, and no two that began together stay in step.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        """Take the first pause, and the longest (each give or take a fifth)."""
        self._next_s = first_s
        self._longest_s = longest_s

    def next(self) -> float:
        """Return the length of the pause that comes now."""
        now_s = min(self._next_s, self._longest_s)
        self._next_s = now_s * GROWTH
        return now_s * random.uniform(1 - JITTER, 1 + JITTER)
