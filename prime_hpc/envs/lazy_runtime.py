"""A verifiers runtime that costs nothing until it is used.

verifiers gives every rollout a runtime (for us: a directory on this machine and the means to start processes in it),
makes the directory first and removes it on a thread afterwards. Most tasks never touch it.
"""

import uuid
from typing import Any

from verifiers.v1.runtimes import ProgramResult, RuntimeProcess, SubprocessConfig, SubprocessRuntime
from verifiers.v1.runtimes.base import Runtime, register

_CONFIG = SubprocessConfig()
_INFO = SubprocessRuntime(_CONFIG).info


class LazyRuntime(SubprocessRuntime):
    """`SubprocessRuntime` whose directory appears with the first command or file."""

    def __init__(self) -> None:
        # Not `SubprocessRuntime`'s, which dumps the configuration and validates it again for every rollout.
        Runtime.__init__(self, "unused")
        self._uv_interpreters, self._uv_script_locks = self._interpreters, self._locks
        self.config, self.info = _CONFIG, _INFO.model_copy()
        self.workdir = None
        self._background: list[Any] = []

    async def start(self) -> None:
        """Nothing yet."""

    def with_env(self, env: dict[str, str]) -> Runtime:
        """Return a view with its own environment; itself where that would be no other one."""
        return self if env == self.env else super().with_env(env)

    async def _ensure(self) -> None:
        if self.workdir is None:
            self.name = f"vf-{uuid.uuid4().hex[:12]}"  # of the directory, which other processes make theirs beside
            register(self)  # removed at interpreter exit, should `stop` never run
            await super().start()

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        """Run a command in the directory."""
        await self._ensure()
        return await super().run(argv, env)

    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        """Start a live process in the directory."""
        await self._ensure()
        return await super().open_process(argv, env)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        """Start a background process in the directory."""
        await self._ensure()
        await super().run_background(argv, env, log)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        await self._ensure()
        return await super()._read(path, max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file in the directory."""
        await self._ensure()
        await super().write(path, data)

    async def stop(self) -> None:
        """Free what was used; free of cost when nothing was."""
        if self.workdir is None and not self._background:
            self.stopped = True
            return
        await super().stop()


class LazyBox:
    """A fresh `LazyRuntime` for one rollout (`agent.run(task, runtime=box)`), freed on exit."""

    async def __aenter__(self) -> Any:
        self._box = LazyRuntime()
        return self._box

    async def __aexit__(self, *error: object) -> None:
        await self._box.stop()
