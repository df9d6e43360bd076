"""Tasks whose answer is the whole number that a reply ends with."""

import re
from decimal import Decimal

import verifiers.v1 as vf

_NUMBER = re.compile(
    r"(?P<sign>(?<![^\W_])(?<![^\W_]_)(?<![)\]}])-|(?<=[=:] )- )?"  # behind a number, a name or a bracket it takes away
    r"(?P<digits>\d++(?:,\d++)*+)(?P<rest>(?:\.\d++)?(?:[eE][-+]?\d{1,2}(?!\w))?)"
)
_TEXT = re.compile(r"\\(?:text[a-z]*|mbox)\{([^{}]*)\}")
"""Words within a formula: nothing that a number could be taken from."""
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+")
_MOST_DIGITS = 10_000


def last_number(reply: str) -> Decimal | None:
    """Return the last number of a reply, exactly; commas between groups of three digits are left out."""
    text = re.sub(r"\{,\}|,\\!", ",", reply.replace("\N{MINUS SIGN}", "-"))
    text = _TEXT.sub(r" \1 ", text)
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    last = found[-1]
    listed, _, digits = (
        ("", "", last["digits"]) if _GROUPED.fullmatch(last["digits"]) else last["digits"].rpartition(",")
    )
    if len(digits) > _MOST_DIGITS or len(last["rest"]) > _MOST_DIGITS:
        return None
    number = Decimal(digits.replace(",", "") + last["rest"])
    return number.copy_negate() if last["sign"] and not listed else number


def last_integer(reply: str) -> int | None:
    """Return the last number of a reply where it is whole: `18.0` is, of `18.5` there is none."""
    number = last_number(reply)
    return int(number) if number is not None and number == number.to_integral_value() else None


class IntegerData(vf.TaskData):
    """One question."""

    answer: int


class IntegerTask(vf.Task[IntegerData]):
    """Scores the final reply."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1 when the last number of the final reply is the answer."""
        return float(last_integer(trace.last_reply) == self.data.answer)


class IntegerToolTask(IntegerTask):
    """One that is answered with tools."""

    @vf.metric
    async def tool_calls(self, trace: vf.Trace) -> float:
        """Tools that were run."""
        return float(len(trace.tool_messages))
