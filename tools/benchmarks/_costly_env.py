"""A taskset whose reward takes 20 ms of CPU. For `envs.py`, which puts this folder on the path of its processes."""

import time
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["CostlyTaskset"]


class CostlyTask(vf.Task[vf.TaskData]):
    """Gives 1.0, after a while."""

    @vf.reward
    async def verdict(self, trace: vf.Trace) -> float:
        """1.0: of a processor's time, not of the clock's, which neighbours on the machine stretch."""
        end = time.thread_time() + CostlyTaskset.cpu_s
        while time.thread_time() < end:
            pass
        return 1.0


class CostlyConfig(vf.TasksetConfig):
    """Arguments."""

    cpu_ms: float = 20.0


class CostlyTaskset(vf.Taskset[CostlyTask, CostlyConfig]):
    """Numbered tasks."""

    cpu_s = 0.0

    def load(self) -> Iterable[CostlyTask]:
        """A thousand tasks."""
        CostlyTaskset.cpu_s = self.config.cpu_ms / 1e3
        for number in range(1000):
            yield CostlyTask(vf.TaskData(prompt=f"task number {number}"), self.config.task)
