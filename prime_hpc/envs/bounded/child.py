"""The process in which `calls.call` computes. It ends when its standard input does.

Its limits are the kernel's, for nothing in an interpreter that is kept busy by C can end it: CPU time of a call by a
signal that is not handled, memory by the size of the address space.
"""

import importlib
import json
import os
import pickle
import resource
import signal
import sys
from typing import Any, BinaryIO


def main() -> None:
    """Answer until there are no more requests."""
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # Slurm's warning: an answer that is lost would be taken for a wrong one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    requests = sys.stdin.buffer
    while (request := _next(requests)) is not None:
        name, arguments, limits = request
        _limit_memory(limits["memory_bytes"])
        try:
            module, _, function = name.partition(":")
            found = getattr(importlib.import_module(module), function)
            _say(answers, {})
            signal.setitimer(signal.ITIMER_PROF, limits["cpu_s"])
            answer = {"value": found(*arguments)}
        except Exception as error:  # noqa: BLE001 - it is the caller's to judge
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        _say(answers, answer)


def _next(requests: BinaryIO) -> tuple[str, tuple[Any, ...], dict[str, float]] | None:
    length = requests.read(8)
    data = requests.read(int.from_bytes(length, "big")) if length else b""
    return pickle.loads(data) if data else None


def _limit_memory(most: float) -> None:
    for limit, value in ((resource.RLIMIT_AS, int(most)), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _say(answers: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(answers, data) :]


if __name__ == "__main__":
    main()
