"""Evaluation tasks that are not trained on.

Two steps, of which the second needs no trust in the first. Where a training and an evaluation environment load one and
the same list of tasks, a tenth of it, by position, is evaluated on and not trained (`task_sources.HOLD_OUT`).
Then the tasks themselves are compared: what an evaluation would take although training has it too is left out
(`leave_out_trained`), whatever the names of environments and splits say.
"""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from loguru import logger

from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.task_sources import EnvSource, prompt_of

CANDIDATES = 2
"""So many times the tasks that an evaluation asks for are looked at, to replace those that are left out."""
SEEN = 2_000
"""Of an endless training environment so many tasks are compared."""
MAKING_S = 60.0
"""For which they may be made: one whose tasks take seconds each would keep the run from its start for an hour."""


def content(task: Any) -> str:
    """Return a task's content: its prompt and the fields that its taskset adds, without its number, where it runs and
    what the taskset says is no content (`no_content`, names of fields)."""
    from verifiers.v1.task import TaskData

    apart: frozenset[str] = getattr(type(task.data), "no_content", frozenset())
    return as_json(task.data, set(TaskData.model_fields) - {"prompt"} | apart)


def as_json(data: Any, exclude: set[str]) -> str:
    """Return a task's data as JSON, without the fields `exclude`.
    Raises EnvError: a field holds what JSON cannot say, so that nobody could tell whether two tasks are the same."""
    try:
        try:
            return str(data.model_dump_json(exclude=exclude))
        except ValueError:  # half a surrogate pair, which web texts that were cut have, is no UTF-8
            return json.dumps(data.model_dump(mode="json", exclude=exclude))
    except ValueError as error:
        raise EnvError(
            f"{type(data).__name__} of task {data.idx}: its fields cannot be written as JSON, by which tasks are told "
            f"apart ({error}): have the taskset give them plain values (a list for an array, text for bytes)"
        ) from error


def leave_out_trained(
    evaluated: Sequence[EnvSource], trained: Sequence[EnvSource], num_examples: int | Sequence[int]
) -> None:
    """Choose each evaluation environment's first `num_examples` tasks that no training environment has.

    One number for all of `evaluated`, or one each.
    Raises EnvError: fewer than half of them are left; names both environments and what to do.
    """
    numbers = [num_examples] * len(evaluated) if isinstance(num_examples, int) else num_examples
    for source, number in zip(evaluated, numbers, strict=True):
        wanted = min(number, source.num_tasks or number)
        count = min(CANDIDATES * number, source.num_tasks or CANDIDATES * number)
        tasks = [source.task(index) for index in range(count)]
        found = {other.name: _common(tasks, other) for other in trained}
        common = set().union(*found.values())
        left = [index for index in range(count) if index not in common][:wanted]
        names = ", ".join(f"{name} ({len(indices)})" for name, indices in found.items() if indices)
        if 2 * len(left) < wanted:
            raise EnvError(
                f"evaluation environment {source.name!r}: {len(common)} of its first {count} tasks are trained on as "
                f"well, by {names}: state another `split` in its args, other environments in orchestrator.eval.env, or "
                "none there, which holds out a tenth of the training tasks"
            )
        if common:
            logger.warning(
                f"evaluation environment {source.name!r}: {len(common)} of its first {count} tasks are trained on as "
                f"well, by {names}; they are left out, {len(left)} are evaluated"
            )
            source.choose(left)


def _common(tasks: Sequence[Any], trained: EnvSource) -> set[int]:
    """Find which of the tasks a training environment has. Most of its tasks are ruled out by their prompt alone."""
    prompts = {prompt_of(task) for task in tasks}
    wanted: dict[str, set[int]] = {}
    for index, task in enumerate(tasks):
        wanted.setdefault(content(task), set()).add(index)
    found: set[int] = set()
    for task in _each(trained, prompts):
        if prompt_of(task) in prompts:
            found |= wanted.get(content(task), set())
    return found


def _each(source: EnvSource, prompts: set[str]) -> Iterator[Any]:
    """Yield the tasks that may have one of these prompts."""
    if source.num_tasks is not None:
        yield from map(source.task, source.may_ask(prompts))
        return
    deadline = time.monotonic() + MAKING_S
    for index in range(SEEN):
        yield source.task(index)
        if time.monotonic() >= deadline:
            logger.warning(
                f"environment {source.name!r} takes long to make its tasks: what is evaluated is compared with its "
                f"first {index + 1} alone"
            )
            return
