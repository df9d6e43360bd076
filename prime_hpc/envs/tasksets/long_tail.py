"""long-tail: count from one number to another. One turn; the replies' lengths are log-normal, a few of them very long.

For trying how a setting bears batches that wait for their longest replies. A reply of n numbers has 4 n - 1 characters
(each number has three digits); n = median * exp(sigma z) with z ~ N(0, 1) and sigma = ln(p99_ratio) / 2.326, so that
the 99th percentile is `p99_ratio` times the median.
"""

import math
import random
from collections.abc import Iterable

import verifiers.v1 as vf

from prime_hpc.envs.tasksets.generated import GeneratedConfig, drawn

__all__ = ["LongTailTaskset"]

INSTRUCTIONS = (
    "Count from the first number to the second. Reply with all the numbers, both of those too, separated by spaces, "
    "and nothing else."
)
LOWEST, HIGHEST = 100, 999
Z_99 = 2.326
"""99th percentile of the standard normal distribution."""


def draw_count(rng: random.Random, median: float, p99_ratio: float, most: int) -> int:
    """Return how many numbers the next reply has: log-normal, at least 2 and at most `most`."""
    drawn = median * math.exp(math.log(p99_ratio) / Z_99 * rng.gauss(0.0, 1.0))
    return round(min(max(drawn, 2.0), most))


def count_score(reply: str, first: int, last: int) -> float:
    """Share of places at which the reply has the count's number, in [0, 1]; numbers too many count as places."""
    said, expected = reply.split(), [str(number) for number in range(first, last + 1)]
    right = sum(a == b for a, b in zip(said, expected, strict=False))
    return right / max(len(said), len(expected))


class LongTailData(vf.TaskData):
    """One count."""

    first: int
    last: int


class LongTailTask(vf.Task[LongTailData]):
    """Scores the last reply."""

    @vf.reward
    async def count(self, trace: vf.Trace) -> float:
        """Return the share of numbers in their places."""
        return count_score(trace.last_reply, self.data.first, self.data.last)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        """1 for the count itself."""
        return float(count_score(trace.last_reply, self.data.first, self.data.last) == 1.0)


class LongTailConfig(GeneratedConfig):
    """Arguments of `long-tail`."""

    num_tasks: int = 5000
    """How many."""
    median_numbers: float = 8.0
    """Numbers of a reply: half of the replies have fewer."""
    p99_ratio: float = 10.0
    """99th percentile of the replies' lengths over their median; 1: all are as long."""
    max_numbers: int = 160
    """Numbers of the longest replies: what would have more has so many."""
    instructions: str | None = INSTRUCTIONS
    """The system prompt."""


class LongTailTaskset(vf.Taskset[LongTailTask, LongTailConfig]):
    """Pairs of numbers of three digits, the first one the smaller."""

    def load(self) -> Iterable[LongTailTask]:
        """Return the split's counts, in the seed's order; the same one may come twice."""
        config = self.config
        if not 2 <= config.median_numbers <= config.max_numbers <= HIGHEST - LOWEST + 1:
            raise ValueError(f"long-tail needs 2 <= median_numbers <= max_numbers <= {HIGHEST - LOWEST + 1}")
        if not 1 <= config.p99_ratio < math.inf:
            raise ValueError("long-tail needs a finite p99_ratio of 1 or more")

        def draw(rng: random.Random) -> tuple[str, tuple[int, int]]:
            count = draw_count(rng, config.median_numbers, config.p99_ratio, config.max_numbers)
            first = rng.randint(LOWEST, HIGHEST + 1 - count)
            last = first + count - 1
            return f"{first} {last}", (first, last)

        for first, last in drawn("long-tail", config, draw):
            data = LongTailData(prompt=f"{first} {last}", system_prompt=config.instructions, first=first, last=last)
            yield LongTailTask(data, config.task)
