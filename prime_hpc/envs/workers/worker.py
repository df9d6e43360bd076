"""A worker process: plays episodes of one environment for an orchestrator, beside nobody else's.

The environment's code runs on a thread with an event loop of its own, as in the orchestrator where there are no
workers; the main thread listens and says every second how it is, whatever the environment does:

    orchestrator -> worker  {"op": "open", "options": ..., "stall_s": ...}
                            {"op": "play", "id": I, "attempt": A, "task": N, "server": U}
                            {"op": "cancel", "id": I, "attempt": A}, {"op": "move", "server": U, "url": ...}
                            {"op": "stop"}
    worker -> orchestrator  {"op": "opened", "fingerprint": ...} or {"op": "refused", "reason": ...}
                            {"op": "making", "id": I, "attempt": A}, {"op": "begun", "id": I, "attempt": A}
                            {"op": "ended", "id": I, "attempt": A, "result": ...}
                            {"op": "beat", "busy": share of a core, "memory": bytes}
                            {"op": "stuck", "id": I, "reason": ...}, its last words
"""

import asyncio
import contextlib
import mmap
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from loguru import logger

from prime_hpc.client.judge import set_variables
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.loop_thread import LoopThread
from prime_hpc.envs.pool import EnvPool
from prime_hpc.envs.samples import EpisodeResult, EpisodeState
from prime_hpc.envs.workers.episode_mark import current_episode, mark_episodes, read_mark
from prime_hpc.envs.workers.fingerprint import fingerprint
from prime_hpc.envs.workers.frames import FrameError, Unpacker, pack
from prime_hpc.envs.workers.records import result_to_plain
from prime_hpc.envs.workers.settings import settings_from_plain
from prime_hpc.observe.logs import setup_logger
from prime_hpc.runtime import activity
from prime_hpc.runtime.event_loops import new_event_loop
from prime_hpc.runtime.process_memory import freeze_gc, resident_bytes

BEAT_S = 1.0
SWITCH_S = 0.03
"""For so long the environment's thread may compute before the one that listens, which is not in a hurry, takes over
(Python's own default: 5 ms; each change costs both of them their caches)."""
STUCK_EXIT_CODE = 75
"""Of a worker whose environment blocks it and cannot be interrupted."""


class WorkerPool(EnvPool):
    """The pool of a worker: it ends its process where the orchestrator's would start a new thread."""

    mark: mmap.mmap
    say_last: Callable[[bytes], Awaitable[None]]

    def _warn_of_math(self, own: Sequence[int]) -> None:
        """Nothing: it would end this process alone."""

    def _make_thread(self) -> LoopThread:
        thread = super()._make_thread()
        mark_episodes(thread.loop, self.mark)
        return thread

    async def _replace(self, worker: LoopThread, reason: str) -> None:
        logger.error("{}: this process ends", reason)
        await self.say_last(pack("stuck", id=read_mark(self.mark), reason=reason))
        os._exit(STUCK_EXIT_CODE)

    async def look_for_stalls(self, stall_s: float) -> None:
        """For ever: interrupt an environment that keeps its loop for longer than `stall_s`."""
        while True:
            await asyncio.sleep(min(1.0, stall_s / 4))
            worker = self._worker
            if worker is not None and self._replacing is None and not await worker.responds(stall_s):
                self._look_after(worker)


