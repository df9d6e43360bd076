"""An endless taskset that fails at its task 20, and counts in a file what is made of it."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["DryTaskset"]


class DryConfig(vf.TasksetConfig):
    """Where it counts."""

    log: str = ""
    gate: str = ""
    """File without which task 5 is not made."""


class DryTask(vf.Task[vf.TaskData]):
    """A reward for any reply."""

    @vf.reward
    async def replied(self, trace: vf.Trace) -> float:
        """1.0"""
        return 1.0


class DryTaskset(vf.Taskset[DryTask, DryConfig]):
    """Endless, or so it says."""

    INFINITE = True

    def load(self) -> Iterable[DryTask]:
        """Twenty tasks."""
        for number in range(20):
            deadline = time.monotonic() + 60
            while number == 5 and self.config.gate and not Path(self.config.gate).exists():
                if time.monotonic() > deadline:
                    raise TimeoutError("nobody opens the gate")
                time.sleep(0.01)
            with Path(self.config.log).open("a") as file:
                file.write(f"{os.getpid()}\n")
            yield DryTask(vf.TaskData(prompt=f"task {number}"), self.config.task)
        raise ValueError("the well is dry")
