"""math-verify's deadlines, on every thread.

math-verify bounds its work with SIGALRM, which Python delivers to the main thread alone: elsewhere it raises, and what
calls it (verifiers' `verify_boxed_math_answer` does) scores every answer 0. Episodes run on a thread of their own.
"""

import ctypes
import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class _Deadline:
    """Raises `TimeoutException` in the thread that entered it, unless that left in time."""

    def __init__(self, seconds: float) -> None:
        self._thread = ctypes.c_ulong(threading.get_ident())
        self._lock = threading.Lock()
        self._over = False
        self._timer = threading.Timer(seconds, self._raise)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._over = True
        self._timer.cancel()

    def _raise(self) -> None:
        late = sys.modules["math_verify.errors"].TimeoutException
        with self._lock:
            if not self._over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, ctypes.py_object(late))


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