class Worker:
    """One connection to an orchestrator, until either end leaves."""

    def __init__(self, sock: socket.socket, mark: mmap.mmap) -> None:
        self._sock, self._mark = sock, mark
        self._unpacker = Unpacker()
        self._playing: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._pool: WorkerPool | None = None
        self._making = asyncio.Lock()

    async def serve(self) -> None:
        """Open the environment, then play what is asked for."""
        self._reader, self._writer = await asyncio.open_connection(sock=self._sock, limit=1 << 20)
        beats = asyncio.create_task(self._beat())
        watch: asyncio.Task[None] | None = None
        try:
            order = None
            async for message in self._messages():
                if message["op"] == "open" and order is None:
                    order = message
                    if not await self._open(order):
                        return
                    assert self._pool is not None
                    watch = asyncio.create_task(self._pool.look_for_stalls(order["stall_s"]))
                elif message["op"] == "stop":
                    return
                elif order is not None:
                    self._execute(message)
        finally:
            for task in (beats, watch, *self._playing.values()):
                if task is not None:
                    task.cancel()
            if self._pool is not None:
                await self._pool.__aexit__(None, None, None)

    async def _messages(self) -> Any:
        while data := await self._reader.read(1 << 18):
            for message in self._unpacker.feed(data):
                yield message

    async def _open(self, order: dict[str, Any]) -> bool:
        """Load the environment and say which code it is; False where that is not possible."""
        try:
            settings = settings_from_plain(order["options"])
            set_variables(settings.environ)
            pool = WorkerPool(settings)
            pool.mark, pool.say_last = self._mark, self._send_last
            await pool.__aenter__()
            code = await asyncio.to_thread(fingerprint, pool.sources[0])
        except (EnvError, KeyError, TypeError, ValueError) as error:
            await self._send_last(pack("refused", reason=str(error)))
            return False
        self._pool = pool
        for index, url in order["moved"]:
            pool.move_server(index, url)
        freeze_gc()
        logger.info(f"plays {pool.sources[0].name}")
        self._send("opened", fingerprint=code)
        return True

    def _execute(self, message: dict[str, Any]) -> None:
        assert self._pool is not None
        match message["op"]:
            case "play":
                key = message["id"], message["attempt"]
                task = asyncio.create_task(self._play(key, message["task"], message["server"], message["greedy"]))
                self._playing[key] = task
                task.add_done_callback(lambda _: self._playing.pop(key, None))
            case "cancel":
                task_or_none = self._playing.get((message["id"], message["attempt"]))
                if task_or_none is not None:
                    task_or_none.cancel()
            case "move":
                self._pool.move_server(message["server"], message["url"])

    async def _play(self, key: tuple[int, int], number: int, server: int, greedy: bool) -> None:
        assert self._pool is not None
        current_episode.set(key[0])
        source = self._pool.sources[0]
        if source.is_far(number):  # a run that was resumed: its deadline does not begin before its task is there
            self._send("making", id=key[0], attempt=key[1])
            async with self._making:
                with contextlib.suppress(Exception):  # the episode says why
                    await asyncio.to_thread(source.task_number, number)
            self._send("begun", id=key[0], attempt=key[1])
        try:
            result = await self._pool.run_episode(0, number, server, greedy=greedy)
        except IndexError as error:
            result = EpisodeResult(EpisodeState.FAILED, False, str(error), "IndexError")
        try:
            data = pack("ended", id=key[0], attempt=key[1], result=result_to_plain(result))
        except (TypeError, ValueError, OverflowError) as error:
            failed = EpisodeResult(EpisodeState.FAILED, False, str(error), type(error).__name__)
            data = pack("ended", id=key[0], attempt=key[1], result=result_to_plain(failed))
        self._writer.write(data)

    def _send(self, op: str, **fields: Any) -> None:
        self._writer.write(pack(op, **fields))

    async def _send_last(self, data: bytes) -> None:
        """Send it, and wait a second at most until it has left."""
        self._writer.write(data)
        deadline = time.monotonic() + 1.0
        while self._writer.transport.get_write_buffer_size() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def _beat(self) -> None:
        """Say every second that this process lives, how busy it is and what memory it holds."""
        pid = os.getpid()
        cpu, clock = time.process_time(), time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            now_cpu, now = time.process_time(), time.monotonic()
            busy = (now_cpu - cpu) / max(now - clock, 1e-9)
            cpu, clock = now_cpu, now
            self._send("beat", busy=busy, memory=resident_bytes(pid))


def work(sock: socket.socket, mark: mmap.mmap, label: str) -> None:
    """Serve one connection; does not return. Called in a process forked by the host."""
    activity.introduce("environment", os.getpid(), "", label=label)
    setup_logger(label)
    sys.setswitchinterval(SWITCH_S)
    code = 0
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(Worker(sock, mark).serve())
    except (FrameError, OSError) as error:
        logger.warning(f"the connection to the orchestrator is lost: {error}")
    except BaseException as error:  # noqa: BLE001 - said once, here; the process ends in any case
        logger.opt(exception=error).error("this worker ends because of a bug")
        code = 1
    os._exit(code)
