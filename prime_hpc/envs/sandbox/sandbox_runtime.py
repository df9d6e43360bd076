"""Sandboxes as a verifiers runtime: an episode's commands, files and programs are those of a sandbox of its own.

verifiers makes runtimes by the type in a seat's config, and its types are a closed list. A `SandboxSeat` is its
`subprocess` config with the name of a pool; where the pool is open, a `SandboxRuntime` is made of it in place of a
process of the host. A seat without an open pool is refused: nothing runs unprotected by accident.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from verifiers.v1 import runtimes
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ProgramResult, Runtime, SubprocessConfig, SubprocessRuntimeInfo, register

from prime_hpc.envs.sandbox.sandbox_process import Ended, Sandbox, SandboxFailed
from prime_hpc.envs.sandbox.warm_pool import WarmPool

_pools: dict[str, WarmPool] = {}
"""Open ones, by the names that seats carry."""
_class_of = runtimes._runtime_cls
_WHY = {
    "wall": "it ran longer than sandbox.command_s",
    "cpu": "it took more CPU time than sandbox.cpu_s",
    "memory": "it took more memory than sandbox.memory_mib",
    "processes": "it started more processes than sandbox.processes",
    "files": "it made more files than sandbox.files",
    "hidden": "one of its processes kept from being looked at",
    "gone": "it took the sandbox with it",
}


class SandboxSeat(SubprocessConfig):
    """Runtime of a seat whose episodes have sandboxes."""

    pool: str = ""
    """Name of the environment's pool."""


class SandboxRuntime(Runtime):
    """One episode's sandbox, there from its first command or file on."""

    scripts_dir = "/work/.scripts"

    def __init__(self, config: SandboxSeat, name: str | None = None) -> None:
        super().__init__(name)
        if config.pool not in _pools:
            raise SandboxError(f"the sandboxes of {config.pool or 'this environment'!r} are not open")
        self.config = config
        self.info = SubprocessRuntimeInfo(id="sandbox")
        self._pool = _pools[config.pool]
        self._sandbox: Sandbox | None = None
        self._taking = asyncio.Lock()

    @property
    def has_network(self) -> bool:
        """True where it shares the node's network."""
        return self._pool.config.network

    async def start(self) -> None:
        """Nothing yet."""

    async def _taken(self) -> Sandbox:
        async with self._taking:
            if self._sandbox is None:
                if self.stopped:
                    raise SandboxError("the episode has ended, and its sandbox with it")
                self._sandbox = await self._pool.take()
            return self._sandbox

    async def command(self, argv: list[str] | None = None, **how: Any) -> Ended:
        """`Sandbox.run`, when it is its turn. Raises SandboxError: there is no sandbox to run it in."""
        try:
            sandbox = await self._taken()
            async with self._pool.turn:
                return await sandbox.run(argv, **how)
        except SandboxFailed as error:
            raise SandboxError(str(error)) from error

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Run a command; one that a limit has ended says so at the end of its error output."""
        ended = await self.command(argv, env=self.process_env(env))
        code = ended.code if ended.code >= 0 else 128 - ended.code
        said = ended.stderr.decode(errors="replace")
        if ended.ended_by:
            said += f"\n[ended: {_WHY[ended.ended_by]}]"
        if ended.dropped:
            said += f"\n[{ended.dropped} bytes of output were dropped]"
        return ProgramResult(exit_code=code, stdout=ended.stdout.decode(errors="replace"), stderr=said)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        try:
            return await (await self._taken()).read(path, max_bytes)
        except SandboxFailed as error:
            raise SandboxError(str(error)) from error

    async def write(self, path: str, data: bytes) -> None:
        """Write a file in the sandbox."""
        try:
            await (await self._taken()).write(path, data)
        except SandboxFailed as error:
            raise SandboxError(str(error)) from error

    def cleanup(self) -> None:
        """Give the sandbox back, which ends it; free of cost where none was taken."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            self._pool.give_back(sandbox)

    async def stop(self) -> None:
        """End the sandbox."""
        self.stopped = True
        self.cleanup()


def explain(ended: Ended) -> str:
    """Return how a Python program ended in the words of `benchmarks.execute`: `passed`, `timed out`, `failed: ...`."""
    if ended.ended_by in ("wall", "cpu"):
        return "timed out"
    if ended.ended_by:
        return f"failed: {_WHY[ended.ended_by]}"
    return ended.verdict or f"failed: it ended by itself (exit code {ended.code})"


def _class_with_sandboxes(config: Any) -> type[Runtime]:
    return SandboxRuntime if isinstance(config, SandboxSeat) else _class_of(config)


@asynccontextmanager
async def open_pool(name: str, pool: WarmPool) -> AsyncIterator[None]:
    """Have seats with this name get their sandboxes from `pool`, which is opened here and closed in the end.
    Raises EnvError: this node cannot make sandboxes."""
    vars(runtimes)["_runtime_cls"] = _class_with_sandboxes
    await pool.open()
    _pools[name] = pool
    try:
        yield
    finally:
        if _pools.get(name) is pool:  # a loop that was left behind closes none but its own
            del _pools[name]
        await pool.close()


@asynccontextmanager
async def sandbox_box(name: str) -> AsyncIterator[SandboxRuntime]:
    """Yield a fresh runtime for one episode (`agent.run(task, runtime=box)`), freed on exit."""
    box = SandboxRuntime(SandboxSeat(pool=name))
    register(box)
    try:
        yield box
    finally:
        await box.stop()
