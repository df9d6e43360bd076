"""Memory of processes that live for hours: Python's garbage collector, and the C library's allocator."""

import ctypes
import gc
import os

YOUNGEST = 20_000
"""New container objects between two collections of the youngest generation (Python's own default: 700)."""


def freeze_gc() -> None:
    """Everything alive now stays: never look at it again, and look for garbage among newer objects less often.

    Reference counts free nearly everything; what is left are cycles of a few kB an episode. With Python's defaults a
    process behind verifiers or vLLM walks through some hundred thousand objects of imported modules again and again: a
    quarter of the orchestrator's CPU time. And of a trainer's ranks each does so at another step, for which all others
    wait.
    """
    gc.collect()
    gc.freeze()
    collect_seldom()


def collect_seldom() -> None:
    """Look for garbage less often: else a tenth of the CPU time of a command that imports, prints and ends."""
    gc.set_threshold(YOUNGEST, 10, 10)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
_KEPT = 1 << 30


def keep_freed_memory() -> bool:
    """For processes that compute on the CPU: blocks of up to 1 GiB come from the heap, which hardly shrinks.

    False without glibc.

    By default large blocks go back to the kernel as soon as they are freed, and it zeroes every page when the next
    micro-batch, or the next layer of a weight update, asks for the same again: a tenth of a small train step's CPU time
    and half of an update's. The process keeps its peak instead.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _KEPT)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))


def resident_bytes(pid: int) -> int:
    """Memory that a process holds, shared pages included; 0 where it is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:  # noqa: PTH123 - asked several times a second
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
