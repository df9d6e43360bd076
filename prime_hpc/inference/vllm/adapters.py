"""Adapters that the engines serve beside the base model: by name, each with its version. Held by `weight_updates`.

A name stands for its newest version: requests that come in sample from that one. Every version is an adapter of its own
inside vLLM (`policy#12@7`: version 7, the twelfth adapter that was loaded), so that

- a request in flight ends with the version that it began with, without a pause: all its tokens carry one version;
- the prefix cache, which vLLM keys by the adapter's inner name, never serves another version's keys and values, nor
  those of an earlier version 7, which a run made before it went back to a checkpoint.

A version that was replaced goes when no request uses it any more. When too many are still in use, requests of the
oldest are aborted: they are older than `async_level` lets the trainer take.

    check files (headers, manifest, rank)  ->  every engine loads  ->  the name means the new version  ->  old ones go
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from prime_hpc.inference.check_version import BadVersionError, Signature, check_adapter, digest_of
from prime_hpc.inference.policy import UnavailableError

logger = init_logger(__name__)

LOAD_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class _Loaded:
    """One version of one name inside the engines."""

    name: str
    version: int
    request: LoRARequest
    digest: str | None
    """Of its manifest."""

    @property
    def path(self) -> str:
        return self.request.lora_path


def version_of(request: LoRARequest) -> int:
    """Return the policy version that an inner name stands for."""
    return int(request.lora_name.rpartition("@")[2])


class AdapterService:
    """Names and versions. Updates are serialised by the caller."""

    def __init__(self, engine: AsyncLLM, models: Any, base: Signature | None) -> None:
        """Args:
        models: vLLM's registry of served models (`OpenAIServingModels`), which resolves a request's model name.
        base: names and shapes of the base model's tensors, None where unknown.
        """
        self._engine, self._models, self._base = engine, models, base
        self._config = engine.vllm_config.lora_config
        self._served: dict[str, _Loaded] = {}
        self._of_base: dict[str, BaseModelPath] = {}
        self._replaced: list[_Loaded] = []
        """Still loaded, oldest first."""

    def serve_base(self, name: str) -> None:
        """Let a name stand for the base model until an adapter is loaded under it: a run's version 0."""
        if name not in self._of_base:
            self._of_base[name] = BaseModelPath(name=name, model_path=self._engine.model_config.model)
            self._models.registry.base_model_paths.append(self._of_base[name])

    def stands_for_base(self, name: str) -> bool:
        """Return whether `serve_base` was called for a name."""
        return name in self._of_base

    @property
    def is_enabled(self) -> bool:
        """True if the engines were started for adapters."""
        return self._config is not None

    def served(self, name: str) -> tuple[int, str] | None:
        """Version and folder that a name stands for; None: the base model, or nothing."""
        found = self._served.get(name)
        return None if found is None else (found.version, found.path)

    async def serves(self, name: str, version: int, path: str) -> bool:
        """Return whether a name stands for a version already, as it lies there now."""
        if self.served(name) != (version, path):
            return False
        return await asyncio.to_thread(digest_of, Path(path)) in (None, self._served[name].digest)

    def versions(self) -> dict[str, int]:
        """All names that stand for an adapter."""
        return {name: loaded.version for name, loaded in self._served.items()}

    async def update(self, name: str, folder: Path, version: int) -> dict[str, float]:
        """Let `name` stand for `version` in `folder`; returns seconds of each phase.

        Raises:
            BadVersionError: refused; everything goes on as it was.
            UnavailableError: the engines did not load it in time; as well.
        """
        assert self._config is not None
        start = time.perf_counter()
        await asyncio.to_thread(check_adapter, folder, version, self._base, self._config.max_lora_rank)
        digest = await asyncio.to_thread(digest_of, folder)  # before it is loaded: no wait until it is noted
        checked = time.perf_counter()
        self._make_room(name)
        number = self._models.lora_id_counter.inc(1)
        request = LoRARequest(f"{name}#{number}@{version}", number, str(folder))
        try:
            await asyncio.wait_for(self._engine.add_lora(request), LOAD_TIMEOUT_S)
        except TimeoutError as error:  # a file system that hangs is no fault of the adapter's
            await self._remove(request)
            raise UnavailableError(f"{folder} was not loaded within {LOAD_TIMEOUT_S:.0f} s") from error
        except Exception as error:
            await self._remove(request)
            raise BadVersionError(f"{folder} cannot be loaded: {type(error).__name__}: {error}") from error
        before = self._served.get(name)
        self._served[name] = _Loaded(name, version, request, digest)
        self._models.lora_requests[name] = request
        if before is not None:
            self._replaced.append(before)
        await self._retire()
        logger.info("adapter %s version %d from %s", name, version, folder)
        return {"check": checked - start, "load": time.perf_counter() - checked}

    async def drop(self, name: str) -> bool:
        """Forget a name: requests get the base model where it is one of its names, else an error. Whether there was
        any; requests in flight end as they began."""
        before = self._served.pop(name, None)
        self._models.lora_requests.pop(name, None)
        alias = self._of_base.pop(name, None)
        if alias is not None:
            self._models.registry.base_model_paths.remove(alias)
        if before is not None:
            self._replaced.append(before)
            await self._retire()
        return before is not None

    def _in_flight(self) -> dict[int, list[str]]:
        """Inner number of an adapter -> requests that use it."""
        found: dict[int, list[str]] = {}
        for request_id, state in self._engine.output_processor.request_states.items():
            if state.lora_request is not None:
                found.setdefault(state.lora_request.lora_int_id, []).append(request_id)
        return found

    def _make_room(self, name: str) -> None:
        """Refuse a further name where names that are served would take every place: one is for the next version."""
        assert self._config is not None
        if len({*self._served, name}) >= (self._config.max_cpu_loras or 1):
            raise BadVersionError(
                f"{name} finds no place among the {self._config.max_cpu_loras} for adapters, of which one stays free "
                f"for the next version: {sorted(self._served)} are served; unload one, or start the server with more "
                "(inference.vllm.max_cpu_loras)"
            )

    async def _retire(self) -> None:
        """Unload replaced versions that nobody uses, but each name's newest: requests may be on their way to it. Beyond
        the engines' room the oldest goes in any case."""
        assert self._config is not None
        in_flight = self._in_flight()
        newest = list({loaded.name: loaded for loaded in self._replaced}.values())
        idle = [r for r in self._replaced if r.request.lora_int_id not in in_flight and r not in newest]
        for loaded in idle:
            self._replaced.remove(loaded)
            await self._remove(loaded.request)
        # one place is for the version that comes next
        while self._replaced and len(self._served) + len(self._replaced) >= (self._config.max_cpu_loras or 1):
            loaded = self._replaced.pop(0)
            if ids := in_flight.get(loaded.request.lora_int_id, []):
                logger.warning("%d requests of %s are aborted: too old", len(ids), loaded.request.lora_name)
                await self._engine.abort(ids, internal=True)
            await self._remove(loaded.request)

    async def _remove(self, request: LoRARequest) -> None:
        try:
            await asyncio.wait_for(self._engine.remove_lora(request.lora_int_id), LOAD_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - an adapter too many does no harm; the engines' cache drops it
            logger.warning("%s could not be unloaded: %s", request.lora_name, error)
