"""Pauses between looks at something that many others look at as well: Slurm's controller, a shared file system.

They grow, for what has not come soon will not come soon, and no two that began together stay in step.

    pause = Backoff(1.0, 15.0)
    while not there():
        time.sleep(pause.next())
"""

import random

__all__ = ["Backoff"]

GROWTH = 1.5
JITTER = 0.2


class Backoff:
    """Lengths of the next pauses, seconds."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        """Take the first pause, and the longest (each give or take a fifth)."""
        self._next_s = first_s
        self._longest_s = longest_s

    def next(self) -> float:
        """Return the length of the pause that comes now."""
        now_s = min(self._next_s, self._longest_s)
        self._next_s = now_s * GROWTH
        return now_s * random.uniform(1 - JITTER, 1 + JITTER)
