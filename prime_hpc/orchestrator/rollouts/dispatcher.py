"""Continuous dispatch of episodes with bounded concurrency. Every started job ends in exactly one call of `on_end`.

`loop` adds training groups, `evaluation` adds held-out tasks (first in line). All episodes of one lane (a group) run on
the same server, for its prefix cache. An episode that failed because of its server is tried once more, on a server
that answers; other failures are final.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from loguru import logger

from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.orchestrator.rollouts.episodes import is_retryable, is_server_error
from prime_hpc.orchestrator.rollouts.seats import SeatMeter
from prime_hpc.orchestrator.rollouts.server_load import LoadMeter
from prime_hpc.orchestrator.rollouts.servers import ServerTable
from prime_hpc.runtime.event_loops import loop_time

SERVER_RETRIES = 1
BACKGROUND_SHARE = 16
"""One in so many places is for jobs in the background, however many others wait."""
AT_ONCE = 64
"""Jobs that start in one go: then the event loop has a turn, for which it otherwise waits for seconds where a version
opens room for thousands."""
CLOSE_TIMEOUT_S = 3.0
TASK_PREFIX = "episode-"

_CANCELLED = EpisodeResult(state=EpisodeState.CANCELLED, usable=False, reason="cancelled")


class EpisodeRunner(Protocol):
    """The part that dispatch needs of `envs.pool.EnvPool`."""

    def run_episode(self, source_index: int, task_index: int, url_index: int) -> Coroutine[Any, Any, EpisodeResult]:
        """Run one episode; never raises but for cancellation."""
        ...


class Greedy:
    """A pool of environments whose episodes take the likeliest token at every place."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def run_episode(self, source_index: int, task_index: int, url_index: int) -> Coroutine[Any, Any, EpisodeResult]:
        """Run one, as `EpisodeRunner`."""
        return self._pool.run_episode(source_index, task_index, url_index, greedy=True)


@dataclass(eq=False)
class Lane:
    """Episodes that share a server. `url` is -1 until the first of them starts."""

    url: int = -1
    cancelled: bool = False
    tasks: set["asyncio.Task[EpisodeResult]"] = field(default_factory=set)


@dataclass(eq=False)
class Job:
    """One episode to run, and who wants to know how it ended."""

    runner: EpisodeRunner
    source: int
    task: int
    lane: Lane
    on_end: Callable[[EpisodeResult], None]
    retries_left: int = SERVER_RETRIES
    priority: bool = False
    background: bool = False
    """It starts when no other job wants the room, but for the dispatcher's share."""


