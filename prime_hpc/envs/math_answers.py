"""Comparison of two answers as mathematics (math-verify), from any thread and within a deadline.

math-verify bounds its work with SIGALRM, which Python delivers to the main thread alone: elsewhere it raises, and what
calls it (verifiers' `verify_boxed_math_answer` does) scores every answer 0. Episodes run on a thread of their own, so
its deadline is replaced by one that works on every thread.
"""

import asyncio
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import math_verify.grader
import math_verify.parser
from math_verify import parse, verify
from math_verify.errors import TimeoutException

T = TypeVar("T")

LIMIT_S = 5
"""Of reading one answer and of one comparison."""


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
        with self._lock:
            if not self._over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, ctypes.py_object(TimeoutException))


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
    """Have math-verify keep its deadlines on any thread of this process. Idempotent."""
    for module in (math_verify.parser, math_verify.grader):
        vars(module)["timeout"] = _deadline


async def same_answer(gold: str, found: str) -> bool:
    r"""Return whether `found` is the number, expression or set that `gold` is; both without `\boxed{}`.

    Waits on a thread.
    """
    if gold.strip() == found.strip():
        return True
    return await asyncio.to_thread(_same, gold, found)


def _same(gold: str, found: str) -> bool:
    use_on_threads()
    try:
        parsed = [parse(f"\\boxed{{{text}}}", parsing_timeout=LIMIT_S) for text in (gold, found)]
        return bool(verify(*parsed, timeout_seconds=LIMIT_S))
    except (Exception, TimeoutException):  # noqa: BLE001 - sympy raises anything on what a model writes
        return False
