"""A verifiers taskset with troubles to order: rewards that raise, episodes that never return. For integration tests."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["TroubleTaskset"]


class TroubleData(vf.TaskData):
    """One task."""

    number: int


class TroubleTask(vf.Task[TroubleData]):
    """Rewards replies by their length."""

    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        """Share of 20 characters, or trouble."""
        config = TroubleTaskset.last_config
        TroubleTaskset.num_scored += 1
        if config.hang_every and TroubleTaskset.num_scored % config.hang_every == 0:
            await asyncio.Event().wait()
        while config.hang_while and Path(config.hang_while).exists():
            await asyncio.sleep(0.05)
        if config.raise_every and TroubleTaskset.num_scored % config.raise_every == 0:
            raise KeyError(f"no answer key for task {self.data.number}")
        if config.nan_every and TroubleTaskset.num_scored % config.nan_every == 0:
            return float("nan")
        return min(1.0, len(trace.last_reply) / 20)


class TroubleConfig(vf.TasksetConfig):
    """Which troubles."""

    num_tasks: int = 1000
    """How many tasks."""
    raise_every: int = 0
    """Every so many-th reward raises; 0: none."""
    nan_every: int = 0
    """Every so many-th reward is NaN; 0: none."""
    hang_every: int = 0
    """Every so many-th reward never returns; 0: none."""
    hang_while: str = ""
    """No reward returns while this file is there."""


class TroubleTaskset(vf.Taskset[TroubleTask, TroubleConfig]):
    """Numbered tasks."""

    last_config = TroubleConfig(id="trouble")
    num_scored = 0

    def load(self) -> Iterable[TroubleTask]:
        """All tasks."""
        TroubleTaskset.last_config = self.config
        for number in range(self.config.num_tasks):
            yield TroubleTask(TroubleData(prompt=f"task number {number}", number=number), self.config.task)
