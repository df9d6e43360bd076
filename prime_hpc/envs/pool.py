"""Run episodes: any verifiers taskset, against any number of inference servers, each ending by its deadline.

The orchestrator's and the evals' door to environments:

    async with EnvPool(PoolSettings(envs=config.env, urls=urls, ..., split="train", seed=0)) as pool:
        result = await pool.run_episode(source_index=0, task_index=17, url_index=0)   # never raises but when cancelled

Episodes of environments without workers share one event loop, on a thread of their own (`envs.loop_thread`): an
environment that blocks can delay its neighbours, never the caller. Those of the others are played in processes of their
own (`envs.workers`). Who waits for whom: the caller waits for its episode at most `timeout_s`; a loop that
does not answer after that is interrupted, and replaced if that does not help.
"""

import asyncio
import contextlib
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from loguru import logger

from prime_hpc.config.sections.orchestrator import EnvConfig, EnvServersConfig
from prime_hpc.envs.errors import NO_SIGNAL, EnvError
from prime_hpc.envs.loop_thread import BEHIND_S, Job, LoopThread, ThreadLoad, outlive_alarms
from prime_hpc.envs.math_answers import speaks_of
from prime_hpc.envs.pool_settings import PoolSettings
from prime_hpc.envs.rendering import PromptRenderer, load_prompt_renderer
from prime_hpc.envs.samples import EpisodeResult, EpisodeState, one_line
from prime_hpc.envs.task_sources import EnvSource
from prime_hpc.envs.workers.fingerprint import fingerprint
from prime_hpc.envs.workers.fleet import Fleet
from prime_hpc.envs.workers.host_link import HostLink, LocalHost, RemoteHost, key_of_hosts, remote_hosts
from prime_hpc.envs.workers.settings import refuse_unsendable, settings_to_plain
from prime_hpc.observe.logs import kept_logger
from prime_hpc.runtime.event_loops import ended, idle_loop, loop_time


@runtime_checkable
class Held(Protocol):
    """A taskset of an environment that holds something of its own as long as it is played."""

    def hold(self) -> None:
        """Say that it is played."""

    async def let_go(self) -> None:
        """Say that it is no longer played here."""


OPEN_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 5.0
CANCEL_GRACE_S = 2.0
"""How long a cancelled episode may take to let go before a warning says that it does not."""
BLOCKED_AFTER_S = 3.0
"""A loop that has not answered for so long, when an episode is already overdue, is blocked."""
INTERRUPT_GRACE_S = 2.0
"""How long an interrupted loop may take to answer again before it is replaced."""


