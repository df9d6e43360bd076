"""The policy version that the engines hold, and its change while requests are in flight.

One `PolicyService` lives in the API process; `routes` calls it. An update goes:

    onto this node, checked (manifest, headers)  ->  into the page cache  ->  every worker opens the files
        ->  pause, keeping requests  ->  every worker loads   ->  new version label        ->  resume

Up to the pause a bad version is refused and nothing has changed. Kept requests lose their key-value cache and are
prefilled again with the new weights, so tokens before the change belong to the old version, tokens after it to the
new one, exactly; vLLM reports the boundary in `weight_versions`. With `inference.keep_kv_cache` they go on at once with
the keys and values that older weights made. Adapters go another way, see `adapters`; versions that the trainer sends
over the network are received while paused instead of loaded, see `network_updates`.

Engines that sleep (`inference.sleep`) are woken by the next update: weights first, then the new version into them, then
the cache, with which sampling goes on. What they were asked for meanwhile has waited.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine.async_llm import AsyncLLM

from prime_hpc.inference.backend import POLICY
from prime_hpc.inference.check_version import BadVersionError, Received, server_scratch, weight_files
from prime_hpc.inference.policy import BASE_VERSION, PolicyFailedError, UnavailableError
from prime_hpc.inference.readahead import read_ahead
from prime_hpc.inference.vllm.adapters import AdapterService
from prime_hpc.inference.vllm.network_updates import NetworkUpdates, Offer, read_offer
from prime_hpc.inference.whole_model import WholeModel
from prime_hpc.runtime.role_context import BUS
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.weights import newest_with_weights
from prime_hpc.weight_transport.network.link import TransferError

logger = init_logger(__name__)

PHASE_TIMEOUT_S = 900.0
"""Longest that the engines may take for one phase of an update before the server gives up and ends."""

PAUSE_TRIES = 50
PAUSE_AGAIN_S = 0.02
_BLOCKS_IN_USE = "Failed to reset KV cache"
"""Of vLLM's message where blocks are on their way from host memory."""
STAGE_S = 120.0
"""Longest that requests go on while workers bring a version into pinned memory; then the pause waits for the rest."""
STAGE_LOOK_S = 0.02
EMPTIED = (None, "OffloadingConnector", "SimpleCPUOffloadConnector")
"""Connectors whose blocks of the KV cache go with the cache, and that no other server has a part in."""


@dataclass(frozen=True)
class Loaded:
    """The version that the engines hold after a pause."""

    version: int
    folder: Path
    digest: str | None
    """Of its manifest, as `Received` has it."""
    rows: list[dict[str, Any]]
    """An answer of each worker."""


