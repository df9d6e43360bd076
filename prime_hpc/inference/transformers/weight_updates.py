"""The policy version that the batch computes with, and its change between two of its steps (`policy.Policy`)."""

import asyncio
import time
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.inference.backend import POLICY
from prime_hpc.inference.check_version import BadVersionError, Received, weight_files
from prime_hpc.inference.policy import BASE_VERSION, PolicyFailedError
from prime_hpc.inference.readahead import read_ahead
from prime_hpc.inference.transformers.engine import Engine
from prime_hpc.inference.whole_model import WholeModel

_NO_ADAPTERS = "the transformers backend serves no adapters; use inference.backend = vllm"


class BatchPolicy(WholeModel):
    """The served version."""

    def __init__(self, engine: Engine, name: str, base_path: Path | None, scratch: Path) -> None:
        """Make the service: `engine` computes; the others are `WholeModel`'s."""
        super().__init__(name, base_path, scratch, tied=engine.model.tied)
        self._engine = engine

    def served(self, name: str) -> tuple[int, str]:
        """Version and folder of the policy; of other names there are none."""
        if name != POLICY:
            raise BadVersionError(f"no adapter is served as {name}: {_NO_ADAPTERS}")
        return self.version, self.path

    def adapter_versions(self) -> dict[str, int]:
        """None."""
        return {}

    async def update(self, path: str, version: int, name: str) -> dict[str, Any]:
        """Load `version` from `path`; sequences that are under way go on with the new weights."""
        folder = self._folder(path, version)
        if name != POLICY:
            raise BadVersionError(f"{name}: {_NO_ADAPTERS}")
        async with self._lock:
            if await self._serves(path, version):
                return self._answer(changed=False)
            start = time.perf_counter()
            received = await self._receive(folder, version)
            return await self._load(received, version, time.perf_counter() - start)

    async def reload(self, name: str) -> dict[str, Any]:
        """Go back to the base model."""
        async with self._lock:
            if name != POLICY or self.version == BASE_VERSION:
                return self._answer(changed=False)
            return await self._load(self._base(), BASE_VERSION, 0.0)

    async def serve_base(self, name: str) -> dict[str, Any]:
        """Refuse: the base model stands under the policy's name alone."""
        raise BadVersionError(f"{name} is to get an adapter: {_NO_ADAPTERS}")

    async def sleep(self) -> dict[str, Any]:
        """Refuse: the engine keeps its memory."""
        raise BadVersionError("the transformers backend does not sleep; use inference.backend = vllm")

    async def wake_up(self) -> dict[str, Any]:
        """Nothing: it never sleeps."""
        return {"version": self.version, "asleep": False}

    async def _load(self, received: Received, version: int, check_s: float) -> dict[str, Any]:
        """Read everything, then change the weights between two steps."""
        start = time.perf_counter()
        model, folder = self._engine.model, received.folder
        files = weight_files(folder)
        num_bytes = await asyncio.to_thread(read_ahead, files)
        read_s = time.perf_counter() - start
        tensors = await asyncio.to_thread(model.open, files)
        open_s = time.perf_counter() - start - read_s

        def change() -> float:
            began = time.perf_counter()
            try:
                model.load(tensors)
            except BaseException as error:  # before another token: none of undefined weights may carry a version's name
                self._engine.fail(f"loading version {version} from {folder} failed: {type(error).__name__}: {error}")
                raise
            self._engine.version = version
            self._engine.forget_cache()
            return time.perf_counter() - began

        if self._engine.failure is not None:
            raise PolicyFailedError(self._engine.failure)
        try:
            paused_s = await asyncio.wrap_future(self._engine.between_steps(change))
        except Exception as error:
            raise PolicyFailedError(self._engine.failure or str(error)) from error
        self._note(version, received.published, received.digest)
        logger.info(
            f"policy version {version} from {self.path}: read {num_bytes / 1e9:.2f} GB, paused {paused_s:.3f} s"
        )
        return self._answer(changed=True, check=check_s, read=read_s, open=open_s, paused=paused_s)
