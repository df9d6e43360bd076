"""The supervisor's sign of life: a thread that touches no file, so that a file system that hangs is no death.

The supervisor's own loop lists directories, writes status.json and logs: on a shared file system that does not answer
it waits, and goes on where it was. Meanwhile its agents hear this pulse, and the bus's hub hears theirs. A loop
that stands for `stall_s` is given up: then the pulse stops, the agents end their roles and the job is given back.
"""

import threading
from collections.abc import Callable

from prime_hpc.runtime.clock import AwakeClock

PULSE_S = 2.0
_TICK_S = 0.2


class Pulse:
    """Rings until `close`.

    Args:
        publish: says one pulse; must not block.
        stall_s: a loop that has not ticked for so long is given up.
    """

    def __init__(self, publish: Callable[[], None], clock: AwakeClock, stall_s: float) -> None:
        self._publish, self._clock, self._stall_s = publish, clock, stall_s
        self._ticked = clock.now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def tick(self) -> None:
        """Note that the supervisor's loop is at work."""
        self._ticked = self._clock.now()

    def close(self) -> None:
        """Fall silent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        due, missed = self._clock.now(), self._clock.missed()
        while not self._stop.wait(_TICK_S):
            now = self._clock.now()
            if self._clock.missed() > missed:  # stopped, as the agents may have been: they hear of it at once
                due, missed = now, self._clock.missed()
            if now >= due and now - self._ticked < self._stall_s:
                due = now + PULSE_S
                self._publish()


class LoopGaps:
    """Time between the turns of the supervisor's loop."""

    def __init__(self, clock: AwakeClock) -> None:
        self._clock = clock
        self._turned, self._missed = clock.now(), clock.missed()

    def take(self) -> tuple[float, float]:
        """Return the seconds since the last call in which the process ran, and those in which it was stopped."""
        turned, missed = self._turned, self._missed
        self._turned, self._missed = self._clock.now(), self._clock.missed()
        return self._turned - turned, self._missed - missed
