"""A note of the episode whose code a worker runs, in memory that outlives the worker: it names who killed it.

Nothing of a process that is gone by `os._exit`, a crash in C or the kernel's out-of-memory killer can say any more what
it was doing. Its host reads the mark, and the other episodes of that worker are known to be innocent.
"""

import asyncio
import mmap
import struct
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

EPISODE = struct.Struct("=q")
"""Id of the episode; 0: none."""
current_episode: ContextVar[int] = ContextVar("current_episode", default=0)
"""The episode that a task is made for."""


class _Steps:
    """A coroutine that leaves the mark for the time of each of its steps."""

    __slots__ = ("_coroutine", "_episode", "_mark")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], mark: mmap.mmap, episode: int) -> None:
        self._coroutine, self._mark, self._episode = coroutine, mark, episode

    def __await__(self) -> "_Steps":
        return self

    def __iter__(self) -> "_Steps":
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        EPISODE.pack_into(self._mark, 0, self._episode)
        try:
            return self._coroutine.send(value)
        finally:
            EPISODE.pack_into(self._mark, 0, 0)

    def throw(self, *error: Any) -> Any:
        """Run one step that begins with an exception."""
        EPISODE.pack_into(self._mark, 0, self._episode)
        try:
            return self._coroutine.throw(*error)
        finally:
            EPISODE.pack_into(self._mark, 0, 0)

    def close(self) -> None:
        self._coroutine.close()


async def _in_steps(steps: _Steps) -> Any:
    return await steps


def mark_episodes(loop: asyncio.AbstractEventLoop, mark: mmap.mmap) -> None:
    """Have all tasks of a loop that are made for an episode leave its id in `mark` while they run."""

    def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
        episode = current_episode.get()
        if not episode:
            return asyncio.Task(coroutine, loop=loop, **options)
        task = asyncio.Task(_in_steps(_Steps(coroutine, mark, episode)), loop=loop, **options)
        task.add_done_callback(lambda _: coroutine.close())  # one that was cancelled before it began
        return task

    loop.set_task_factory(make_task)


def read_mark(mark: mmap.mmap) -> int:
    """Return the id of the episode that runs, or ran at the end; 0: none."""
    return int(EPISODE.unpack_from(mark)[0])
