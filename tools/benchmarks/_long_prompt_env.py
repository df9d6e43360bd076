"""A taskset of long prompts that share nothing; where `PRIME_HPC_BENCH_SPREAD` is set, the episodes of a group do not
share a server either. For `routing.py` and `flight.py`, which put this folder on the path of their processes."""

import os
import random
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["LongPromptTaskset"]


class LongPromptTask(vf.Task[vf.TaskData]):
    """Gives 1.0."""

    @vf.reward
    async def verdict(self, trace: vf.Trace) -> float:
        """1.0 for anything."""
        return 1.0


class LongPromptConfig(vf.TasksetConfig):
    """Arguments."""

    letters: int = 900
    """Of a prompt."""


class LongPromptTaskset(vf.Taskset[LongPromptTask, LongPromptConfig]):
    """Random letters, other ones in each task from the first on."""

    def load(self) -> Iterable[LongPromptTask]:
        """A thousand tasks."""
        config, letters = self.config, "abcdefghijklmnopqrstuvwxyz"
        for number in range(1000):
            text = "".join(random.Random(number).choices(letters, k=config.letters))
            yield LongPromptTask(vf.TaskData(prompt=text), self.config.task)


def _spread() -> None:
    """Give each episode a lane of its own, as if it were a group of one."""
    from prime_hpc.orchestrator.rollouts import dispatcher

    add = dispatcher.Dispatcher.add

    def alone(self: dispatcher.Dispatcher, job: dispatcher.Job) -> None:
        job.lane = dispatcher.Lane()
        add(self, job)

    dispatcher.Dispatcher.add = alone  # type: ignore[method-assign]


if os.environ.get("PRIME_HPC_BENCH_SPREAD"):
    _spread()
