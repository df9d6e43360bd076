"""Sandboxes of one environment: some are started ahead and wait, each is used once."""

import asyncio
import contextlib
import os

from prime_hpc.config.sections.orchestrator import SandboxConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.sandbox.bubblewrap import Stage
from prime_hpc.envs.sandbox.makers import MAKERS
from prime_hpc.envs.sandbox.sandbox_process import Sandbox, SandboxFailed


class WarmPool:
    """Gives out sandboxes and starts others in their place. Belongs to the event loop on which it was opened."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        cores = len(os.sched_getaffinity(0))
        self.turn = asyncio.Semaphore(config.parallel or cores)
        """Held by whoever runs a command."""
        self._starting = asyncio.Semaphore(max(1, cores))
        self._program = ""
        self._stage: Stage | None = None
        self._warm: list[Sandbox] = []
        self._out: set[Sandbox] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def open(self) -> None:
        """Try a sandbox, and start those that wait.
        Raises EnvError: this node cannot make one; says why and what to do."""
        maker = MAKERS[self.config.runtime]
        self._program = await asyncio.to_thread(maker.find)
        self._stage = await asyncio.to_thread(Stage, maker.shown_paths(self.config))
        try:
            self._warm.append(await self._start())
        except SandboxFailed as error:
            await self.close()
            raise EnvError(str(error)) from error
        self._refill()

    async def take(self) -> Sandbox:
        """Return a sandbox that nobody has used. Raises SandboxFailed: none could be started."""
        while self._warm:
            sandbox = self._warm.pop(0)
            if sandbox.is_alive():
                break
            self._drop(sandbox)
        else:
            sandbox = await self._start()
        self._out.add(sandbox)
        self._refill()
        return sandbox

    def give_back(self, sandbox: Sandbox) -> None:
        """End a sandbox that was taken, without waiting for it."""
        self._out.discard(sandbox)
        self._drop(sandbox)

    async def close(self) -> None:
        """End all of them, and wait until nothing of them is left."""
        self._closed = True
        for sandbox in [*self._warm, *self._out]:
            self._drop(sandbox)
        self._warm.clear()
        self._out.clear()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._stage is not None:
            await asyncio.to_thread(self._stage.close)

    async def _start(self) -> Sandbox:
        assert self._stage is not None, "open the pool first"
        sandbox = Sandbox(self.config, self._program, self._stage)
        async with self._starting:
            await sandbox.start()
        return sandbox

    def _refill(self) -> None:
        """Start one where one is missing; the next one when it is there."""
        if len(self._warm) < self.config.warm and not self._closed:
            self._in_background(self._add())

    async def _add(self) -> None:
        with contextlib.suppress(SandboxFailed):  # whoever needs one starts it and is told
            sandbox = await self._start()
            if self._closed or len(self._warm) >= self.config.warm:
                await sandbox.stop()
                return
            self._warm.append(sandbox)
            self._refill()

    def _drop(self, sandbox: Sandbox) -> None:
        self._in_background(sandbox.stop())

    def _in_background(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
