"""math-verify's comparison, for a process that can be killed: it is imported there, so that a package that is broken is
no answer's fault."""

from math_verify import parse, verify
from math_verify.errors import TimeoutException

LIMIT_S = 5
"""Of reading one answer and of one comparison, where it is Python that keeps busy; the whole has `CPU_S` of `calls`."""


def compare(gold: str, found: str) -> bool:
    """Compare here and now, however long it takes."""
    try:
        parsed = [parse(text, parsing_timeout=LIMIT_S) for text in (gold, found)]
        return bool(verify(*parsed, timeout_seconds=LIMIT_S))
    except MemoryError:
        raise
    except (Exception, TimeoutException):  # noqa: BLE001 - sympy raises anything on what a model writes
        return False
