"""Comparison of two answers as mathematics (math-verify), from any thread.

It is made in a process that can be killed: `9^{9^{9}}` and `100000000!` are computed by one call of C, for hours.
"""

from prime_hpc.envs.bounded.calls import CallFailed, call, call_elsewhere

LIMIT_S = 5
"""Of reading one answer and of one comparison, where it is Python that keeps busy; the whole has `CPU_S` of `calls`."""
_COMPARE = f"{__name__}:compare"


async def same_answer(gold: str, found: str) -> bool:
    r"""Return whether `found` is the number, expression or set that `gold` is; both without `\boxed{}`."""
    if gold.strip() == found.strip():
        return True
    try:
        return bool(await call_elsewhere(_COMPARE, f"\\boxed{{{gold}}}", f"\\boxed{{{found}}}"))
    except CallFailed:
        return False


def same_boxed(gold: str, found: str) -> bool:
    r"""Return whether two answers in `\boxed{}` are the same. Waits on the calling thread."""
    try:
        return bool(call(_COMPARE, gold, found))
    except CallFailed:
        return False


def compare(gold: str, found: str) -> bool:
    """Compare here and now, however long it takes: for a process that can be killed."""
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    try:
        parsed = [parse(text, parsing_timeout=LIMIT_S) for text in (gold, found)]
        return bool(verify(*parsed, timeout_seconds=LIMIT_S))
    except (Exception, TimeoutException):  # noqa: BLE001 - sympy raises anything on what a model writes
        return False
