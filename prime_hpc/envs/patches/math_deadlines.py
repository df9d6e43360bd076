"""math-verify's deadlines, on every thread.

math-verify bounds its work with SIGALRM, which Python delivers to the main thread alone: elsewhere it raises, and what
calls it (verifiers' `verify_boxed_math_answer` does) scores every answer 0. Episodes run on a thread of their own.

These bound what the work takes of a core, not the time that passes: beside other processes, or other threads of this
one, a right answer would score 0 for its machine's being busy.
"""

import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


PATIENCE = 12
"""So many times a deadline may pass while the work waits for a core."""


class _Deadline:
    """Raises `TimeoutException` in the thread that entered it, unless that left in time."""

    def __init__(self, seconds: float) -> None:
        ident = threading.get_ident()
        self._thread, self._clock = ctypes.c_ulong(ident), time.pthread_getcpuclockid(ident)
        self._lock = threading.Lock()
        self._over = False
        self._end = time.clock_gettime(self._clock) + seconds
        self._latest = time.monotonic() + PATIENCE * seconds
        self._timer = self._look_after(seconds)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._over = True
            self._timer.cancel()

    def _look_after(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self._look)
        timer.daemon = True
        return timer

    def _look(self) -> None:
        late = sys.modules["math_verify.errors"].TimeoutException
        with self._lock:
            if self._over:  # else the thread is there, and has a clock
                return
            left = min(self._end - time.clock_gettime(self._clock), self._latest - time.monotonic())
            if left <= 0:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, ctypes.py_object(late))
                return
            self._timer = self._look_after(max(left, 0.01))
            self._timer.start()


def _deadline(timeout_seconds: int | None = 10) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """In place of math-verify's decorator of the same arguments."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        if not timeout_seconds or timeout_seconds <= 0:
            return function

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> T:
            with _Deadline(timeout_seconds):
                return function(*args, **kwargs)

        return bounded

    return decorate


def use_on_threads() -> None:
    """Have math-verify, if it is imported, keep its deadlines on any thread of this process. Idempotent."""
    for name in ("math_verify.parser", "math_verify.grader"):
        if name in sys.modules:
            vars(sys.modules[name])["timeout"] = _deadline
