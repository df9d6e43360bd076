"""A taskset as a user wrote it last night, which does in odd places what packages do. `kind` chooses what."""

import asyncio
import itertools
import signal
import sys
from collections.abc import Iterable
from typing import Any, Literal

import verifiers.v1 as vf
from loguru import logger

__all__ = ["OddEnv", "OddTaskset"]


class OddData(vf.TaskData):
    """A prompt, and whatever the data set held."""

    info: Any = None


class OddTask(vf.Task[OddData]):
    """Rewards any reply."""

    @vf.reward
    async def good(self, trace: vf.Trace) -> float:
        """1."""
        return 1.0


class OddConfig(vf.TasksetConfig):
    """Arguments."""

    kind: Literal[
        "none",
        "endless",
        "exits",
        "exits_later",
        "logs",
        "bytes",
        "loop",
        "signals",
        "start_raises",
        "start_exits",
    ] = "none"


class OddTaskset(vf.Taskset[OddTask, OddConfig]):
    """Ten tasks, or tasks without end, of which the third may end the process."""

    bounded: bool = True

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.bounded = config.kind not in ("endless", "exits_later")

    def load(self) -> Iterable[OddTask]:
        """The tasks."""
        if self.config.kind == "exits":
            sys.exit("set THE_KEY")
        if self.config.kind == "logs":
            logger.remove()
            logger.add(sys.stderr, format="theirs {message}")
        if self.config.kind == "signals":
            for signum in (signal.SIGALRM, signal.SIGTERM):
                signal.signal(signum, signal.SIG_IGN)
        if self.config.kind == "loop":
            asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
        for number in range(10) if self.bounded else itertools.count():
            if self.config.kind == "exits_later" and number == 2:
                sys.exit("set THE_KEY")
            info = b"\xff" if self.config.kind == "bytes" else None
            yield OddTask(OddData(prompt=f"task {number}", info=info), self.config.task)


class OddEnv(vf.SingleAgentEnv):
    """Starts something first."""

    async def start(self) -> None:
        """What a key or a service is needed for."""
        if self.taskset.config.kind == "start_raises":
            raise KeyError("THE_KEY")
        if self.taskset.config.kind == "start_exits":
            sys.exit("set THE_KEY")
        await super().start()
