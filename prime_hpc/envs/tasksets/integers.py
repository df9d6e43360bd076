"""Tasks whose answer is the whole number that a reply ends with."""

import re

import verifiers.v1 as vf

_INTEGER = re.compile(r"-?\d+")
_MOST_DIGITS = 18


def last_integer(reply: str) -> int | None:
    """Return the last whole number of a reply; commas between digits are left out, as are digits beyond 18."""
    found = _INTEGER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", reply))
    return int(found[-1][:_MOST_DIGITS]) if found else None


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