class Dispatcher:
    """Starts jobs while there is room and a server; asks `refill` for a new group when the queue is empty."""

    def __init__(
        self,
        servers: ServerTable,
        max_concurrent: int,
        *,
        refill: Callable[[], bool],
        on_server_error: Callable[[int], None],
        why_empty: Callable[[], str] = lambda: "",
    ) -> None:
        """`refill` adds jobs and returns whether it did; `on_server_error(url_index)` says that a server failed;
        `why_empty` names what keeps room from being used (`seats.CAUSES`)."""
        self._servers = servers
        self.max_concurrent = max_concurrent
        """May be changed; `pump` goes by it."""
        self._refill = refill
        self._on_server_error = on_server_error
        self._why_empty = why_empty
        self._first: deque[Job] = deque()
        self._queue: deque[Job] = deque()
        self._background: deque[Job] = deque()
        self._num_background = 0
        self._closed = False
        self._pumping = False
        self._more: asyncio.Handle | None = None
        """The turn in which `pump` goes on."""
        self._running: dict[asyncio.Task[EpisodeResult], tuple[Job, int, float]] = {}
        """Each with its server, and when it began (epoch seconds)."""
        self._dropped: set[asyncio.Task[EpisodeResult]] = set()
        self.load = LoadMeter(len(servers.servers), loop_time())
        self.seats = SeatMeter(loop_time())
        self.num_running = 0
        self.num_retries = 0
        self.broken: Exception | None = None
        """What whoever wanted to know of an end has raised, in a callback where nobody would hear of it."""
        self.last_end = loop_time()
        """When an episode last ended (or was started after a pause): a stall shows here."""

    def add(self, job: Job) -> None:
        """Queue one job; `pump` starts it."""
        queue = self._background if job.background else self._first if job.priority else self._queue
        queue.append(job)

    def pump(self) -> None:
        """Start what can be started now, the first `AT_ONCE` at once, more in the loop's next turns. Cheap; call it
        whenever room, servers or versions may have changed.

        Raises what a job's `on_end` raised.
        """
        if self.broken is not None:
            raise self.broken
        if self._pumping or self._closed or self._more is not None:
            return
        self._pumping = True
        try:
            for _ in range(AT_ONCE):
                if self.num_running >= self.max_concurrent or not self._servers.any_ready:
                    break
                job = self._next_job()
                if job is None:
                    break
                self._start(job)
            else:
                self._more = asyncio.get_running_loop().call_soon(self._pump_more)
        finally:
            self._pumping = False
        is_full = self.num_running >= self.max_concurrent
        self.seats.look(self.num_running, "" if is_full else self._why_empty(), loop_time())

    def drain_load(self) -> dict[str, Any]:
        """Return the figures of servers and seats since the last call (`LoadMeter.drain`, `SeatMeter.drain`), and how
        many episodes were played again meanwhile."""
        now = loop_time()
        retries, self.num_retries = self.num_retries, 0
        figures = self.load.drain(now) | self.seats.drain(self.max_concurrent, now)
        return figures | {"episodes/server_retries": retries}

    def _pump_more(self) -> None:
        """Go on where the last turn had enough."""
        self._more = None
        try:
            if self.broken is None:
                self.pump()
        except Exception as error:  # noqa: BLE001 - as in `_finish`
            self.broken = error

    def cancel(self, lane: Lane) -> int:
        """End a lane: running episodes are cancelled, queued ones never start. Returns how many were running."""
        lane.cancelled = True
        for task in list(lane.tasks):
            task.cancel()
        return len(lane.tasks)

    def drop_server(self, url: int) -> int:
        """Have the episodes of a server that is gone without a word played again elsewhere. Returns how many."""
        dropped = [task for task, (_, where, _) in self._running.items() if where == url]
        for task in dropped:
            self._dropped.add(task)
            task.cancel()
        return len(dropped)

    def oldest(self, most: int) -> list[tuple[int, int, int, float]]:
        """Return those that run for the longest: (source, task, server, epoch seconds of the start). Any thread."""
        running = sorted(self._running.values(), key=lambda one: one[2])
        return [(job.source, job.task, url, began) for job, url, began in running[:most]]

    async def close(self) -> None:
        """Cancel everything and wait for it. Nothing starts afterwards."""
        self._closed = True
        self._first.clear()
        self._queue.clear()
        self._background.clear()
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
            if late:
                logger.warning(f"{len(late)} episodes did not end within {CLOSE_TIMEOUT_S:g} s of being cancelled")

    def _next_job(self) -> Job | None:
        while True:
            if self._first:
                job = self._first.popleft()
            elif self._background and self._num_background < max(1, self.max_concurrent // BACKGROUND_SHARE):
                job = self._background.popleft()
            elif self._queue or self._refill():
                job = self._queue.popleft()
            elif self._background:
                job = self._background.popleft()
            else:
                return None
            if not job.lane.cancelled:
                return job
            if job.retries_left < SERVER_RETRIES:  # it did run once: it too ends in one state
                job.on_end(_CANCELLED)

    def _start(self, job: Job) -> None:
        lane = job.lane
        if lane.url < 0 or not self._servers.servers[lane.url].ready:
            url = self._servers.pick()
            assert url is not None, "pump starts jobs only while a server is ready"
            lane.url = url
        if self.num_running == 0:
            self.last_end = loop_time()
        self.num_running += 1
        self._num_background += job.background
        url = lane.url
        self._servers.servers[url].in_flight += 1
        episode = job.runner.run_episode(job.source, job.task, url)
        task = asyncio.create_task(episode, name=f"{TASK_PREFIX}{job.source}-{job.task}")
        self._running[task] = (job, url, time.time())
        began = self.load.begin(url, loop_time())
        lane.tasks.add(task)
        # A callback and not a `finally` inside the task: a task that is cancelled before its first step runs no code.
        task.add_done_callback(lambda ended: self._finish(job, url, ended, began))

    def _finish(self, job: Job, url: int, task: "asyncio.Task[EpisodeResult]", began: tuple[float, float]) -> None:
        del self._running[task]
        seconds, in_flight = self.load.end(url, began, loop_time())
        dropped = task in self._dropped
        self._dropped.discard(task)
        job.lane.tasks.discard(task)
        self.num_running -= 1
        self._num_background -= job.background
        self._servers.servers[url].in_flight -= 1
        self.last_end = loop_time()
        if self._closed:
            return
        try:
            if dropped and not job.lane.cancelled:  # no fault of the episode: it costs none of its retries
                self._first.append(job)
            else:
                result = _outcome(task)
                if result.state is EpisodeState.COMPLETED and not (job.priority or job.background):
                    self.load.keep(seconds, result.num_completion_tokens, in_flight)
                self._deliver(job, url, result)
            self.pump()
        except Exception as error:  # noqa: BLE001 - told by the next `pump`, which a loop calls; asyncio would only log it
            self.broken = error

    def _deliver(self, job: Job, url: int, result: EpisodeResult) -> None:
        if is_server_error(result):
            self._on_server_error(url)
        if is_retryable(result) and job.retries_left > 0 and not job.lane.cancelled:
            job.retries_left -= 1
            self.num_retries += 1
            logger.debug(f"episode {job.source}/{job.task} is tried again: {result.reason}")
            self._first.append(job)
            return
        job.on_end(result)


def _outcome(task: "asyncio.Task[EpisodeResult]") -> EpisodeResult:
    """Return the task's result; `run_episode` promises not to raise, but a broken promise is one failed episode."""
    if task.cancelled():
        return _CANCELLED
    error = task.exception()
    if error is None:
        return task.result()
    logger.opt(exception=error).warning("an environment raised instead of returning a failed episode")
    kind = type(error).__name__
    return EpisodeResult(state=EpisodeState.FAILED, usable=False, reason=f"{kind}: {error}", error_type=kind)
