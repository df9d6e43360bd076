"""A taskset whose reward function does what reward functions must not do. `kind` chooses what, `every` how often.

Used by `tests/integration/test_envs.py` and `tests/integration/test_env_workers.py` through its dotted name, as a
user's own taskset would be.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterable
from typing import Literal

import verifiers.v1 as vf

__all__ = ["MisbehavingTaskset"]

Kind = Literal[
    "raises",
    "speechless",
    "sleeps",
    "ignores_cancellation",
    "blocks_in_python",
    "blocks_in_c",
    "nan",
    "none",
    "alarms",
    "exits",
    "exits_on_a_thread",
    "system_exit",
    "leaks",
    "swallows",
]
_LEAKED: list[bytes] = []
LEAK = 256 << 20
"""Bytes that one scoring leaks."""


class Speechless(BaseException):
    """Of some package: verifiers takes it for no error of the task's, and its words cannot be had."""

    def __str__(self) -> str:
        raise AttributeError("no words were given")


class MisbehavingData(vf.TaskData):
    """What this task's reward does."""

    kind: Kind
    active: bool


class MisbehavingTask(vf.Task[MisbehavingData]):
    """Gives 1.0, or misbehaves."""

    @vf.reward
    async def verdict(self, trace: vf.Trace) -> float:
        """1.0 unless this task is an active one."""
        if not self.data.active:
            return 1.0
        match self.data.kind:
            case "raises":
                raise RuntimeError("this task cannot be scored")
            case "speechless":
                raise Speechless
            case "sleeps":
                await asyncio.sleep(3600)
            case "ignores_cancellation":
                await _stay(20.0)
            case "blocks_in_python":
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline:
                    pass
            case "blocks_in_c":
                time.sleep(25)
            case "nan":
                return float("nan")
            case "alarms":
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                await asyncio.sleep(0.1)
                if os.waitstatus_to_exitcode(os.waitpid(await asyncio.to_thread(_fork_that_has_an_alarm), 0)[1]) != -14:
                    return 0.0
            case "exits":
                os._exit(3)
            case "exits_on_a_thread":
                await asyncio.to_thread(_exit_later)
            case "system_exit":
                raise SystemExit(5)
            case "leaks":
                for _ in range(LEAK >> 24):
                    _LEAKED.append(os.urandom(1 << 20) * 16)
                    await asyncio.sleep(0)  # on a busy machine the whole would count as a blocked loop
            case "swallows":
                _LEAKED.append(b"x" * (8 * LEAK))
                time.sleep(25)
        return 1.0


def _fork_that_has_an_alarm() -> int:
    """Start a process that bounds itself by an alarm, as checkers of programs do."""
    if pid := os.fork():
        return pid
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(200)
    os._exit(0)


def _exit_later() -> None:
    """End the process when its event loop has nothing to do."""
    time.sleep(0.5)
    os._exit(4)


async def _stay(seconds: float) -> None:
    """Sleep on, whoever cancels."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            continue


class MisbehavingConfig(vf.TasksetConfig):
    """Arguments."""

    kind: Kind = "none"
    every: int = 1
    num_tasks: int = 30


class MisbehavingTaskset(vf.Taskset[MisbehavingTask, MisbehavingConfig]):
    """Tasks 0, 1, 2 ...; each `every`-th misbehaves."""

    def load(self) -> Iterable[MisbehavingTask]:
        """The tasks."""
        for index in range(self.config.num_tasks):
            active = (index + 1) % self.config.every == 0
            data = MisbehavingData(prompt=f"task {index}", kind=self.config.kind, active=active)
            yield MisbehavingTask(data, self.config.task)
