"""The process in which `calls.call` computes. It ends when its standard input does.

Its limits are the kernel's, for nothing in an interpreter that is kept busy by C can end it: CPU time of a call by a
signal that is not handled, memory by the size of the address space.
"""

import contextlib
import importlib
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import psutil


def main() -> None:
    """Answer until there are no more requests."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):  # Slurm's warnings, Ctrl-C: the parent ends it
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    requests = sys.stdin.buffer
    held: dict[str, int] = {}  # when a function was imported
    while (request := _next(requests)) is not None:
        name, arguments, limits = request
        _limit_memory(limits["memory_bytes"])
        try:
            module, _, function = name.partition(":")
            found = getattr(importlib.import_module(module), function)
        except Exception as error:  # noqa: BLE001 - a broken package raises anything
            _say(answers, _error(error))
            continue
        _say(answers, {})
        most = held.setdefault(name, _resident_bytes()) + limits["kept_bytes"]
        answer = {"value": None} if arguments is None else _called(found, arguments, limits["cpu_s"])
        _say(answers, {"is_spent": _resident_bytes() > most} | answer)


def _called(function: Callable[..., Any], arguments: tuple[Any, ...], cpu_s: float) -> dict[str, Any]:
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        return {"value": function(*arguments)}
    except MemoryError as error:
        return _error(error) | {"is_spent": True}
    except Exception as error:  # noqa: BLE001 - it is the caller's to judge
        return _error(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _error(error: Exception) -> dict[str, Any]:
    return {"error": f"{type(error).__name__}: {error}"[:1000]}


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _next(requests: BinaryIO) -> tuple[str, tuple[Any, ...], dict[str, float]] | None:
    length = requests.read(8)
    data = requests.read(int.from_bytes(length, "big")) if length else b""
    return pickle.loads(data) if data else None


def _limit_memory(most: float) -> None:
    for limit, value in ((resource.RLIMIT_AS, int(most)), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        with contextlib.suppress(OSError, ValueError):  # macOS has no such limit of memory
            resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _say(answers: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(answers, data) :]


if __name__ == "__main__":
    main()