class EnvPool:
    """Environments, their tasks and the servers that play them."""

    sources: list[EnvSource]
    _renderer: PromptRenderer | None = None
    _held: Sequence[Held] = ()

    def __init__(
        self, settings: PoolSettings, servers: EnvServersConfig | None = None, log_dir: Path | None = None
    ) -> None:
        """Describe a pool; `async with` starts it.
        `servers`: of workers, where environments have some; None: none has."""
        self._settings = settings
        self._moved: dict[int, str] = {}
        self._servers = EnvServersConfig() if servers is None else servers
        self._host = LocalHost(log_dir)
        self._remote_hosts: list[RemoteHost] = []
        self._fleets: dict[int, Fleet] = {}
        self._worker: LoopThread | None = None
        self._runner: Any = None
        self._lost: asyncio.Future[str] | None = None
        self._awaited: set[Job] = set()
        self._replacing: asyncio.Task[None] | None = None
        self._closed: asyncio.Future[None] | None = None
        self.sources = []

    async def __aenter__(self) -> "EnvPool":
        """Load tokenizer and tasks, start tool servers. Raises EnvError: something is not as configured."""
        key_of_hosts(self._servers)  # before an environment's code runs
        # Importing verifiers and reading tasks takes seconds; the caller's heartbeat goes on meanwhile.
        with kept_logger():
            await asyncio.to_thread(self._load)
            self.sources = [await self._load_source(config) for config in self._settings.envs]
        self._held = [s.env.taskset for s in self.sources if isinstance(s.env.taskset, Held)]
        for taskset in self._held:
            taskset.hold()
        self._closed = asyncio.get_running_loop().create_future()
        try:
            await asyncio.gather(self._start_worker(), self._start_fleets())
        except BaseException:
            await self._stop_all()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """End everything within seconds; episodes still in flight end as CANCELLED."""
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)
            self._give_up_awaited()
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait([self._replacing], timeout=CLOSE_TIMEOUT_S)
        await self._stop_all()

    async def _stop_all(self) -> None:
        await asyncio.gather(self._stop_worker(), *(fleet.close() for fleet in self._fleets.values()))
        for host in (self._host, *self._remote_hosts):
            await host.close()
        await self._let_go()

    async def _let_go(self) -> None:
        """Free what environments hold of their own: on a loop of its own, that may be left behind."""
        held, self._held = self._held, ()
        if not held:
            return
        thread = LoopThread("prime-hpc-teardown")

        async def let_go() -> None:
            for taskset in held:
                await taskset.let_go()

        await asyncio.wait({asyncio.wrap_future(thread.submit(let_go()))}, timeout=CLOSE_TIMEOUT_S)
        if not await thread.stop(CANCEL_GRACE_S):
            logger.warning("{} does not end: its thread is left behind", thread.busy_with())

    def move_server(self, index: int, url: str) -> None:
        """Server `index` was started again at another address."""
        self._moved[index] = url
        if self._worker is not None:
            self._runner.move_server(index, url)
        for fleet in self._fleets.values():
            fleet.move_server(index, url)

    def metrics(self) -> dict[str, float]:
        """Return figures of the environments' processes, `env_workers/<environment>/<figure>`, and of the thread of
        those without, `env_thread/<figure>`; of evaluated ones `env_workers/eval/...`, `env_thread/eval/...`."""
        part = "eval/" if self._settings.split == "eval" else ""
        found = {
            f"env_workers/{part}{fleet.name}/{key}": value
            for fleet in self._fleets.values()
            for key, value in fleet.metrics().items()
        }
        if self._worker is not None:
            load = self._worker.load()
            found |= {f"env_thread/{part}busy": load.busy, f"env_thread/{part}late_s": load.late_s}
        return found

    @property
    def renderer(self) -> PromptRenderer:
        """Of the policy; an API has none."""
        assert self._renderer is not None, "only an API has none, and nobody teaches one"
        return self._renderer

    def demonstration(self, source_index: int, task_index: int, field: str, text: str) -> list[int]:
        """Tokens of a system message that shows a field of a task's data; `text` holds `{demonstration}`.
        Raises EnvError: the task has no such field, or nothing in it; names those it has."""
        from verifiers.v1.task import TaskData

        data = self.sources[source_index].task(task_index).data
        value = getattr(data, field, None)
        if value is None or value == "":
            own = sorted(set(type(data).model_fields) - set(TaskData.model_fields))
            raise EnvError(
                f"environment {self.sources[source_index].name!r}: task {task_index} has no {field!r} to show the "
                f"teacher; its own fields are {', '.join(own) or 'none'}: set orchestrator.advantage.demonstration"
            )
        return self.lead(text, str(value))

    def lead(self, text: str, shown: str) -> list[int]:
        """Tokens of a system message that shows something; `text` holds `{demonstration}`."""
        return self.renderer.lead(text.replace("{demonstration}", shown))

    async def run_episode(
        self, source_index: int, task_index: int, url_index: int = 0, *, greedy: bool = False
    ) -> EpisodeResult:
        """Play one episode to its end or its deadline, whichever comes first.

        Args:
            task_index: which of its tasks, 0 <= task_index < sources[source_index].num_tasks.
            greedy: at temperature 0, whatever the environment's sampling is.

        Returns:
            The result, also of episodes that fail, time out or are cut off by the pool's closing.

        Raises:
            asyncio.CancelledError: the caller was cancelled; the episode is, too.
            IndexError: no such source, task or server.
        """
        source = self.sources[source_index]
        number = source.number(task_index)
        if not 0 <= url_index < len(self._settings.urls):
            raise IndexError(f"url_index is {url_index}; there are {len(self._settings.urls)} servers")
        assert self._closed is not None, "enter the pool first"
        if source_index in self._fleets:
            # the task is made there alone
            return await self._fleets[source_index].run(number, url_index, greedy=greedy)
        started = loop_time()
        timeout_s = source.config.timeout_s
        label = f"{source.name} task {task_index}"
        if self._replacing is not None:
            await asyncio.wait([self._replacing], timeout=timeout_s)
        if self._closed.done():
            return _unfinished(EpisodeState.CANCELLED, "the pool is closed", "Closed", started)
        worker, lost = self._worker, self._lost
        if worker is None or lost is None:
            return _unfinished(EpisodeState.FAILED, "the environments could not be restarted", "EnvError", started)
        runner, traces = self._runner, list[Any]()
        job = worker.start(runner.run(source_index, number, url_index, traces, greedy=greedy), label)
        self._awaited.add(job)
        try:
            # Its own future alone: one that thousands share would look through all their callbacks at each end.
            await ended(job.ended, timeout=max(0.0, started + timeout_s - loop_time()))
            task = job.ended.result() if job.ended.done() and not job.ended.cancelled() else None
            if task is not None and not (self._closed.done() and task.cancelled()):
                return _outcome(task, started)
            if self._closed.done():
                return _unfinished(EpisodeState.CANCELLED, "the pool was closed", "Closed", started)
            if lost.done():
                return _unfinished(EpisodeState.FAILED, lost.result(), "BlockedLoop", started)
            self._look_after(worker)
            kind, phase = runner.overdue_in(url_index, traces)
            reason = f"no end after {timeout_s:g} s{phase}{_overload(worker.load())}"
            return _unfinished(EpisodeState.TIMEOUT, reason, kind, started)
        finally:
            self._awaited.discard(job)
            if not job.ended.done() or job.ended.cancelled():
                job.ended.cancel()
                worker.cancel(job, CANCEL_GRACE_S)

    def _give_up_awaited(self) -> None:
        """Have all episodes in flight on the shared loop end without their outcome."""
        for job in self._awaited:
            job.ended.cancel()

    def _look_after(self, worker: LoopThread) -> None:
        """See whether the loop of an overdue episode lives, unless somebody already does."""
        if self._replacing is None:
            self._replacing = asyncio.get_running_loop().create_task(self._check(worker))

    async def _check(self, worker: LoopThread) -> None:
        """Leave a loop that answers alone; interrupt one that does not; replace it if it still does not."""
        try:
            if await worker.responds(BLOCKED_AFTER_S):
                return
            culprit = worker.busy_with()
            worker.interrupt()
            if await worker.responds(INTERRUPT_GRACE_S):
                logger.warning("{} blocked the event loop of all episodes past its deadline: interrupted", culprit)
                worker.look_again()
                return
            reason = f"{culprit} blocked the event loop of all episodes and could not be interrupted"
            await self._replace(worker, reason)
        except EnvError as error:
            logger.error("the environments could not be started again: {}", error)
        finally:
            self._replacing = None

    async def _replace(self, worker: LoopThread, reason: str) -> None:
        """Leave a blocked loop behind and go on with a new one."""
        logger.error("{}: its thread is left behind, the environments start on a new one", reason)
        assert self._lost is not None
        self._lost.set_result(reason)
        self._give_up_awaited()
        self._worker = None
        worker.abandon()
        await self._start_worker()

    def _load(self) -> None:
        """Import verifiers, load the tokenizer. Runs on a thread."""
        try:
            import prime_hpc.envs.episode_runner  # noqa: F401 (what is missing is said here)
        except ImportError as error:
            raise EnvError(
                f"verifiers cannot be imported ({error}); install prime-hpc with its `cpu` or `gpu` extra"
            ) from error
        asked = self._settings
        if asked.chat is None:
            self._renderer = load_prompt_renderer(
                asked.tokenizer_path,
                asked.renderer,
                asked.enable_thinking,
                asked.trust_remote_code,
                asked.chat_template,
                asked.vision,
            )

    async def _load_source(self, config: EnvConfig) -> EnvSource:
        """Load an environment on a thread; one that sets handlers of signals meanwhile here, where alone that works."""
        asked = self._settings

        def load() -> EnvSource:
            with idle_loop():
                return EnvSource(config, asked.split, asked.seed, beside=asked.beside)

        try:
            return await asyncio.to_thread(load)
        except EnvError as error:
            if NO_SIGNAL not in str(error):
                raise
        with _own_ends():
            return load()

    def _num_workers(self, config: EnvConfig) -> Any:
        return self._servers.workers if config.workers is None else config.workers

    async def _start_fleets(self) -> None:
        """Start the processes of the environments that have some, all at once."""
        numbers = enumerate(map(self._num_workers, self._settings.envs))
        chosen = [(index, number) for index, number in numbers if number]
        if not chosen:
            return
        self._remote_hosts = remote_hosts(self._servers, self._settings.urls)
        hosts = deque[HostLink](self._remote_hosts or (self._host,))
        for index, number in chosen:
            source = self.sources[index]
            options = settings_to_plain(self._settings.of_one(index))
            refuse_unsendable(source.name, options)
            self._fleets[index] = Fleet(
                source.name,
                number,
                self._servers,
                list(hosts),
                options=options,
                moved=lambda: list(self._moved.items()),
                expected=await asyncio.to_thread(fingerprint, source),
                timeout_s=source.config.timeout_s,
                load_s=source.load_s,
            )
            hosts.rotate(-1 if number == "auto" else -number)  # the next one's first worker where this one's turn ended
        await asyncio.gather(*(fleet.start() for fleet in self._fleets.values()))

    def _make_thread(self) -> LoopThread:
        return LoopThread("prime-hpc-envs")

    async def _start_worker(self) -> None:
        """Start a fresh loop with those environments open on it that have no processes of their own."""
        from prime_hpc.envs.episode_runner import EpisodeRunner

        own = [index for index, config in enumerate(self._settings.envs) if not self._num_workers(config)]
        if not own:
            return
        self._warn_of_math(own)
        outlive_alarms()
        worker = self._make_thread()
        runner = EpisodeRunner(self.sources, self._settings, self._renderer, own)
        opening = asyncio.wrap_future(worker.submit(runner.open()))
        self._worker, self._runner = worker, runner
        for index, url in self._moved.items():
            runner.move_server(index, url)
        self._lost = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait_for(opening, OPEN_TIMEOUT_S)
        except TimeoutError as error:
            late = runner.opening
            raise EnvError(f"environment {late!r} did not start: {OPEN_TIMEOUT_S:g} s are over for all here") from error

    def _warn_of_math(self, own: Sequence[int]) -> None:
        """Say of which environments one answer of a model could keep this whole process busy for hours."""
        for source in (self.sources[index] for index in own):
            if speaks_of(source.env.taskset, "math_verify"):
                logger.warning(
                    f"environment {source.name!r} speaks of math_verify: where it compares answers itself, one such as "
                    "9^{9^{9}} keeps the process of all environments busy for hours; give it `workers`, where such an "
                    "episode fails and the others are played on"
                )

    async def _stop_worker(self) -> None:
        """Close the runner and end the thread, or leave it behind when it is blocked."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        closing = asyncio.wrap_future(worker.submit(self._runner.close()))
        await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)
        if not closing.done():
            closing.cancel()
        elif not closing.cancelled() and closing.exception() is not None:
            logger.warning("closing the environments: {}", closing.exception())
        if not await worker.stop(CLOSE_TIMEOUT_S):
            logger.warning("{} does not end: its thread is left behind", worker.busy_with())


@contextlib.contextmanager
def _own_ends() -> Iterator[None]:
    """Keep the handlers of the signals that end this process through the body, which runs other people's code."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            if signal.getsignal(signum) is not handler:
                signal.signal(signum, handler)


def _unfinished(state: EpisodeState, reason: str, error_type: str, started: float) -> EpisodeResult:
    return EpisodeResult(
        state=state, usable=False, reason=reason, error_type=error_type, duration_s=loop_time() - started
    )


def _overload(load: ThreadLoad) -> str:
    """Say that an episode may have been late for the thread's sake."""
    if load.late_s < BEHIND_S:
        return ""
    return (
        f"; the one thread of all environments without workers was {load.late_s:.0f} s late, busy for {load.busy:.0%} "
        "of the time: env_servers.workers gives them processes, a lower max_concurrent gives it less to do"
    )


def _outcome(episode: "asyncio.Task[EpisodeResult]", started: float) -> EpisodeResult:
    """Return the result of an episode that has ended: whatever its environment raises is this episode's failure."""
    if episode.cancelled():
        return _unfinished(EpisodeState.FAILED, "the environment cancelled itself", "CancelledError", started)
    error = episode.exception()
    if error is None:
        return episode.result()
    kind = type(error).__name__
    try:
        words = one_line(f"{kind}: {error}")
    except Exception:  # noqa: BLE001 - the environment's own class, whose `__str__` fails
        words = kind
    return _unfinished(EpisodeState.FAILED, words, kind, started)
