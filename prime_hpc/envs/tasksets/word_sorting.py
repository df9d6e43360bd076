"""word-sorting: reply with the user's words in alphabetical order. One turn."""

import random
from collections.abc import Iterable, Sequence

import verifiers.v1 as vf

from prime_hpc.envs.tasksets.generated import GeneratedConfig, drawn
from prime_hpc.envs.tasksets.reverse_text_data import WORDS

__all__ = ["WordSortingTaskset"]

INSTRUCTIONS = "Reply with the words in alphabetical order, separated by spaces, and nothing else."


def order_score(reply: str, words: Sequence[str]) -> float:
    """Share of places at which the reply has the sorted list's word, in [0, 1]; words too many count as places."""
    said, expected = reply.replace(",", " ").lower().split(), sorted(words)
    right = sum(a == b for a, b in zip(said, expected, strict=False))
    return right / max(len(said), len(expected), 1)


class WordSortingData(vf.TaskData):
    """One list."""

    words: list[str]


class WordSortingTask(vf.Task[WordSortingData]):
    """Scores the last reply."""

    @vf.reward
    async def order(self, trace: vf.Trace) -> float:
        """Return the share of words in their places."""
        return order_score(trace.last_reply, self.data.words)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        """1 for the sorted list itself."""
        return float(trace.last_reply.split() == sorted(self.data.words))


class WordSortingConfig(GeneratedConfig):
    """Arguments of `word-sorting`."""

    num_tasks: int = 5000
    """How many."""
    min_words: int = 3
    """Fewest words of a list."""
    max_words: int = 5
    """Most words of a list."""
    instructions: str | None = INSTRUCTIONS
    """The system prompt."""


class WordSortingTaskset(vf.Taskset[WordSortingTask, WordSortingConfig]):
    """Lists of short words, none twice in a list."""

    def load(self) -> Iterable[WordSortingTask]:
        """Return the split's lists, in the seed's order; the same one may come twice."""
        config = self.config
        if not 2 <= config.min_words <= config.max_words <= len(WORDS):
            raise ValueError(f"word-sorting needs 2 <= min_words <= max_words <= {len(WORDS)}")

        def draw(rng: random.Random) -> tuple[str, list[str]]:
            words = rng.sample(WORDS, rng.randint(config.min_words, config.max_words))
            return " ".join(sorted(words)), words

        for words in drawn("word-sorting", config, draw):
            data = WordSortingData(prompt=" ".join(words), system_prompt=config.instructions, words=words)
            yield WordSortingTask(data, config.task)
