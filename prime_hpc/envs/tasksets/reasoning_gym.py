"""reasoning-gym: procedural tasks with scorers, any of the package's generators by name. One turn.

    args: {generators: {basic_arithmetic: {max_terms: 3}, chain_sum: {}}, num_tasks: 2000}

An answer is what stands in the last `<answer>...</answer>` of the reply, or the whole reply without the tags. It is
scored in a process that can be killed, and never run as a program (`prime_hpc.envs.patches.reasoning_scorers`).
"""

import contextlib
import difflib
import json
import pickle
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from loguru import logger
from pydantic import PrivateAttr

from prime_hpc.envs.bounded.calls import CallFailed, call_elsewhere
from prime_hpc.envs.legacy.parsers import sections
from prime_hpc.envs.tasksets.generated import GeneratedConfig
from prime_hpc.envs.tasksets.reverse_text_data import split_of

__all__ = ["ReasoningGymTaskset"]

SYSTEM_PROMPT = "Solve the task. Give the final answer alone inside <answer></answer>."
_SCORE = "prime_hpc.envs.patches.reasoning_scorers:score"
MAX_DRAWS_PER_TASK = 100
"""Generators with few distinct questions may not have enough of one split."""


class ReasoningGymData(vf.TaskData):
    """One generated question with what its scorer needs."""

    generator: str
    entry: dict[str, Any]
    """As JSON has it, for whoever reads the task."""
    parameters: dict[str, Any] = {}
    """Of the generator: some scorers go by them."""
    _scored: bytes = PrivateAttr(b"")
    """The entry as it was made, pickled: JSON makes lists of tuples, which are not equal to them."""

    def scored_entry(self) -> bytes:
        """Return the entry for the scorer, pickled; of data that was read from JSON it is that one."""
        return self._scored or pickle.dumps(self.entry)

    def keep(self, entry: dict[str, Any]) -> None:
        """Have the scorer take the entry as it was made, where it can be handed on."""
        with contextlib.suppress(Exception):  # pickling raises anything
            self._scored = pickle.dumps(entry)


def extract_answer(reply: str) -> str:
    """Return the reply's final answer."""
    found = sections(reply, "answer")
    return found[-1] if found else reply.strip()


class ReasoningGymTask(vf.Task[ReasoningGymData]):
    """Scores with the generator's own scorer."""

    @vf.reward
    async def answer_score(self, trace: vf.Trace) -> float:
        """Return the generator's score of the answer, in [0, 1]; 0 where its scorer raises or does not end."""
        data, answer = self.data, extract_answer(trace.last_reply)
        try:
            found = await call_elsewhere(
                _SCORE, data.generator, json.dumps(data.parameters, default=str), data.scored_entry(), answer
            )
        except CallFailed as error:
            _say_once(data.generator, str(error))
            return 0.0
        return float(found)

    @vf.metric
    async def has_answer_tags(self, trace: vf.Trace) -> float:
        """1 when the reply has an <answer> section."""
        return float(bool(sections(trace.last_reply, "answer")))


_said: set[str] = set()


def _say_once(generator: str, reason: str) -> None:
    if generator in _said:
        return
    _said.add(generator)
    logger.warning(f"reasoning-gym's scorer of {generator!r} could not judge an answer, which scores 0: {reason}")


class ReasoningGymConfig(GeneratedConfig):
    """Arguments of `reasoning-gym`."""

    generators: dict[str, dict[str, Any]] | list[str] = ["basic_arithmetic"]
    """Generators, by name, with their own parameters; tasks take turns between them."""
    instructions: str | None = SYSTEM_PROMPT
    """The system prompt."""


class ReasoningGymTaskset(vf.Taskset[ReasoningGymTask, ReasoningGymConfig]):
    """Questions of one or several generators."""

    def load(self) -> Iterable[ReasoningGymTask]:
        """Return the split's questions, in the seed's order, generators taking turns."""
        config = self.config
        chosen = config.generators if isinstance(config.generators, dict) else {name: {} for name in config.generators}
        if not chosen:
            raise ValueError("reasoning-gym needs at least one generator")
        streams = [self._questions(name, parameters) for name, parameters in chosen.items()]
        for index in range(config.num_tasks):
            generator, entry = next(streams[index % len(streams)])
            shown = json.loads(json.dumps(entry, default=str))
            data = ReasoningGymData(
                name=generator,
                prompt=shown["question"],
                system_prompt=config.instructions,
                generator=generator,
                entry=shown,
                parameters=chosen[generator],
            )
            data.keep(entry)
            yield ReasoningGymTask(data, config.task)

    def _questions(self, name: str, parameters: dict[str, Any]) -> Any:
        """Return the split's questions of one generator, without end.
        Raises ValueError: no such generator, wrong parameters, or hardly any question belongs to this split."""
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        config = self.config
        if name not in DATASETS:
            nearest = difflib.get_close_matches(name, DATASETS, n=3)
            raise ValueError(f"reasoning-gym has no generator {name!r}; nearest: {', '.join(nearest) or 'none'}")
        size = max(1, config.num_tasks) * MAX_DRAWS_PER_TASK
        try:
            dataset = reasoning_gym.create_dataset(name, size=size, seed=config.seed, **parameters)
        except (TypeError, AssertionError) as error:
            raise ValueError(f"generator {name!r} does not accept {parameters}: {error}") from error
        for draw in range(size):
            entry = dataset[draw]
            if split_of(entry["question"]) == config.split:
                yield name, entry
        raise ValueError(f"generator {name!r} gave too few questions of the {config.split} split in {size} draws")
