"""alphabet-sort: sort a list of words, then sort more words into it, turn after turn. Several turns.

The environment plays the user. Each turn is answered with the whole list so far; the reward is the mean over turns.
"""

import random
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

from prime_hpc.envs.lazy_runtime import LazyBox
from prime_hpc.envs.tasksets.generated import GeneratedConfig, OneSeatConfig, drawn
from prime_hpc.envs.tasksets.reverse_text_data import WORDS
from prime_hpc.envs.tasksets.word_sorting import order_score

__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]

INSTRUCTIONS = "Keep one list of words in alphabetical order. Reply with the whole list, separated by spaces."


class AlphabetSortData(vf.TaskData):
    """Words of each turn."""

    turns: list[list[str]]


class AlphabetSortTask(vf.Task[AlphabetSortData]):
    """Scores the turns that the environment recorded."""

    @vf.reward
    async def order(self, trace: vf.Trace) -> float:
        """Mean over all turns of the share of words in their places; a turn that was not reached is 0."""
        return sum(trace.info.get("scores", ())) / len(self.data.turns)

    @vf.metric
    async def turns_exact(self, trace: vf.Trace) -> float:
        """Count the turns whose list was right."""
        return float(sum(score == 1.0 for score in trace.info.get("scores", ())))


class AlphabetSortConfig(GeneratedConfig):
    """Arguments of `alphabet-sort`."""

    num_tasks: int = 2000
    """How many."""
    num_turns: int = 3
    """Turns of a conversation."""
    max_words: int = 4
    """Most words of a turn; the fewest is 1, in the first turn 2."""
    instructions: str | None = INSTRUCTIONS
    """The system prompt."""


class AlphabetSortTaskset(vf.Taskset[AlphabetSortTask, AlphabetSortConfig]):
    """Conversations over short words, none twice in a conversation."""

    def load(self) -> Iterable[AlphabetSortTask]:
        """Return the split's conversations, in the seed's order."""
        config = self.config
        if config.num_turns < 1 or not 2 <= config.max_words <= len(WORDS) // config.num_turns:
            raise ValueError("alphabet-sort needs num_turns >= 1 and 2 <= max_words <= the words there are a turn")

        def draw(rng: random.Random) -> tuple[str, list[list[str]]]:
            sizes = [rng.randint(1 if turn else 2, config.max_words) for turn in range(config.num_turns)]
            words = rng.sample(WORDS, sum(sizes))
            return " ".join(words), [[words.pop() for _ in range(size)] for size in sizes]

        for turns in drawn("alphabet-sort", config, draw):
            data = AlphabetSortData(
                prompt=f"Sort: {' '.join(turns[0])}", system_prompt=config.instructions, turns=turns
            )
            yield AlphabetSortTask(data, config.task)


class AlphabetSortEnv(vf.Env[OneSeatConfig]):
    """Plays the user who brings more words."""

    async def run(self, task: Any, agents: Any) -> None:
        """One conversation."""
        turns = task.data.turns
        async with LazyBox() as box, agents.agent.interaction(task, runtime=box) as talk:
            known: list[str] = list(turns[0])
            scores = talk.trace.info["scores"] = []
            segment = await talk.turn()
            scores.append(order_score(segment.last_reply, known))
            for more in turns[1:]:
                if segment.terminated:
                    return
                known += more
                segment = await talk.turn(f"Add: {' '.join(more)}")
                scores.append(order_score(segment.last_reply, known))
