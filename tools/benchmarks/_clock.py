"""CPU seconds of a process tree over time: what a benchmark may compare on a machine that others load as well.

Used by `loop.py`. Wall-clock rates are what counts on a quiet machine; CPU seconds say how much of them is work.
"""

import threading
import time

import numpy as np
import psutil


class TreeClock:
    """Samples the CPU seconds that a process and all its descendants have used so far.

    with TreeClock(pid) as clock: ...
    clock.between(t0, t1)
    """

    def __init__(self, pid: int, interval_s: float = 0.5) -> None:
        self._root = psutil.Process(pid)
        self._interval_s = interval_s
        self._used: dict[tuple[int, float], float] = {}
        self._rows: list[tuple[float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu-clock", daemon=True)

    def __enter__(self) -> "TreeClock":
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()  # what ended since the last look is counted up to there, the rest to now

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._look()

    def _look(self) -> None:
        try:
            tree = [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return  # the root has ended: nothing is added any more
        for process in tree:
            try:
                times = process.cpu_times()
                self._used[process.pid, process.create_time()] = times.user + times.system
            except psutil.Error:
                continue  # it has ended: what it used until the last look stays counted
        self._rows.append((time.time(), sum(self._used.values())))

    def between(self, begin: float, end: float) -> float:
        """CPU seconds used from `begin` to `end` (unix seconds), interpolated."""
        at, used = np.array(self._rows).T
        first, last = np.interp([begin, end], at, used)
        return float(last - first)
