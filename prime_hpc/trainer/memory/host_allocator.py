"""Freed memory stays with a trainer that computes on the CPU. Called by `main.py`, once, before the model is built.

glibc gives large blocks back to the kernel as soon as they are freed, and the kernel zeroes every page when the next
micro-batch asks for the same again: a tenth of a small step's CPU time. The process keeps its peak instead.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""
_KEPT = 1 << 30


def keep_freed_memory() -> bool:
    """Blocks of up to 1 GiB come from the heap, which shrinks only where 1 GiB of it is free; False without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _KEPT)) and bool(mallopt(_TRIM_THRESHOLD, _KEPT))
