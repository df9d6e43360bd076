"""rows: a data set of one's own and reward functions of one's own. One turn.

Rows as TRL and verl have them work as they are: `prompt` (text or messages) or `question`, and an answer in `answer`,
`ground_truth`, `solution`, `label` or verl's `reward_model.ground_truth`; a text in `system` is the system prompt. The
functions: `rows/scoring.py`.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import verifiers.v1 as vf
from pydantic import PrivateAttr, SerializeAsAny
from verifiers.v1.dialects.chat import message_to_wire

from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.math_answers import open_comparison
from prime_hpc.envs.rows.reading import (
    Row,
    answer_in,
    asking_column,
    prompt_in,
    read_files,
    read_hub,
    system_in,
    why_refused,
)
from prime_hpc.envs.rows.scoring import NAMED, Reply, RewardFunction, find_functions
from prime_hpc.envs.rows.shown import with_images

__all__ = ["Rows"]


class RowData(vf.TaskData):
    """One row."""

    answer: Any = None
    row: Row = {}
    """Its columns but for the prompt's."""


class RowTaskConfig(vf.TaskConfig):
    """Holds the functions: an environment around the rows makes tasks of its own, with their config."""

    _functions: tuple[RewardFunction, ...] = PrivateAttr(())

    @property
    def functions(self) -> tuple[RewardFunction, ...]:
        """By which replies are scored."""
        return self._functions

    def scored_by(self, functions: tuple[RewardFunction, ...]) -> Self:
        """Return a copy with these."""
        own = self.model_copy()
        own._functions = functions
        return own


class RowTask(vf.Task[RowData, vf.State, RowTaskConfig]):
    """Scores a reply by the functions of its config."""

    @vf.reward
    async def rewards(self, trace: vf.Trace) -> dict[str, float]:
        """Record every function's score with its weight, and what it measures beside it.
        Raises Exception: a function's own; the episode has failed then."""
        functions = self.config.functions
        if not functions:
            raise RuntimeError("the task has lost its reward functions")
        reply = Reply(
            text=trace.last_reply,
            prompt=_plain(self.data.prompt),
            messages=_plain(trace.messages),
            answer=self.data.answer,
            row=self.data.row,
            reasoning="".join(message.reasoning_content or "" for message in trace.assistant_messages[-1:]),
        )
        for each in functions:
            value, metrics = await each.value(reply)
            if each.weight:
                trace.record_reward(each.name, value, each.weight)
            else:
                trace.record_metric(each.name, value)
            for name, figure in metrics.items():
                trace.record_metric(name if len(functions) == 1 else f"{each.name}/{name}", figure)
        return {}


def _plain(messages: Any) -> Any:
    """Return messages as OpenAI's dictionaries; a text as it is."""
    if isinstance(messages, str) or messages is None:
        return messages
    return [message_to_wire(message) for message in messages]


class RowsConfig(vf.TasksetConfig):
    """Arguments of `rows`."""

    task: SerializeAsAny[RowTaskConfig] = RowTaskConfig()
    files: str | list[str] = []
    """JSONL or Parquet files, patterns or directories; relative to where the run is started."""
    dataset: str | None = None
    """Or a data set of the hub."""
    subset: str | None = None
    """Its configuration."""
    dataset_split: str = "train"
    """Its split."""
    prompt: str | None = None
    """Column of the prompt, a text or messages; default: the first of `prompt`, `messages`, `question`, ... that asks
    something (messages of SFT end with the reply)."""
    images: str | None = None
    """Column of the prompt's images, one or a list; default: `images` or `image`, where a prompt has a place for
    them."""
    answer: str | None = None
    """Column of the answer, `a.b` within another; default: the first of `answer`, `ground_truth`, ... that is there."""
    question: str = "{}"
    """The user's words around a prompt that is a text; `{}` stands for it."""
    instructions: str | None = None
    """The system prompt of prompts that bring none."""
    reward: str | list[str] = "math"
    """`math`, `exact`, `contains`, or your own as `FILE.py:function` or `module:function`; several add up."""
    weights: list[float] = []
    """Of several rewards; default 1 each. One of weight 0 is a metric."""


class Rows(vf.Taskset[RowTask, RowsConfig]):
    """The rows, in their order."""

    differ_in_data: Literal[True] = True

    @property
    def scored_by(self) -> set[str]:
        """Names of the modules with the user's reward functions."""
        return {module for each in self.functions for module in each.modules}

    @cached_property
    def functions(self) -> tuple[RewardFunction, ...]:
        """The reward functions. Raises EnvError: one is not there."""
        names = _listed(self.config.reward)
        weights = self.config.weights or [1.0] * len(names)
        if not names or len(names) != len(weights):
            raise EnvError(f"rows: {len(names)} rewards and {len(weights)} weights: state a weight for each reward")
        return find_functions(names, weights)

    async def open_scorer(self) -> None:
        """Start what compares answers. Raises EnvError: math-verify cannot be imported."""
        if "math" in _listed(self.config.reward):
            await open_comparison()

    def load(self) -> Iterable[RowTask]:
        """One task a row. Raises EnvError: nothing is named, cannot be read or is no prompt; a reward is not there or
        takes what no row has."""
        config = self.config
        if bool(config.files) == bool(config.dataset):
            raise EnvError("rows: state `args.files` (JSONL or Parquet) or `args.dataset` (of the hub), one of them")
        if config.question.count("{}") != 1:
            raise EnvError(f"rows: `question` needs one {{}}, which stands for the prompt, not {config.question!r}")
        functions, columns, place = self.functions, set[str](), ""
        scoring = config.task.scored_by(functions)
        for place, folder, row in _read(config):
            try:
                data = _data(config, row, folder)
            except ValueError as error:
                raise EnvError(f"rows: {place}: {why_refused(error)}") from error
            _check_answer(functions, data, place)
            columns.update(data.row)
            yield RowTask(data, scoring)
        for each in functions if place else ():
            each.check(columns)


def _read(config: RowsConfig) -> Iterator[tuple[str, Path | None, Row]]:
    if config.dataset is None:
        return read_files(_listed(config.files), "rows")
    return read_hub(config.dataset, config.subset, config.dataset_split)


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


def _check_answer(functions: Iterable[RewardFunction], data: RowData, place: str) -> None:
    for each in functions if data.answer is None else ():
        if each.function in NAMED.values():
            raise EnvError(
                f"rows: {place}: no answer for reward {each.name!r}: state its column as `args.answer`, or leave the "
                f"row out; the columns are: {', '.join(data.row)}"
            )


def _data(config: RowsConfig, row: Row, folder: Path | None) -> RowData:
    column = asking_column(row, config.prompt)
    prompt = prompt_in(row, column)
    system = system_in(row, prompt, config.instructions)
    if isinstance(prompt, str):
        prompt = config.question.replace("{}", prompt)
    elif config.question != "{}":
        raise ValueError(f"`question` is for prompts that are texts, `{column}` holds messages")
    prompt, images = with_images(prompt, row, folder, config.images)
    rest = {name: value for name, value in row.items() if name not in (column, images)}
    return RowData(prompt=prompt, system_prompt=system, answer=answer_in(rest, config.answer), row=rest)