class PolicyService(WholeModel):
    """The served version. Updates are serialised; the same update again is a no-op."""

    def __init__(
        self,
        engine: AsyncLLM,
        models: Any,
        base_path: Path | None,
        on_failure: Callable[[str], None],
        keep_kv_cache: bool = False,
    ) -> None:
        """Make the service; call `start` before serving.

        Args:
            base_path: folder of the base model's safetensors; None where it has none on this node.
            on_failure: called once, with the reason, when the engines cannot be trusted any more.
            keep_kv_cache: running requests keep their key-value cache at an update.
        """
        tied = bool(engine.model_config.hf_text_config.tie_word_embeddings)
        super().__init__(engine.model_config.model, base_path, server_scratch(), tied=tied)
        self._engine = engine
        self._on_failure = on_failure
        self._keep_kv_cache = keep_kv_cache
        self._connector = getattr(getattr(engine.vllm_config, "kv_transfer_config", None), "kv_connector", None)
        self.adapters = AdapterService(engine, models, self._signature)
        self._network: NetworkUpdates | None = None
        self._failure: str | None = None
        self.asleep = False
        """Whether the engines have given up their memory; changed under the lock alone."""
        self._num_loads = 0

    async def start(self) -> None:
        """Label the base model's tokens with version 0 (vLLM's own label is `default`)."""
        num_workers = len(await self._on_every_worker("policy_start"))
        secret = os.environ.get(BUS, "").rpartition("@")[0]
        if self._engine.vllm_config.weight_transfer_config is not None and secret:
            self._network = NetworkUpdates(secret, self._on_every_worker, num_workers, self._still)
        if self._keep_kv_cache:
            self._share_within_version()
        await self._engine.update_weight_version(str(BASE_VERSION))

    def served(self, name: str) -> tuple[int, str]:
        """Version and folder that sample under a model name. Raises BadVersionError: nothing is served under it."""
        found = self.adapters.served(name)
        if found is None and name != POLICY and not self.adapters.stands_for_base(name):
            raise BadVersionError(f"no adapter is served as {name}; there are {sorted(self.adapters.versions())}")
        return found or (self.version, self.path)

    def adapter_versions(self) -> dict[str, int]:
        """Model name -> version of every adapter that is served."""
        return self.adapters.versions()

    async def update(self, path: str, version: int, name: str = POLICY) -> dict[str, Any]:
        """Load `version` from `path` into every engine, keeping requests in flight.

        A whole model replaces the base model; an adapter gets the model name `name`.

        Raises:
            BadVersionError: refused; the engines go on as they were.
            UnavailableError: not to be had now; the engines go on with a whole version.
            PolicyFailedError: the load failed half-way; the server ends.
        """
        folder = self._folder(path, version)
        if self._connector not in EMPTIED:
            raise BadVersionError(
                f"{self._connector} would keep keys and values of other weights: serve what is trained without "
                "inference.vllm.kv_transfer_config and kv_offloading_backend"
            )
        async with self._lock:
            if await self.adapters.serves(name, version, path):
                await self._wake()
                return {"version": version, "path": path, "changed": False}
            if self.adapters.is_enabled:
                await self._wake()
                seconds = await self.adapters.update(name, folder, version)
                rounded = {key: round(value, 4) for key, value in seconds.items()}
                return {"version": version, "path": path, "changed": True, "seconds": rounded}
            if name != POLICY:
                raise BadVersionError(f"{name}: this server serves no adapters (model.lora is not set)")
            if await self._serves(path, version):
                await self._wake()
                return self._answer(changed=False)
            start = time.perf_counter()
            if self._network is not None:
                answer = await self._update_over(self._network, folder, version)
                if answer is not None:
                    return answer
            received = await self._receive(folder, version)
            return await self._load(received, version, time.perf_counter() - start)

    async def _update_over(self, network: NetworkUpdates, folder: Path, version: int) -> dict[str, Any] | None:
        """Load a version that the trainer sends; None where it is one of files, or must be read from them.

        Raises:
            UnavailableError: the trainer does not have it any more, or is gone, and it does not lie in files.
            PolicyFailedError: an engine joins it for ever, and does nothing else; the server ends.
        """
        if self._failure is not None:
            raise PolicyFailedError(self._failure)
        start = time.perf_counter()
        offer = await asyncio.to_thread(read_offer, folder, version, self._signature, self._tied)
        if offer is None:
            return None
        try:
            await network.prepare(offer)
        except TransferError as error:
            if not offer.is_whole:
                raise UnavailableError(f"version {version}: {error}") from error
            logger.warning("version %d is read from its files: %s", version, error)
            return None
        except TimeoutError as error:
            raise self._given_up(f"joining the trainer took longer than {PHASE_TIMEOUT_S:.0f} s") from error
        return await self._receive_over(network, offer, time.perf_counter() - start)

    async def reload(self, name: str = POLICY) -> dict[str, Any]:
        """Go back to the base model; other names of adapters are not served any more.

        Raises:
            BadVersionError: the base model has no safetensors on this node.
            PolicyFailedError: as `update`.
        """
        async with self._lock:
            if name != POLICY or self.adapters.is_enabled:
                changed = await self.adapters.drop(name)
                await self._wake()
                return {"version": BASE_VERSION, "path": self.path, "changed": changed}
            if self.version == BASE_VERSION:
                await self._wake()
                return self._answer(changed=False)
            return await self._load(self._base(), BASE_VERSION, 0.0)

    async def serve_base(self, name: str) -> dict[str, Any]:
        """Version 0 under a name of its own: one of several runs that begins. An adapter of that name is unloaded.
        Raises BadVersionError: the server serves no adapters."""
        if not self.adapters.is_enabled:
            raise BadVersionError(f"{name} is to get an adapter, and this server serves none: set model.lora")
        async with self._lock:
            changed = await self.adapters.drop(name)
            self.adapters.serve_base(name)
            return {"version": BASE_VERSION, "path": self.path, "changed": changed}

    async def sleep(self) -> dict[str, Any]:
        """Give up the engines' memory (vLLM's level 1): weights to the host, no key-value cache; asleep, a no-op.

        Requests in flight and new ones wait; after waking up the former are prefilled again.
        Raises PolicyFailedError: an engine could not; the server ends.
        """
        async with self._lock:
            if self._failure is not None:
                raise PolicyFailedError(self._failure)
            if not self.asleep:
                try:  # before: an engine that cannot give up its blocks yet would find others asleep
                    await asyncio.wait_for(self._pause(clear=True), PHASE_TIMEOUT_S)
                except Exception as error:
                    raise self._given_up(f"pausing before sleep failed: {error!r}") from error
                await self._move("sleep", 1, "keep")
                self.asleep = True
            return {"version": self.version, "asleep": True}

    async def wake_up(self) -> dict[str, Any]:
        """Take the memory back and go on with the version as it was; awake, a no-op.
        Raises PolicyFailedError: an engine could not; the server ends."""
        async with self._lock:
            if self._failure is not None:
                raise PolicyFailedError(self._failure)
            await self._wake()
            return {"version": self.version, "asleep": False}

    async def _wake(self) -> None:
        """Wake engines that sleep. The lock is held."""
        if self.asleep:
            await self._move("wake_up", None)
            self.asleep = False

    async def _move(self, method: str, *args: Any) -> None:
        """Have every engine give up memory or take it; where one fails nobody knows what the others hold."""
        try:
            await asyncio.wait_for(self._engine.engine_core.call_utility_all_async(method, *args), PHASE_TIMEOUT_S)
        except Exception as error:
            raise self._given_up(f"{method} of the engines failed: {type(error).__name__}: {error}") from error

    def _given_up(self, reason: str) -> PolicyFailedError:
        """Have the server end, and return what to raise where an error is being handled."""
        self._failure = reason
        logger.exception("the engines cannot be trusted any more")
        self._on_failure(reason)
        return PolicyFailedError(reason)

    async def _load(self, received: Received, version: int, check_s: float) -> dict[str, Any]:
        """Open everywhere, pause, load everywhere, label, resume."""
        if self._failure is not None:
            raise PolicyFailedError(self._failure)
        start = time.perf_counter()
        num_bytes = await asyncio.to_thread(read_ahead, weight_files(received.folder))
        read_s = time.perf_counter() - start
        await self._open(received)
        open_s = time.perf_counter() - start - read_s

        async def load() -> Loaded:
            return Loaded(version, received.published, received.digest, await self._on_every_worker("policy_apply"))

        loaded, paused_s = await self._while_paused(load, f"version {version} from {received.published}")
        logger.info(
            "policy version %d from %s: read %.2f GB in %.3f s, paused %.3f s, %d workers",
            version, received.published, num_bytes / 1e9, read_s, paused_s, len(loaded.rows),
        )  # fmt: skip
        return self._answer(changed=True, check=check_s, read=read_s, open=open_s, paused=paused_s)

    async def _open(self, received: Received) -> None:
        """Have every worker open a version's files."""
        opened = await self._on_every_worker("policy_open", str(received.published), received.transport)
        failed = [row for row in opened if "error" in row]
        if failed:
            kind = UnavailableError if all(row["may_pass"] for row in failed) else BadVersionError
            count, first = f"{len(failed)} of {len(opened)} workers", failed[0]
            raise kind(f"{received.published} cannot be read by {count}: {first['rank']}: {first['error']}")
        deadline = time.monotonic() + STAGE_S
        while not all(row["is_staged"] for row in opened) and time.monotonic() < deadline:
            await asyncio.sleep(STAGE_LOOK_S)
            opened = await self._on_every_worker("policy_staged")

    async def _receive_over(self, network: NetworkUpdates, offer: Offer, check_s: float) -> dict[str, Any]:
        """Pause, have the trainer's ranks send a version that they hold, label, resume.
        Raises UnavailableError: the transfer broke off; a whole version was loaded instead."""
        broken = ""

        async def receive() -> Loaded:
            nonlocal broken
            try:
                return Loaded(offer.version, offer.folder, offer.digest, await network.receive(offer))
            except TransferError as error:
                broken = str(error)
                logger.warning("version %d broke off, a whole one is loaded instead: %s", offer.version, broken)
                await network.leave()
                await self._on_every_worker("policy_abandon")
                return await self._load_whole(offer)

        loaded, paused_s = await self._while_paused(receive, f"version {offer.version} from the trainer")
        if loaded.version != offer.version:
            raise UnavailableError(f"version {offer.version} broke off ({broken}); serving version {loaded.version}")
        logger.info(
            "policy version %d over the network: paused %.3f s, %d workers", offer.version, paused_s, len(loaded.rows)
        )
        return self._answer(changed=True, check=check_s, paused=paused_s)

    async def _load_whole(self, offer: Offer) -> Loaded:
        """Load the newest version that lies in files, or the base model, into engines whose weights are undefined."""
        paths = RunPaths(offer.folder.parents[1])
        version = await asyncio.to_thread(newest_with_weights, paths)
        if version is not None:
            received = await self._receive(paths.weights_step(version), version)
        else:
            version, received = BASE_VERSION, self._base()
        await self._open(received)
        return Loaded(version, received.published, received.digest, await self._on_every_worker("policy_apply"))

    async def _while_paused(self, load: Callable[[], Awaitable[Loaded]], what: str) -> tuple[Loaded, float]:
        """Pause, load, label, resume; returns what was loaded, and the seconds of the pause."""
        paused_at = time.perf_counter()
        try:
            if self.asleep:  # and so paused; without a cache there is room for what loading takes
                await self._move("wake_up", ["weights"])
            else:
                await asyncio.wait_for(self._pause(clear=not self._keep_kv_cache), PHASE_TIMEOUT_S)
            try:
                loaded = await load()
                await self._engine.update_weight_version(str(loaded.version))
                self._num_loads += 1
            except BaseException as error:
                # Not resumed below: tokens of undefined weights must never carry a version's name.
                self._failure = f"loading {what} failed: {type(error).__name__}: {error}"
                raise
            finally:
                if self._failure is None and self.asleep:
                    await self._move("wake_up", ["kv_cache"])  # all is awake: the engine resumes by itself
                    self.asleep = False
                elif self._failure is None:
                    await asyncio.wait_for(self._engine.resume_generation(), PHASE_TIMEOUT_S)
        except Exception as error:
            raise self._given_up(self._failure or f"pausing or resuming for {what} failed: {error!r}") from error
        self._note(loaded.version, loaded.folder, loaded.digest)
        return loaded, time.perf_counter() - paused_at

    @contextlib.asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Pause engines that compute their steps together, and change nothing: of a mixture of experts."""
        num_engines = self._engine.vllm_config.parallel_config.data_parallel_size
        if self.asleep or num_engines == 1 or not self._engine.model_config.is_moe:
            yield
            return
        try:
            await asyncio.wait_for(self._pause(clear=False), PHASE_TIMEOUT_S)
            try:
                yield
            finally:
                await asyncio.wait_for(self._engine.resume_generation(), PHASE_TIMEOUT_S)
        except TransferError:
            raise
        except Exception as error:
            raise self._given_up(f"joining the trainer failed: {error!r}") from error

    async def _pause(self, *, clear: bool) -> None:
        """vLLM's `pause_generation(mode="keep")` without the 20 ms that it sleeps for the order of answers: an engine
        labels itself what it samples, so an answer that arrives later still has the old version.

        `clear`: without the key-value cache."""
        if clear:
            await self._engine.renderer.clear_mm_cache_async()
        for tries_left in reversed(range(PAUSE_TRIES)):
            try:
                # also empties what was offloaded (`inference.kv_offload_gib`): vLLM's `_reset_caches`
                await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear)
                return
            except Exception as error:
                # requests whose blocks come back from host memory keep them, and come on only while others do
                if _BLOCKS_IN_USE not in str(error) or not tries_left:
                    raise
                await self._engine.resume_generation()
                await asyncio.sleep(PAUSE_AGAIN_S)

    def _share_within_version(self) -> None:
        """Let requests share the cache of a common prefix, and the embeddings of an image, only with those that came
        under the same weights: new ones must not begin with keys and values of weights that are gone, nor of a version
        that a run has made anew."""
        core = self._engine.engine_core
        add = core.add_request_async

        async def add_request_async(request: Any) -> None:
            request.cache_salt = f"{self._num_loads} {request.cache_salt or ''}"
            request.mm_features = [  # replaced: the requests of one with `n` share them
                replace(feature, identifier=f"{self._num_loads} {feature.identifier}")
                for feature in request.mm_features or ()
            ] or None
            await add(request)

        core.add_request_async = add_request_async

    async def _on_every_worker(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """Results of all workers of all engines (vLLM's own `collective_rpc` returns those of one engine)."""
        calls = self._engine.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        engines = await asyncio.wait_for(calls, PHASE_TIMEOUT_S)
        return [row for engine in engines for row in engine]
