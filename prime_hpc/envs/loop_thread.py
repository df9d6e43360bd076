"""A thread with an event loop that environments may block without blocking anybody else.

Environments are other people's code: a reward that never returns, in Python or in C, must not stop the orchestrator's
own loop, so their coroutines run on this one.
"""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from loguru import logger

from prime_hpc.runtime.event_loops import new_event_loop

T = TypeVar("T")

POLL_S = 0.02
AT_ONCE = 64
"""Jobs that begin in one turn of the loop."""
TICK_S, MAX_TICKS = 1.0, 60
BEHIND_S = 5.0
"""A thread whose callbacks come later than that has more to do than it can."""

_LEFT_BEHIND: list[asyncio.Task[Any]] = []
"""Tasks that ignored their cancellation until their loop was gone. Kept, because collecting a half-run coroutine runs
its clean-up code on whatever thread the collector happens to be on."""

_ALARMS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)


class LoopInterrupt(BaseException):
    """Raised inside a blocked environment to get the loop back. No `except Exception` stops it."""


@dataclass(frozen=True)
class ThreadLoad:
    """How a thread's loop has fared over the last minute."""

    busy: float
    """Share of a core that the thread used."""
    late_s: float
    """The longest that a callback came too late."""


class Job:
    """A coroutine on a `LoopThread`, and whom its end is told."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], name: str, caller: asyncio.AbstractEventLoop) -> None:
        self.coroutine, self.name, self.caller = coroutine, name, caller
        self.context = contextvars.copy_context()
        """The caller's: several jobs begin in one call, which has that of the first."""
        self.ended: asyncio.Future[asyncio.Task[Any]] = caller.create_future()
        """The caller's: the task, when it has ended however it did."""
        self.task: asyncio.Task[Any] | None = None


@contextlib.contextmanager
def _in_this_process() -> Iterator[None]:
    """End a child that a task has forked as soon as it comes back to the loop, which is the parent's: with `sys.exit`,
    or because it goes on."""
    own = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != own:
            os._exit(0)


def _nothing(number: int, frame: object) -> None:
    """Handle a signal: a handler, unlike `SIG_IGN`, is not inherited by the programs that episodes start."""


def outlive_alarms() -> None:
    """Have this process outlive the alarms that an environment's code sets on a thread, where it can set no handler:
    HumanEval's `time_limit` sets its alarm first, and fails then. What it forks they end, as ever."""
    for signum in _ALARMS:
        with contextlib.suppress(ValueError):  # not on the main thread
            if signal.getsignal(signum) is signal.SIG_DFL:
                signal.signal(signum, _nothing)


def _end_by_alarms() -> None:
    for signum in _ALARMS:
        if signal.getsignal(signum) is _nothing:
            signal.signal(signum, signal.SIG_DFL)


os.register_at_fork(after_in_child=_end_by_alarms)


