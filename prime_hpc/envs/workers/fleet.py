"""The workers of one environment, as the orchestrator sees them: started, watched, replaced; who plays what.

Who waits for whom: a caller waits for its episode, at most `timeout_s` from when a worker got it and `ANSWER_GRACE_S`
more (the worker keeps the deadline itself). A worker that dies, falls silent or is blocked is ended and replaced; what
it played is played again elsewhere, but for the episode that killed it, which has failed. A worker that grows beyond
its memory is replaced in peace: it plays to the end what it has and gets nothing new.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from loguru import logger

from prime_hpc.config.sections.orchestrator import EnvServersConfig
from prime_hpc.envs.errors import EnvNodeError
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.envs.workers.assignments import MAX_SUSPECTED, Assigned, Assignments
from prime_hpc.envs.workers.fingerprint import differences
from prime_hpc.envs.workers.frames import FrameError
from prime_hpc.envs.workers.host_link import Connection, Ending
from prime_hpc.envs.workers.records import result_from_plain
from prime_hpc.runtime.clock import Backoff
from prime_hpc.runtime.event_loops import loop_time

OPEN_TIMEOUT_S = 120.0
TIMES_LOADING = 10
"""So many times as long as this process has loaded the tasks a worker may take for it, beside the time that it has to
open: all of them load at once."""
ANSWER_GRACE_S = 3.0
STOP_TIMEOUT_S = 5.0
WATCH_S = 0.5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Between the deaths of a worker and its next start."""
AWAY_S = 600.0
"""For so long a host that has started workers is waited for: it is started again, or its machine is."""
BUSY = 0.7
"""Of a core: workers that are busier get company where their number is `auto`."""
GROW_EVERY_S = 5.0
WORKER_DIED = "WorkerDied"
"""`error_type` of an episode that ended its worker: it would do so again."""
WORKER_LOST = "WorkerLost"
"""`error_type` of an episode whose workers died, nobody knows of what."""

State = Literal["opening", "open", "leaving", "gone"]


class Host(Protocol):
    """Starts workers."""

    async def connect(self, label: str, memory_bytes: int, loads: dict[str, Any]) -> Connection:
        """Start a worker that will load a tokenizer; OSError where none can be had."""
        ...


@dataclass(eq=False)
class _Worker:
    """One worker process, from its start to its end."""

    slot: int
    connection: Connection
    last_message: float
    state: State = "opening"
    num_ended: int = 0
    busy: float = 0.0
    memory: int = 0
    stuck: Ending | None = None


@dataclass
class FleetCounts:
    """Since the fleet's start."""

    ended: int = 0
    restarts: int = 0
    replayed: int = 0
    recycled: int = 0
    by_slot: dict[int, int] = field(default_factory=dict)


