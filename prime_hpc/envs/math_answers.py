"""Comparison of two answers as mathematics (math-verify), from any thread and within a deadline."""

import asyncio

from math_verify import parse, verify
from math_verify.errors import TimeoutException

from prime_hpc.envs.patches.math_deadlines import use_on_threads

LIMIT_S = 5
"""Of reading one answer and of one comparison."""


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