class LoopThread:
    """An event loop on a daemon thread."""

    def __init__(self, name: str) -> None:
        """Start the thread and its loop."""
        self.loop = new_event_loop()
        self._stopping = False
        self._begun: deque[Job] = deque()
        self._ended: deque[Job] = deque()
        self._ticks: tuple[tuple[float, float, float], ...] = ()
        """When, how late, and the thread's CPU seconds until then."""
        self._next_tick = time.monotonic()
        self.loop.call_soon(self._tick)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._stopping:
            # asyncio catches an interrupt that hits a task; one that hits the loop itself just starts it again. A task
            # that raises SystemExit has failed with it, as with any other error; asyncio stops the loop all the same.
            with contextlib.suppress(LoopInterrupt, SystemExit, KeyboardInterrupt), _in_this_process():
                self.loop.run_forever()
        with contextlib.suppress(LoopInterrupt):
            self.loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Run a coroutine on the loop; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> Job:
        """Run a coroutine on the loop, as a task of that name, for the caller's loop; always the same one's.

        Jobs that begin or end together wake the other thread once, not each by a write to its socket, and there is no
        future between the loops: with hundreds of short episodes that is a tenth of their cost.
        """
        job = Job(coroutine, name, asyncio.get_running_loop())
        self._begun.append(job)
        if len(self._begun) == 1:  # else the loop is about to look
            self.loop.call_soon_threadsafe(self._begin)
        return job

    def cancel(self, job: Job, warn_after_s: float) -> None:
        """Cancel a job's task and wait for nothing; say so if it goes on for longer than that."""

        def act() -> None:
            if job.task is None:
                job.coroutine.close()  # it has not begun, and will not
            elif not job.task.done():
                job.task.cancel()
                self.loop.call_later(warn_after_s, _warn_if_running, job.task)

        with contextlib.suppress(RuntimeError):  # closed
            self.loop.call_soon_threadsafe(act)

    def _begin(self) -> None:
        """Begin what waits for it, a few at a time: between thousands the loop has to answer, and to be seen to."""
        for _ in range(AT_ONCE):
            if not self._begun:
                return
            job = self._begun.popleft()
            if job.ended.cancelled():
                job.coroutine.close()
                continue
            job.task = job.context.run(self.loop.create_task, job.coroutine, name=job.name)
            job.task.add_done_callback(functools.partial(self._end, job))
        self.loop.call_soon(self._begin)

    def _end(self, job: Job, task: asyncio.Task[Any]) -> None:
        self._ended.append(job)
        if len(self._ended) == 1:
            with contextlib.suppress(RuntimeError):  # the caller's loop is closed
                job.caller.call_soon_threadsafe(self._deliver)

    def look_again(self) -> None:
        """Begin and report what waits for it, from the caller's loop: an interrupt may have hit what would have."""
        self.loop.call_soon_threadsafe(self._begin)
        self._deliver()

    def _deliver(self) -> None:
        """Tell the callers of jobs that have ended. Runs on their loop."""
        while self._ended:
            job = self._ended.popleft()
            assert job.task is not None
            if not job.task.cancelled():
                job.task.exception()  # seen: nobody may ask for it any more
            if not job.ended.done():
                job.ended.set_result(job.task)

    async def responds(self, within_s: float) -> bool:
        """Return whether the loop runs a callback within so many seconds. Call from another loop."""
        answered = threading.Event()
        try:
            self.loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # closed
            return False
        deadline = time.monotonic() + within_s
        while not answered.is_set() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return answered.is_set()

    def _tick(self) -> None:
        now = time.monotonic()  # the loop's own clock forgives what is looked for here
        tick = (now, now - self._next_tick, time.thread_time())
        self._next_tick = now + TICK_S
        self.loop.call_later(TICK_S, self._tick)
        self._ticks = (*self._ticks[1 - MAX_TICKS :], tick)

    def load(self) -> ThreadLoad:
        """Return how busy the thread has been, and how late; from any thread."""
        ticks = self._ticks
        late_s = max((late for _, late, _ in ticks), default=0.0)
        seconds = ticks[-1][0] - ticks[0][0] if ticks else 0.0
        busy = (ticks[-1][2] - ticks[0][2]) / seconds if seconds else 0.0
        return ThreadLoad(busy, max(late_s, time.monotonic() - self._next_tick, 0.0))

    def busy_with(self) -> str:
        """Return the episode that the loop is busy with and the innermost line of its own code, for messages."""
        task = asyncio.tasks.current_task(self.loop)
        name = task.get_name() if task is not None else "an environment"
        frame = sys._current_frames().get(self._thread.ident or -1)
        where = "?"
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            where = f"{path.name}:{frame.f_lineno} in {frame.f_code.co_name}"
            if "site-packages" not in path.parts and not path.is_relative_to(Path(asyncio.__file__).parent.parent):
                break  # neither the standard library nor an installed package
            frame = frame.f_back
        return f"{name} ({where})"

    def interrupt(self) -> None:
        """Raise `LoopInterrupt` in whatever Python code the thread runs. Code blocked in C notices when it returns."""
        if self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(LoopInterrupt)
            )

    def abandon(self) -> None:
        """Have the loop cancel its tasks and end as soon as it can; do not wait for that."""
        self._stopping = True
        with contextlib.suppress(RuntimeError):  # already closed
            self.loop.call_soon_threadsafe(self._cancel_all)

    async def stop(self, within_s: float) -> bool:
        """End the loop and its thread; false when it is blocked and has to be left behind (a daemon thread)."""
        self.abandon()
        deadline = time.monotonic() + within_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        return not self._thread.is_alive()

    def _cancel_all(self) -> None:
        """Cancel every task, then stop the loop once they ended or had a second to."""

        async def finish(tasks: list[asyncio.Task[Any]]) -> None:
            for task in tasks:
                task.cancel()
            if tasks:
                _, left = await asyncio.wait(tasks, timeout=1.0)
                _LEFT_BEHIND.extend(left)
            await self.loop.shutdown_asyncgens()
            self.loop.call_soon(self.loop.stop)

        tasks = [task for task in asyncio.all_tasks(self.loop) if not task.done()]
        self._finisher = self.loop.create_task(finish(tasks), name="stop")


def _warn_if_running(task: "asyncio.Task[Any]") -> None:
    """Say which job does not let itself be cancelled; nobody waits for it."""
    if not task.done():
        logger.warning("{} ignores its cancellation and goes on in the background", task.get_name())
