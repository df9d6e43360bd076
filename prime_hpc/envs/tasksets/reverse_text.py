"""reverse-text: reply with the user's text in reverse order. One turn.

The texts, prompts and scores are `prime_hpc.envs.tasksets.reverse_text_data`'s; the splits are disjoint by
construction (a text belongs to one of them, whatever the seed).
"""

from collections.abc import Iterable

import verifiers.v1 as vf

from prime_hpc.envs.tasksets.generated import GeneratedConfig
from prime_hpc.envs.tasksets.reverse_text_data import answer_of, build_prompt, make_texts, score

__all__ = ["ReverseTextTaskset"]


class ReverseTextData(vf.TaskData):
    """One text to reverse."""

    text: str


class ReverseTextTask(vf.Task[ReverseTextData]):
    """Scores the last reply."""

    @vf.reward
    async def similarity(self, trace: vf.Trace) -> float:
        """Similarity of the reply to the reversed text, in [0, 1]."""
        return score(trace.last_reply, self.data.text)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        """1 for the reversed text itself."""
        return float(trace.last_reply.strip() == answer_of(self.data.text))


class ReverseTextConfig(GeneratedConfig):
    """Arguments of `reverse-text`."""

    num_tasks: int = 5000
    """How many."""
    min_chars: int = 6
    """Shortest text."""
    max_chars: int = 16
    """Longest text."""
    min_words: int = 2
    """Fewest words of a text."""
    max_words: int = 3
    """Most words of a text."""


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Texts of a few short words."""

    def load(self) -> Iterable[ReverseTextTask]:
        """Return the split's texts, in the seed's order."""
        config = self.config
        texts = make_texts(
            config.split,
            config.seed,
            config.num_tasks,
            min_chars=config.min_chars,
            max_chars=config.max_chars,
            min_words=config.min_words,
            max_words=config.max_words,
        )
        for text in texts:
            (message,) = build_prompt(text)
            yield ReverseTextTask(ReverseTextData(prompt=message["content"], text=text), config.task)
