"""A clock that stands still while this process is stopped, for every deadline that is about others' silence.

A process that was stopped (SIGSTOP, `scontrol suspend`, a machine that slept) heard nobody, and that is nobody's fault.
`time.monotonic` runs on under SIGSTOP; here a gap between two readings counts for `MAX_GAP_S` at most, so somebody must
read it more often than that: a thread that touches no file, or an event loop (`event_loops`).
"""

import threading
import time
from collections.abc import Callable

MAX_GAP_S = 1.0
STOPPED_S = 4.0
"""A gap of which more than this did not count is no busy machine: the process was stopped."""


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
