"""Tasks that are made, not read: arguments of their tasksets, and how they are drawn."""

import random
from collections.abc import Callable, Iterator
from typing import TypeVar

import verifiers.v1 as vf

from prime_hpc.envs.tasksets.reverse_text_data import Split, split_of

T = TypeVar("T")
MOST_MISSES = 1_000_000
"""Draws without one that will do, after which there is none (in half a minute): the rarer split has a tenth of what
can be drawn, of which perhaps one in ten thousand is of use."""


class GeneratedConfig(vf.TasksetConfig):
    """Arguments of every taskset that makes its tasks."""

    split: Split = "train"
    """The set of tasks; the two sets have none in common."""
    seed: int = 0
    """Selection from the split's tasks, and its order."""
    num_tasks: int = 1000
    """How many."""


class OneSeatConfig(vf.EnvConfig):
    """The seats of an environment that plays the user: one."""

    agent: vf.AgentConfig = vf.AgentConfig()


def drawn(name: str, config: GeneratedConfig, draw: Callable[[random.Random], tuple[str, T] | None]) -> Iterator[T]:
    """Yield the split's draws in the seed's order, as many as are asked for; the same one may come twice.

    Args:
        name: of the taskset, which is a part of the seed.
        draw: makes one: the text that tells its split, and what is yielded; None: it is of no use.

    Raises:
        ValueError: the arguments leave (nearly) nothing to draw in this split.
    """
    rng = random.Random(f"{name}:{config.split}:{config.seed}")
    count = misses = 0
    while count < config.num_tasks:
        found = draw(rng)
        if found is not None and split_of(found[0]) == config.split:
            count, misses = count + 1, 0
            yield found[1]
            continue
        misses += 1
        if misses == MOST_MISSES:
            raise ValueError(
                f"{name}: its arguments leave too few tasks: none of the {config.split} split in {misses} draws"
            )
