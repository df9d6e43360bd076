"""A taskset whose reward takes two seconds in which nothing is asked of the engine. For `concurrency.py`, which puts
this folder on the path of its processes."""

import asyncio
from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["ToolTaskset"]

TOOL_S = 2.0


class ToolTask(vf.Task[vf.TaskData]):
    """Gives 1.0, after a while."""

    @vf.reward
    async def verdict(self, trace: vf.Trace) -> float:
        """1.0, as late as a sandbox or another machine would say so."""
        await asyncio.sleep(TOOL_S)
        return 1.0


class ToolConfig(vf.TasksetConfig):
    """No arguments."""


class ToolTaskset(vf.Taskset[ToolTask, ToolConfig]):
    """Numbered tasks."""

    def load(self) -> Iterable[ToolTask]:
        """A thousand tasks."""
        for number in range(1000):
            yield ToolTask(vf.TaskData(prompt=f"task number {number}"), self.config.task)
