"""Slurm's warning: SIGTERM to all processes of a job's steps at once, before a preemption or the end of its time; or
SIGUSR1, by `scancel -s`.

The supervisor decides what follows. A role's own processes hear it and go on; programs that they have started for an
environment may have been ended by it, which is then not these programs' doing.
"""

import functools
import math
import os
import signal
import time
from types import FrameType

from prime_hpc.runtime.role_context import LED

__all__ = ["DEAF", "WARNED_WITHIN_S", "WARNINGS", "is_led", "outlive", "was_warned_since"]

WARNINGS = (signal.SIGTERM, signal.SIGUSR1)
DEAF = ("sh", "-c", 'trap "" TERM USR1; exec "$@"', "sh")
"""Begins the command of a process that only this program may end."""
WARNED_WITHIN_S = 0.5
"""So much later than another process this one may hear the same warning."""
_last = -math.inf


def is_led() -> bool:
    """Return whether this process belongs to a step, where SIGTERM is no order, nor is SIGUSR1."""
    return bool(os.environ.get(LED))


def outlive() -> None:
    """From now on a warning is noted and nothing else; copies of this process (multiprocessing) end by SIGTERM."""
    for number in WARNINGS:
        signal.signal(number, _note)  # not SIG_IGN: programs that are started would inherit that
    _heed_in_copies()


@functools.cache
def _heed_in_copies() -> None:
    os.register_at_fork(after_in_child=_heed)


def was_warned_since(moment: float) -> bool:
    """Return whether a warning came after `moment` (`time.monotonic`)."""
    return _last >= moment


def _note(_number: int, _frame: FrameType | None) -> None:
    global _last
    _last = time.monotonic()


def _heed() -> None:
    if signal.getsignal(signal.SIGTERM) is _note:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
