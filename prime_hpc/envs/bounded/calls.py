"""Calls of functions that what a model writes may keep busy for ever, or for whole gigabytes.

A deadline inside this process is none: one multiplication of large numbers holds the interpreter, and with it every
thread, until it is done. So such a function runs in a child process, which the kernel ends when it has had its CPU
time; the child is kept for the next calls, another one takes the place of one that was ended.
"""

import atexit
import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from asyncio import wrap_future
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from typing import Any

from loguru import logger

CPU_S = 10.0
"""CPU time of a call."""
WALL_S = 120.0
"""A child that says nothing for so long, however little CPU time it had, is killed."""
START_S = 600.0
"""The same while it imports, on a slow file system."""
MEMORY_BYTES = 2 << 30
"""Address space of a child."""
KEPT_BYTES = 200 << 20
"""Memory that a child may hold beyond what it had before its first call (sympy's caches); with more it is replaced."""
MOST_CHILDREN = 4
"""For awaited calls, and as many for those that keep a thread waiting: an event loop perhaps, which must not stand in
the line of all episodes' answers."""
_CHILD = "prime_hpc.envs.bounded.child"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class CallFailed(RuntimeError):
    """The function raised, or used up its time or memory; says which."""


class CallBroken(RuntimeError):
    """No call was made, or its process was lost: this says nothing about what the function was called with."""


class _Died(Exception):
    """The child has ended by itself, or was ended by somebody else."""


class _Child:
    """One process, asked by one thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _CHILD],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _ONE_THREAD,
        )
        self._said = b""

    def ask(self, function: str, arguments: tuple[Any, ...] | None) -> Any:
        """Return what the function returns; without arguments it is only imported.

        Raises:
            CallFailed: it raised, or met a limit, with which this child is at its end.
            CallBroken: it cannot be imported, or nothing is heard of it.
            _Died: the child is gone for another reason.
        """
        limits = {"cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES, "kept_bytes": KEPT_BYTES}
        request, allowed_s = pickle.dumps((function, arguments, limits)), START_S
        try:
            self._send(len(request).to_bytes(8, "big") + request)
            imported = json.loads(self._answer(allowed_s))
            if "error" in imported:
                raise CallBroken(f"{function} cannot be imported: {imported['error']}")
            allowed_s = WALL_S
            answer = json.loads(self._answer(allowed_s))
        except TimeoutError as error:  # an OSError too
            self.end()
            raise CallBroken(f"nothing was heard of {function} for {allowed_s:g} s") from error
        except (OSError, EOFError, ValueError) as error:
            code = self.end()
            if code in (-signal.SIGPROF, -signal.SIGXCPU):
                raise CallFailed(f"it took more than {CPU_S:g} s of CPU time") from error
            if code in (-signal.SIGSEGV, -signal.SIGABRT):
                raise CallFailed(f"it ended its process by signal {-code}") from error
            raise _Died(f"the process ended with exit code {code}: {error}") from error
        if answer["is_spent"]:
            self.end()
        if "error" in answer:
            raise CallFailed(answer["error"])
        return answer["value"]

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        rest = memoryview(data)
        while rest:
            rest = rest[self._process.stdin.write(rest) :]

    def _answer(self, seconds: float) -> bytes:
        """Return the next line that it says."""
        assert self._process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._said:
            poll = select.poll()  # `select` itself knows no file numbers above 1023
            poll.register(self._process.stdout, select.POLLIN)
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError("it closed its output")
            self._said += chunk
        line, _, self._said = self._said.partition(b"\n")
        return line

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """End it; its exit code. One that has already met its end keeps that."""
        self.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.5)
        self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        """Close this process's ends of its pipes."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class _Threads(threading.local):
    child: _Child | None = None


_own = _Threads()
_children: set[_Child] = set()


def call(function: str, *arguments: Any) -> Any:
    """Return `module:function` of arguments, computed in a child process; the result is one that JSON can say.

    Raises:
        CallFailed: the function raised, or was ended by a limit.
        CallBroken: it could not be called.
    """
    return _threads(is_awaited=False).submit(_ask, function, arguments).result()


async def call_elsewhere(function: str, *arguments: Any) -> Any:
    """Wait for `call` without keeping the event loop."""
    return await wrap_future(_threads(is_awaited=True).submit(_ask, function, arguments))


async def prepare(function: str) -> None:
    """Start a child for `call_elsewhere` and have it import the function. Raises CallBroken: that is not possible."""
    await wrap_future(_threads(is_awaited=True).submit(_ask, function, None))


def begin(function: str) -> None:
    """Start a child for `call` and have it import the function, and wait for nothing: the first call is quicker."""
    _threads(is_awaited=False).submit(_ask, function, None)


@cache
def _threads(*, is_awaited: bool) -> ThreadPoolExecutor:
    """One for each child, so that calls wait for a child where they wait for nothing else."""
    atexit.register(_end_all)
    return ThreadPoolExecutor(min(MOST_CHILDREN, os.cpu_count() or 1), "bounded-call")


def _ask(function: str, arguments: tuple[Any, ...] | None) -> Any:
    try:
        return _ask_child(function, arguments)
    except CallBroken as error:
        _say_once(str(error))
        raise


@lru_cache(64)
def _say_once(reason: str) -> None:
    logger.error(f"what models answer cannot be judged, and episodes fail: {reason}")


def _ask_child(function: str, arguments: tuple[Any, ...] | None) -> Any:
    """Ask the thread's child; where it was ended from outside, a second one."""
    for is_last in (False, True):
        child = _own.child
        if child is None or not child.is_alive():
            if child is not None:
                _children.discard(child)
            try:
                child = _own.child = _Child()
            except OSError as error:
                raise CallBroken(f"no process can be started: {error}") from error
            _children.add(child)
        try:
            return child.ask(function, arguments)
        except _Died as error:
            if is_last:
                raise CallBroken(str(error)) from error
    raise AssertionError


def _end_all() -> None:
    for child in _children:
        child.end()


def _forget() -> None:
    """In a copy of this process: the children are the other one's, and end when that closes its pipes."""
    for child in _children:
        child.close()
    _children.clear()
    _threads.cache_clear()


os.register_at_fork(after_in_child=_forget)