class Fleet:
    """All workers of one environment."""

    def __init__(
        self,
        name: str,
        num_workers: int | Literal["auto"],
        config: EnvServersConfig,
        hosts: Sequence[Host],
        *,
        options: dict[str, Any],
        moved: Callable[[], list[tuple[int, str]]],
        expected: dict[str, str],
        timeout_s: float,
        load_s: float = 0.0,
    ) -> None:
        """Describe a fleet; `start` starts it.

        Args:
            num_workers: how many, or as many as the load asks for.
            options: what a worker is told when it opens (`settings.settings_to_plain`).
            moved: servers that are elsewhere by now: index and URL.
            expected: this process's `fingerprint` of the environment.
            timeout_s: of one episode.
            load_s: for which this process has loaded the tasks.
        """
        self.name, self._config, self._hosts = name, config, hosts
        self._auto = num_workers == "auto"
        cores = len(os.sched_getaffinity(0))
        self._most = (config.max_workers or max(1, cores - 1)) if num_workers == "auto" else num_workers
        self._first = 1 if num_workers == "auto" else num_workers
        self._options, self._moved, self._expected = options, moved, expected
        tokenizer = "" if options["chat"] is not None else options["tokenizer_path"]  # an API's replies have no tokens
        self._loads = {"tokenizer": tokenizer, "trust_remote_code": options["trust_remote_code"]}
        self._timeout_s, self._open_timeout_s = timeout_s, OPEN_TIMEOUT_S + TIMES_LOADING * load_s
        self._book = Assignments()
        self._futures: dict[int, asyncio.Future[EpisodeResult]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._workers: list[_Worker] = []
        self._slots: dict[int, asyncio.Task[None]] = {}
        self._given_up: dict[int, str] = {}
        self._watching: asyncio.Task[None] | None = None
        self._aside: set[asyncio.Task[None]] = set()
        self._closing = False
        self._opened = asyncio.Event()
        self._grown = 0.0
        self.counts = FleetCounts()

    # ------------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the workers and wait until they are open. Raises EnvError: one cannot be opened."""
        self._grown = loop_time()
        for _ in range(self._first):
            self._add_slot()
        self._watching = asyncio.create_task(self._watch(), name=f"workers of {self.name}")
        while sum(worker.state == "open" for worker in self._workers) < self._first:
            self._opened.clear()
            if self._given_up:
                raise EnvNodeError(f"environment {self.name!r}: {next(iter(self._given_up.values()))}")
            await self._opened.wait()

    async def close(self) -> None:
        """End all workers within seconds; episodes in flight end as CANCELLED."""
        self._closing = True
        for future in list(self._futures.values()):
            self._resolve(future, _ended(EpisodeState.CANCELLED, "the pool was closed", "Closed"))
        for worker in self._workers:
            worker.connection.send("stop")
        tasks = [task for task in (*self._slots.values(), *self._aside) if not task.done()]
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S)
        for task in (*tasks, self._watching):
            if task is not None:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._workers:
            worker.connection.close()

    def move_server(self, index: int, url: str) -> None:
        """Server `index` answers at `url` now."""
        for worker in self._workers:  # also of one that opens: it reads this once it has
            worker.connection.send("move", server=index, url=url)

    # ------------------------------------------------------------------------------------------------ episodes

    async def run(self, task: int, server: int, *, greedy: bool = False) -> EpisodeResult:
        """Play one episode to its end. `task`: number of the task in the whole split; `greedy`: at temperature 0.
        Raises asyncio.CancelledError: the caller was cancelled; the episode is, too."""
        if self._closing:
            return _ended(EpisodeState.CANCELLED, "the pool is closed", "Closed")
        started = loop_time()
        episode = self._book.open(task, server, greedy=greedy)
        future = self._futures[episode.ident] = asyncio.get_running_loop().create_future()
        self._deal_out()
        try:
            result = await future
            return result if result.duration_s else replace(result, duration_s=loop_time() - started)
        finally:
            if future.cancelled():
                self._cancel(episode)
            self._forget(episode)

    def _deal_out(self) -> None:
        """Give the episodes that wait to the workers with the fewest."""
        open_workers = [worker for worker in self._workers if worker.state == "open"]
        if not open_workers:
            if self._slots and all(slot in self._given_up for slot in self._slots):
                self._fail_waiting()
            return
        for episode in self._book.waiting():
            worker = min(open_workers, key=self._book.load)
            self._book.assign(episode, worker)
            self._start_timer(episode)
            what = {"task": episode.task, "server": episode.server, "greedy": episode.greedy}
            worker.connection.send("play", id=episode.ident, attempt=episode.attempt, **what)

    def _fail_waiting(self) -> None:
        reason = f"no worker of {self.name} is left: {next(iter(self._given_up.values()))}"
        for episode in self._book.waiting():
            self._finish(episode, _ended(EpisodeState.FAILED, reason, "EnvError"))

    def _overdue(self, episode: Assigned) -> None:
        """Act on a worker that should have said by now that the deadline is over."""
        self._cancel(episode)
        self._finish(episode, _ended(EpisodeState.TIMEOUT, f"no end after {self._timeout_s:g} s", "Timeout"))

    def _cancel(self, episode: Assigned) -> None:
        if isinstance(episode.worker, _Worker):
            episode.worker.connection.send("cancel", id=episode.ident, attempt=episode.attempt)

    def _finish(self, episode: Assigned, result: EpisodeResult) -> None:
        future = self._futures.get(episode.ident)
        if future is not None:
            self._resolve(future, result)
        self._forget(episode)

    @staticmethod
    def _resolve(future: "asyncio.Future[EpisodeResult]", result: EpisodeResult) -> None:
        if not future.done():
            future.set_result(result)

    def _forget(self, episode: Assigned) -> None:
        self._book.forget(episode)
        self._futures.pop(episode.ident, None)
        self._stop_timer(episode)

    def _start_timer(self, episode: Assigned) -> None:
        self._stop_timer(episode)
        limit = self._timeout_s + ANSWER_GRACE_S
        self._timers[episode.ident] = asyncio.get_running_loop().call_later(limit, self._overdue, episode)

    def _stop_timer(self, episode: Assigned) -> None:
        timer = self._timers.pop(episode.ident, None)
        if timer is not None:
            timer.cancel()

    # ------------------------------------------------------------------------------------------------ workers

    def _add_slot(self) -> None:
        slot = len(self._slots)
        self._slots[slot] = asyncio.create_task(self._keep(slot), name=f"{self.name}[{slot}]")

    async def _keep(self, slot: int) -> None:
        """Have a worker in a slot for as long as the fleet lives, or until it has died too often for nothing."""
        deaths, pause = 0, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        reached = -AWAY_S
        while not self._closing:
            label = f"{self.name}[{slot}]"
            worker: _Worker | None = None
            try:
                host = self._hosts[slot % len(self._hosts)]
                connection = await host.connect(label, int(1.5 * self._memory_bytes), self._loads)
                worker = _Worker(slot, connection, loop_time())
                self._workers.append(worker)
                why = await self._serve(worker)
                reached = loop_time()
            except OSError as error:
                why = f"it could not be started: {error}"
            except Exception as error:  # noqa: BLE001 - a fault of ours, which the next start would meet again
                logger.opt(exception=True).error("worker {} is given up", label)
                self._give_up(slot, f"worker {label}: {type(error).__name__}: {error}")
                if worker is not None:
                    worker.connection.kill("it is given up")
                    await self._on_worker_gone(worker)
                return
            if slot in self._given_up:
                return
            if self._closing or (worker is not None and worker.state == "leaving"):
                continue
            if worker is not None and worker.num_ended:
                deaths, pause = 0, Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
            if worker is not None or loop_time() - reached > AWAY_S:
                deaths += 1
            if deaths > self._config.max_restarts:
                logger.error("worker {}: {}; it was started {} times in vain and is given up", label, why, deaths)
                self._give_up(slot, f"worker {label}: {why}")
                return
            logger.warning("worker {}: {}; it is started again", label, why)
            self.counts.restarts += 1
            await asyncio.sleep(pause.next())

    async def _serve(self, worker: _Worker) -> str:
        """Open a worker and listen to it until it is gone, or leaves in peace; returns why."""
        worker.connection.send(
            "open",
            options=self._options,
            moved=[list(entry) for entry in self._moved()],
            stall_s=self._config.stall_s,
        )
        try:
            async with asyncio.timeout(self._open_timeout_s) as deadline:
                while messages := await worker.connection.receive():
                    for message in messages:
                        self._on_message(worker, message)
                    if worker.state == "open":
                        deadline.reschedule(None)
                    elif worker.state == "leaving":
                        self._finish_aside(worker)
                        return "it grew too large"
        except TimeoutError:
            worker.connection.kill(f"it did not open within {self._open_timeout_s:.0f} s")
        except _Refused as error:
            worker.state = "gone"
            self._workers.remove(worker)
            worker.connection.close()
            self._give_up(worker.slot, str(error))
            return str(error)
        except FrameError as error:
            worker.connection.kill(str(error))
        return await self._on_worker_gone(worker)

    async def _on_worker_gone(self, worker: _Worker) -> str:
        """Have the episodes of a worker that is gone played again, but for the one that killed it. Returns why it is
        gone."""
        worker.state = "gone"
        ending = await worker.connection.ending()
        if worker in self._workers:
            self._workers.remove(worker)
        words = worker.stuck or ending
        losses = self._book.lost(worker, words.episode if words.code is not None else None)
        for episode in (*losses.guilty, *losses.unlucky, *losses.again):
            self._stop_timer(episode)
        if not self._closing:
            self.counts.replayed += len(losses.again)
            for episode in losses.guilty:
                reason = f"task {episode.task}: the worker that played it {words}"
                self._finish(episode, _ended(EpisodeState.FAILED, reason, WORKER_DIED))
            for episode in losses.unlucky:
                reason = f"task {episode.task}: {MAX_SUSPECTED} workers died with it, the last one {words}"
                self._finish(episode, _ended(EpisodeState.FAILED, reason, WORKER_LOST))
            self._deal_out()
        return f"it {words}"

    def _finish_aside(self, worker: _Worker) -> None:
        """Listen to a worker that leaves until it has, while its slot gets a new one."""
        task = asyncio.create_task(self._stop_when_idle(worker))
        self._aside.add(task)
        task.add_done_callback(self._aside.discard)

    async def _stop_when_idle(self, worker: _Worker) -> None:
        with suppress(FrameError):
            while self._book.load(worker) and (messages := await worker.connection.receive()):
                for message in messages:
                    self._on_message(worker, message)
        worker.connection.send("stop")
        await self._on_worker_gone(worker)

    def _on_message(self, worker: _Worker, message: dict[str, Any]) -> None:
        """Take a worker's message. Raises FrameError or _Refused."""
        worker.last_message = loop_time()
        match message["op"]:
            case "ended":
                self._take_answer(worker, message)
            case "making" | "begun":
                episode = self._book.find(worker, message["id"], message["attempt"])
                if episode is not None:
                    (self._stop_timer if message["op"] == "making" else self._start_timer)(episode)
            case "beat":
                worker.busy, worker.memory = float(message["busy"]), int(message["memory"])
                if self._memory_bytes and worker.memory > self._memory_bytes and worker.state == "open":
                    size = worker.memory / 2**30
                    if not self.counts.ended and not self._book.load(worker):
                        raise _Refused(
                            f"a worker holds {size:.2f} GiB before its first episode: more than env_servers.memory_gib "
                            f"= {self._config.memory_gib:g}, which each would"
                        )
                    logger.warning("worker {}[{}] holds {:.2f} GiB: replaced", self.name, worker.slot, size)
                    self.counts.recycled += 1
                    worker.state = "leaving"
            case "opened" if worker.state == "opening":
                wrong = differences(self._expected, message.get("fingerprint"))
                if wrong:
                    raise _Refused(
                        f"a worker does not play what this process would: {'; '.join(wrong)} differs. Where files "
                        "were changed during the run, put them back or start the run again; where tasks differ, load() "
                        "of the taskset must give the same tasks in every process"
                    )
                worker.state = "open"
                self._opened.set()
                self._deal_out()
            case "refused":
                raise _Refused(str(message["reason"]))
            case "stuck":
                worker.stuck = Ending(0, int(message["id"]), str(message["reason"]))

    def _take_answer(self, worker: _Worker, message: dict[str, Any]) -> None:
        result = result_from_plain(message["result"])
        episode = self._book.answered(worker, message["id"], message["attempt"])
        if episode is None:
            return
        worker.num_ended += 1
        self.counts.ended += 1
        self.counts.by_slot[worker.slot] = self.counts.by_slot.get(worker.slot, 0) + 1
        self._finish(episode, result)

    def _give_up(self, slot: int, why: str) -> None:
        self._given_up[slot] = why
        self._opened.set()
        self._deal_out()

    @property
    def _memory_bytes(self) -> int:
        return int((self._config.memory_gib or 0) * 2**30)

    async def _watch(self) -> None:
        """End workers that fell silent; have more of them where all are busy."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = loop_time()
            for worker in self._workers:
                silent_s = now - worker.last_message
                if worker.state in ("open", "leaving") and silent_s > self._config.silence_s:
                    worker.connection.kill(f"it was silent for {silent_s:.0f} s")
                    worker.connection.abort()  # nobody may be there to end it, or to say so: its machine is cut off
            if self._auto and now - self._grown > GROW_EVERY_S and len(self._slots) < self._most:
                busy = [worker.busy for worker in self._workers if worker.state == "open"]
                if busy and min(busy) > BUSY:
                    self._grown = now
                    self._add_slot()

    def metrics(self) -> dict[str, float]:
        """Return what it did since its start, and how it is."""
        found: dict[str, float] = {
            "workers": sum(worker.state == "open" for worker in self._workers),
            "in_flight": len(self._book) - len(self._book.waiting()),
            "queued": len(self._book.waiting()),
            "episodes": self.counts.ended,
            "restarts": self.counts.restarts,
            "recycled": self.counts.recycled,
            "replayed": self.counts.replayed,
            "dropped_answers": self._book.num_dropped,
            "busy": sum(worker.busy for worker in self._workers) / max(1, len(self._workers)),
            "memory_gib": max((worker.memory for worker in self._workers), default=0) / 2**30,
        }
        return found | {f"episodes_{slot}": number for slot, number in sorted(self.counts.by_slot.items())}


class _Refused(Exception):
    """A worker cannot play this environment, and its successors could not either."""


def _ended(state: EpisodeState, reason: str, error_type: str) -> EpisodeResult:
    return EpisodeResult(state=state, usable=False, reason=reason, error_type=error_type)
