"""A server's updates over the network: a real sender, links and groups; engines whose workers only keep what comes."""

import asyncio
import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from prime_hpc.config.sections.weights import WeightsConfig
from prime_hpc.inference.check_version import BadVersionError
from prime_hpc.inference.policy import PolicyFailedError, UnavailableError
from prime_hpc.inference.vllm import adapters, server, weight_updates
from prime_hpc.inference.vllm.network_updates import read_offer
from prime_hpc.inference.vllm.transfer_engine import DTYPES
from prime_hpc.inference.vllm.weight_updates import PolicyService
from prime_hpc.runtime.role_context import BUS
from prime_hpc.store.artifact import Manifest, commit_stage, prepare_stage
from prime_hpc.store.io import files as store_files
from prime_hpc.store.messaging import sockets
from prime_hpc.store.model.files import INDEX, stored_tensors
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.model.conversions import Piece, WeightMap
from prime_hpc.trainer.weights.publish import Publisher
from prime_hpc.trainer.weights.publish_async import BesidePublisher
from prime_hpc.trainer.weights.safetensors_layout import SafetensorsLayout, TensorSpec
from prime_hpc.weight_transport.network import group as network_group
from prime_hpc.weight_transport.network import sender as network_sender
from prime_hpc.weight_transport.network.group import BUCKET_S, CONTAINED, Group, connect
from prime_hpc.weight_transport.network.layout import buckets, read_layout
from prime_hpc.weight_transport.network.sender import NetworkSender
from prime_hpc.weight_transport.transport import Place, VersionForm, WholeFile

NUM_WORKERS = 2


class Worker:
    """One worker: its "model" is the tensors that it was given last."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.groups: list[Any] = []
        self.files: list[Any] = []
        self.model: dict[str, torch.Tensor] = {}
        self.breaks = False

    def policy_start(self) -> None:
        """Nothing."""

    def policy_join(self, said: dict[str, Any]) -> dict[str, Any]:
        cpu = torch.device("cpu")
        self.groups = [
            Group(
                connect(w["host"], w["port"]),
                w["name"],
                1 + self.rank,
                said["size"],
                said["backend"],
                w["host"],
                cpu,
            )
            for w in said["groups"]
        ]
        for group in self.groups:
            group.connect()
        return {"rank": str(self.rank)}

    def policy_receive(self, part: dict[str, Any], is_first: bool, is_last: bool) -> dict[str, Any]:
        if is_first:
            self.model = {}
        for bucket in buckets(read_layout(Path(part["layout"]))):
            first = bucket[0].begin
            values = torch.empty(bucket[-1].end - first, dtype=torch.uint8)
            self.groups[part["index"]].broadcast(values)
            for entry in bucket:
                tensor = values[entry.begin - first : entry.end - first].view(DTYPES[entry.dtype]).view(entry.shape)
                self.model[entry.name] = tensor
        return {"rank": str(self.rank)} | ({"error": "gone"} if self.breaks else {})

    def policy_abandon(self) -> dict[str, Any]:
        self.model = {}
        return {"rank": str(self.rank)}

    def policy_open(self, folder: str, transport: str) -> dict[str, Any]:
        self.files = sorted(Path(folder).glob("*.safetensors"))
        return {"rank": str(self.rank), "is_staged": True}

    def policy_apply(self) -> dict[str, Any]:
        self.model = {name: tensor for file in self.files for name, tensor in load_file(file).items()}
        return {"rank": str(self.rank)}


class Engine:
    """vLLM's client, as far as updates need it."""

    def __init__(self, model: Path) -> None:
        self.workers = [Worker(rank) for rank in range(NUM_WORKERS)]
        self.said: list[str] = []
        self.num_busy = 0
        self._pool = ThreadPoolExecutor(NUM_WORKERS)
        text = SimpleNamespace(tie_word_embeddings=False)
        self.model_config = SimpleNamespace(hf_text_config=text, model=str(model), is_moe=False)
        self.vllm_config = SimpleNamespace(
            weight_transfer_config=SimpleNamespace(backend="prime_hpc"),
            lora_config=None,
            parallel_config=SimpleNamespace(data_parallel_size=NUM_WORKERS),
        )
        self.engine_core = self.renderer = self

    async def call_utility_all_async(self, method: str, name: str, timeout: Any, args: Any, kwargs: Any) -> Any:
        self.said.append(name)
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(self._pool, getattr(worker, name), *args) for worker in self.workers]
        return [[row] for row in await asyncio.gather(*calls)]

    async def update_weight_version(self, version: str) -> None:
        self.said.append(f"label {version}")

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.said.append("pause")
        if self.num_busy:
            self.num_busy -= 1
            raise RuntimeError("Failed to reset KV cache even when all the running requests are preempted")

    async def resume_generation(self) -> None:
        self.said.append("resume")

    async def clear_mm_cache_async(self) -> None:
        """Nothing is cached."""


class World:
    """A trainer of one rank, and a server."""

    def __init__(self, root: Path) -> None:
        self.root, self.run = root, RunPaths(root / "run")
        base = root / "base"
        base.mkdir()
        generator = torch.Generator().manual_seed(0)
        shapes = {"w": (33, 7), "x": (5,), "y": (40, 16)}
        self.tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        save_file(self.tensors, base / "model.safetensors")
        (base / "config.json").write_text("{}", encoding="utf-8")
        self.base = base
        self.publisher = self.new_publisher()
        self.engine = Engine(base)
        self.failures: list[str] = []
        engine: Any = self.engine
        self.service = PolicyService(engine, SimpleNamespace(), base, self.failures.append)

    def new_publisher(self, incarnation: int = 0) -> Publisher:
        stored = stored_tensors(self.base)
        weights = WeightMap(stored, {name: [Piece.whole(name, tensor.shape)] for name, tensor in stored.items()})
        policy: Any = SimpleNamespace(named_weights=lambda: list(self.tensors.items()), weights=weights)
        return Publisher(
            policy,
            self.base,
            self.run,
            dtype=torch.float32,
            incarnation=incarnation,
            model_name="ours",
            weights=WeightsConfig(transport="gloo"),
        )

    def publish(self, version: int) -> dict[str, torch.Tensor]:
        for tensor in self.tensors.values():
            tensor += 1.5
        self.publisher.publish(version)
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    async def update(self, version: int) -> dict[str, Any]:
        return await self.service.update(str(self.run.weights_step(version)), version)

    def serves(self, expected: dict[str, torch.Tensor]) -> bool:
        return all(
            worker.model.keys() == expected.keys()
            and all(torch.equal(worker.model[name], tensor) for name, tensor in expected.items())
            for worker in self.engine.workers
        )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv(BUS, "the-secret-of-the-job@127.0.0.1:1")
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(tmp_path)
    finally:
        dist.destroy_process_group()


def test_weights_do_not_change_behind_a_connector_that_cannot_be_emptied(tmp_path: Path) -> None:
    engine: Any = Engine(tmp_path)
    engine.vllm_config.kv_transfer_config = SimpleNamespace(kv_connector="LMCacheMPConnector")
    service = PolicyService(engine, SimpleNamespace(), None, lambda reason: None)
    with pytest.raises(BadVersionError, match="LMCacheMPConnector would keep keys and values of other weights"):
        asyncio.run(service.update(str(tmp_path / "step_000001"), 1))
    assert engine.said == []


def test_versions_come_paused_and_joined_once(world: World) -> None:
    async def go() -> None:
        await world.service.start()
        for version in (1, 2, 3):
            expected = world.publish(version)
            assert (world.run.weights_step(version) / "model.safetensors").exists() == (version == 1)
            answer = await world.update(version)
            assert answer["version"] == version and answer["changed"] and answer["seconds"]["paused"] > 0
            assert world.serves(expected)
            assert not (await world.update(version))["changed"]

    asyncio.run(go())
    once = ["policy_receive", "label {}", "resume"]
    assert world.engine.said[2:] == [
        "policy_join",
        *(word.format(version) for version in (1, 2, 3) for word in ("pause", *once)),
    ]


def test_a_version_that_broke_off_is_a_whole_one_instead_and_then_joins_anew(world: World) -> None:
    async def go() -> None:
        await world.service.start()
        first = world.publish(1)
        await world.update(1)
        expected = world.publish(2)
        world.engine.workers[1].breaks = True
        with pytest.raises(UnavailableError, match="version 2 broke off .*serving version 1"):
            await world.update(2)
        assert world.service.version == 1 and world.serves(first) and world.engine.said[-1] == "resume"
        assert world.engine.said[-5:-1] == ["policy_abandon", "policy_open", "policy_apply", "label 1"]
        world.engine.workers[1].breaks = False
        assert (await world.update(2))["version"] == 2 and world.serves(expected)
        assert world.engine.said.count("policy_join") == 2
        assert not world.failures

    asyncio.run(go())


def test_a_server_that_cannot_join_is_not_paused_for_it_and_gets_whole_versions(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run stands still for ever: no server has a version that lies in no files, and no batch for a next one."""
    monkeypatch.setattr(network_group, "JOIN_S", 0.5)
    joins = Worker.policy_join

    async def go() -> None:
        await world.service.start()
        monkeypatch.setattr(Worker, "policy_join", lambda worker, said: {"rank": "1", "error": "no way to the trainer"})
        for version in (1, 2):
            expected = world.publish(version)
            assert (await world.update(version))["version"] == version and world.serves(expected)
        assert world.engine.said[2:8] == ["policy_join", "policy_open", "pause", "policy_apply", "label 1", "resume"]
        monkeypatch.setattr(Worker, "policy_join", joins)
        for version in (3, 4):
            expected = world.publish(version)
            assert (await world.update(version))["version"] == version and world.serves(expected)
            assert (world.run.weights_step(version) / "model.safetensors").exists() == (version == 3)

    asyncio.run(go())


@pytest.mark.parametrize("can_join", [True, False])
def test_engines_that_compute_together_stand_still_while_they_join(
    can_join: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a mixture of experts: one would wait for another's join, which waits in a step for the first one."""
    monkeypatch.setattr(network_group, "JOIN_S", 0.5)
    world.engine.model_config.is_moe = True
    if not can_join:
        monkeypatch.setattr(Worker, "policy_join", lambda worker, said: {"rank": "1", "error": "no way"})

    async def go() -> None:
        await world.service.start()
        expected = world.publish(1)
        assert (await world.update(1))["version"] == 1 and world.serves(expected)
        loads = ["pause", "policy_receive"] if can_join else ["policy_open", "pause", "policy_apply"]
        assert world.engine.said[2:] == ["pause", "policy_join", "resume", *loads, "label 1", "resume"]

    asyncio.run(go())


def test_a_join_that_never_ends_ends_the_server(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may wait for ever for a way that a firewall closes, and the engines with it, as if they were paused."""
    monkeypatch.setattr(network_group, "JOIN_S", 0.5)

    async def go() -> None:
        await world.service.start()
        world.publish(1)
        monkeypatch.setattr(weight_updates, "PHASE_TIMEOUT_S", 0.2)
        monkeypatch.setattr(Worker, "policy_join", lambda worker, said: time.sleep(0.6))
        with pytest.raises(PolicyFailedError, match="joining the trainer took longer than"):
            await world.update(1)
        assert len(world.failures) == 1 and "pause" not in world.engine.said

    asyncio.run(go())


def test_without_any_whole_version_the_base_model_stands_in(world: World) -> None:
    async def go() -> None:
        await world.service.start()
        world.publish(1)
        world.publish(2)
        for file in world.run.weights_step(1).iterdir():
            file.unlink()
        world.run.weights_step(1).rmdir()
        world.engine.workers[0].breaks = True
        with pytest.raises(UnavailableError, match="serving version 0"):
            await world.update(2)
        assert world.serves(load_file(world.base / "model.safetensors")) and not world.failures

    asyncio.run(go())


def test_nothing_is_paused_for_what_the_trainer_no_longer_has(world: World) -> None:
    async def go() -> None:
        await world.service.start()
        world.publish(1)
        world.publish(2)
        world.publish(3)
        for version in (2, 2):
            with pytest.raises(UnavailableError, match="has another version by now"):
                await world.update(version)
        assert (await world.update(1))["seconds"]["read"] >= 0  # which lies in files
        assert world.engine.said.count("pause") == 1
        world.publisher.sender.close()  # type: ignore[attr-defined]
        with pytest.raises(UnavailableError):
            await world.update(3)
        assert world.service.version == 1 and not world.failures

    asyncio.run(go())


def test_another_attempt_is_joined_anew_and_its_first_version_is_whole(world: World) -> None:
    async def go() -> None:
        await world.service.start()
        world.publish(1)
        await world.update(1)
        world.publisher = world.new_publisher(incarnation=0)
        expected = world.publish(2)
        assert (world.run.weights_step(2) / "model.safetensors").exists()
        await world.update(2)
        assert world.serves(expected) and world.engine.said.count("policy_join") == 2

    asyncio.run(go())


def test_what_is_no_version_of_this_model_is_refused(world: World) -> None:
    async def go() -> None:
        await world.service.start()
        world.publish(1)
        world.publish(2)
        header = world.run.weights_step(2) / "model.safetensors.header"
        header.write_bytes(header.read_bytes()[:-40])
        with pytest.raises(BadVersionError):
            await world.update(2)
        assert "pause" not in world.engine.said

    asyncio.run(go())


def test_the_next_version_waits_for_who_holds_this_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_sender, "HOLD_S", 0.2)

    async def go() -> None:
        await world.service.start()
        world.publish(1)
        world.publish(2)
        network = world.service._network
        assert network is not None
        offer = read_offer(world.run.weights_step(2), 2, None, False)
        assert offer is not None
        await network.prepare(offer)  # and never says that it has it
        expected = await asyncio.to_thread(world.publish, 3)  # not for ever
        await world.update(3)  # was cut off, joins anew
        assert world.serves(expected)

    asyncio.run(go())


def test_versions_that_are_published_beside_the_next_step(world: World) -> None:
    async def go() -> None:
        await world.service.start()
        told: list[int | None] = []
        beside = BesidePublisher(world.publisher, lambda manifest: told.append(manifest.version), timeout_s=60.0)
        for version in (1, 2, 3):
            expected = {name: tensor.clone() for name, tensor in world.tensors.items()}
            beside.begin(version)
            for tensor in world.tensors.values():
                tensor += 1.5
            await asyncio.to_thread(beside.finish)
            await world.update(version)
            assert world.serves(expected)
        assert told == [1, 2, 3]

    asyncio.run(go())


def test_a_pause_waits_for_blocks_that_come_back_from_host_memory(world: World) -> None:
    async def go() -> None:
        await world.service.start()
        expected = world.publish(1)
        world.engine.num_busy = 2
        await world.update(1)
        assert world.serves(expected) and not world.failures
        assert world.engine.said[2:7] == ["policy_join", *["pause", "resume"] * 2][:5]

    asyncio.run(go())


@pytest.mark.parametrize(("may_pass", "kind"), [([True, True], UnavailableError), ([True, False], BadVersionError)])
def test_a_version_that_workers_cannot_read_is_refused_only_where_it_is_at_fault(
    may_pass: list[bool], kind: type[Exception], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(worker: Worker, folder: str, transport: str) -> dict[str, Any]:
        return {"rank": str(worker.rank), "error": "no", "may_pass": may_pass[worker.rank]}

    async def go() -> None:
        await world.service.start()
        world.publish(1)
        world.publisher.sender.close()  # type: ignore[attr-defined]
        monkeypatch.setattr(Worker, "policy_open", fails)
        with pytest.raises(kind, match="cannot be read by 2 of 2 workers: 0: no"):
            await world.update(1)
        assert "pause" not in world.engine.said and not world.failures

    asyncio.run(go())


def test_an_adapter_that_engines_load_too_late_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared file system that hangs is waited for; a refusal would end the run."""
    removed: list[int] = []

    async def load(request: Any) -> None:
        await asyncio.sleep(30)

    async def unload(number: int) -> None:
        removed.append(number)

    engine: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(lora_config=SimpleNamespace(max_cpu_loras=2, max_lora_rank=8)),
        add_lora=load,
        remove_lora=unload,
    )
    models = SimpleNamespace(lora_id_counter=SimpleNamespace(inc=lambda _: 7), lora_requests={})
    monkeypatch.setattr(adapters, "LOAD_TIMEOUT_S", 0.05)
    monkeypatch.setattr(adapters, "check_adapter", lambda *_: None)
    service = adapters.AdapterService(engine, models, lambda: None)
    with pytest.raises(UnavailableError, match="was not loaded within"):
        asyncio.run(service.update("policy", tmp_path, 3))
    assert removed == [7] and service.served("policy") is None


def test_sleep_waits_for_blocks_that_come_back_from_host_memory(world: World) -> None:
    """No engine sleeps before all have paused: what resumed one that sleeps would have it compute without memory."""
    calls, engine = world.engine.call_utility_all_async, world.engine

    async def call(method: str, *args: Any) -> Any:
        if method != "sleep":
            return await calls(method, *args)
        if engine.num_busy:
            raise RuntimeError("Failed to reset KV cache even when all the running requests are preempted")
        return engine.said.append(method)

    engine.call_utility_all_async = call  # type: ignore[method-assign, assignment]

    async def go() -> None:
        await world.service.start()
        engine.num_busy = 2
        assert (await world.service.sleep())["asleep"] and not world.failures
        assert engine.said[2:] == ["pause", "resume", "pause", "resume", "pause", "sleep"]

    asyncio.run(go())


def test_engines_that_die_end_the_server(world: World) -> None:
    async def go() -> None:
        await world.service.start()
        world.publish(1)
        world.publish(2)

        def dies(*_: Any) -> None:
            raise RuntimeError("engine core died")

        world.engine.workers[0].policy_receive = dies  # type: ignore[method-assign, assignment]
        with pytest.raises(PolicyFailedError, match="engine core died"):
            await world.update(2)
        assert len(world.failures) == 1 and "resume" not in world.engine.said

    asyncio.run(go())


@pytest.mark.parametrize(
    ("failed", "codes", "told"),
    [
        ("EngineCore_DP1", {"EngineCore_DP1": -9, "EngineCore_DP0": -15}, " (EngineCore_DP1 was killed by signal 9)"),
        ("EngineCore_DP0", {"EngineCore_DP0": 1}, ""),  # it has said why
        (None, {}, ""),
    ],
)
def test_an_engine_that_was_killed_is_named_with_its_signal(
    failed: str | None, codes: dict[str, int], told: str
) -> None:
    manager = SimpleNamespace(failed_proc_name=failed, finished_procs=lambda: codes)
    engine: Any = SimpleNamespace(errored=True, engine_core=SimpleNamespace())
    serving: Any = None
    assert server._problem(engine, serving) == "an engine process died; see its last lines above"
    engine.engine_core.resources = SimpleNamespace(engine_manager=manager)
    assert server._problem(engine, serving) == f"an engine process died{told}; see its last lines above"


class TwoRanks:
    """A process group of two threads, as far as senders need it."""

    def __init__(self) -> None:
        self._barrier, self._local = threading.Barrier(2, timeout=20.0), threading.local()
        self._said: list[Any] = [None, None]

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return 2

    def all_gather_object(self, every: list[Any], own: Any) -> None:
        self._said[self._local.rank] = own
        self._barrier.wait()
        every[:] = self._said

    def senders(self) -> list[NetworkSender]:
        names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

        def build(rank: int) -> NetworkSender:
            self._local.rank = rank
            layout = SafetensorsLayout([TensorSpec("ab"[rank], (4,), torch.float32)])
            file = WholeFile(names[rank], layout.size, layout.header, is_owned_here=True)
            return NetworkSender(WeightsConfig(transport="gloo"), [file], rank, "gloo")

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(build, (0, 1)))


def publish_parts(senders: list[NetworkSender], run: RunPaths, version: int) -> Manifest:
    """Publish a version of two files, as `Publisher` does."""
    final = run.weights_step(version)
    stage = prepare_stage(final, 0, run=run)
    form, sealed = senders[0].plan(version), []
    for sender, name in zip(senders, "ab", strict=True):
        layout = SafetensorsLayout([TensorSpec(name, (4,), torch.float32)])
        with contextlib.ExitStack() as stack:
            sender.open(form, stage, stack)
            sender.write(Place(sender._own.name, layout.offset(name), 4), torch.arange(4.0).numpy().view("u1"))  # type: ignore[union-attr]
            sealed.append(sender.finalize())
    entries = {name: entry for part, _ in sealed for name, entry in part.items()}
    if form.is_whole:
        weight_map = {name: sender._own.name for sender, name in zip(senders, "ab", strict=True)}  # type: ignore[union-attr]
        entries[INDEX] = store_files.write_file(stage / INDEX, [json.dumps({"weight_map": weight_map}).encode()])
    manifest = Manifest("weights", version, version, "t", 0, entries, senders[0].meta([fact for _, fact in sealed]))
    manifest = commit_stage(stage, final, manifest, run=run)
    senders[0].sent(manifest)
    return manifest


@pytest.mark.parametrize("num_ports", [1, 2])
def test_a_rank_without_a_socket_makes_all_versions_files(
    num_ports: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen, left = sockets.listen, [None] * num_ports

    def listen_while_there_are_ports(host: str, **options: Any) -> Any:
        if not left:
            raise OSError("no port of network.port_range is free")
        left.pop()
        return listen(host, **options)

    monkeypatch.setattr(sockets, "listen", listen_while_there_are_ports)
    monkeypatch.setattr(network_sender, "dist", TwoRanks())
    monkeypatch.setenv(BUS, "the-secret-of-the-job@127.0.0.1:1")
    senders, run = network_sender.dist.senders(), RunPaths(tmp_path)  # type: ignore[attr-defined]
    for version in (1, 2):
        manifest = publish_parts(senders, run, version)
        offer = read_offer(run.weights_step(version), version, {"a": (4,), "b": (4,)}, False)
        if num_ports == 2:
            assert offer is not None and len(offer.sent.parts) == 2 and offer.is_whole == (version == 1)
        else:
            assert offer is None and INDEX in manifest.files and len(manifest.files) == 3
    for sender in senders:
        assert bool(sender.address) == (num_ports == 2)
        sender.close()


def test_a_version_that_lacks_a_part_is_not_offered(world: World) -> None:
    sender = world.publisher.sender
    world.publish(1)
    facts = {"file": "model.safetensors", "address": "127.0.0.1:1", "size": 9, "xxh3": "0"}
    assert "network" in sender.meta([facts, {}])  # a rank that owns no file
    assert sender.meta([facts, {"not sent": "model-2.safetensors"}]) == {} == sender.meta([{}, {}])


def test_an_image_for_gpus_takes_its_exact_size(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torch's own page-locked memory takes the next power of two."""
    registered: list[int] = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: registered.append(size) or 0,  # type: ignore[func-returns-value]
        cudaHostUnregister=lambda address: None,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    file = WholeFile("model.safetensors", 70_001, b"a header", is_owned_here=True)
    sender = NetworkSender(WeightsConfig(transport="nccl"), [file], 0, "nccl")
    with contextlib.ExitStack() as stack:
        sender.open(VersionForm(is_whole=False), tmp_path, stack)
    assert sender._image is not None and sender._image.untyped_storage().nbytes() == 70_001 == registered[0]
    sender.close()


def test_a_group_of_gpus_outlives_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog ends a process, by default, when a peer is gone or an operation takes longer than the group's
    timeout: of the trainer, when an engine dies, and the other way round."""
    made: list[Any] = []

    class Nccl:
        class Options:
            pass

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self.options, self.environ = options, {name: os.environ.get(name) for name in CONTAINED}
            made.append(self)

        def broadcast(self, tensors: Any, options: Any) -> Any:
            return SimpleNamespace(wait=lambda: None)

        def abort(self) -> None:
            self.environ["aborted"] = "yes"

    def stop(_: torch.device) -> None:
        raise RuntimeError("a bucket did not arrive")

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    store: Any = dist.HashStore()
    made_here = Group(store, "g", 0, 2, "nccl", "127.0.0.1", torch.device("cuda", 1))
    assert made[0].environ == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert made[0].options._timeout.total_seconds() > BUCKET_S
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1" and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    monkeypatch.setattr(network_group, "_await_device", stop)
    with pytest.raises(RuntimeError):
        made_here.broadcast(torch.ones(1))
    assert made[0].environ["aborted"] == "yes"


def test_a_group_of_gpus_is_connected_by_a_byte_when_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects in the first operation, in a call that waits for who has not come for ever."""
    said: list[Any] = []

    class Nccl:
        class Options:
            pass

        def __init__(self, *_: Any) -> None:
            said.append("made")

        def broadcast(self, tensors: Any, options: Any) -> Any:
            said.append(tensors[0].nbytes)
            return SimpleNamespace(wait=lambda: None)

        def abort(self) -> None:
            said.append("aborted")

    @contextlib.contextmanager
    def beside(group: Group) -> Iterator[None]:
        said.append("beside")
        yield

    monkeypatch.setattr(network_group, "JOIN_S", 0.2)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(Group, "beside", beside)
    store: Any = dist.HashStore()
    cpu = torch.device("cpu")
    sender = Group(store, "g", 0, 2, "nccl", "127.0.0.1", cpu)
    with pytest.raises(RuntimeError, match="(?i)wait timeout"):
        sender.connect()
    assert said == ["made", "aborted"]
    said.clear()
    members = [Group(store, "h", rank, 2, "nccl", "127.0.0.1", cpu) for rank in (0, 1)]
    for member in members:
        member.connect()
    assert said == ["made", "made", "beside", 1, "beside", 1]


def test_a_gpu_sends_on_a_stream_of_the_group(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on that of the training, where each bucket would wait for the step, and the step for each bucket."""
    said: list[Any] = []

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        said.append(stream)
        yield
        said.append("back")

    monkeypatch.setattr(torch.cuda, "set_device", said.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", on)
    made = Group.__new__(Group)
    made.device, made._stream = torch.device("cuda", 1), None
    with made.beside():
        said.append("sends")
    assert said == [made.device, "a stream of cuda:1", "sends", "back"]
    said.clear()
    world.publish(1)
    sender: Any = world.publisher.sender
    cpu, note = torch.device("cpu"), lambda _: said.append("a bucket")
    joined = SimpleNamespace(device=cpu, beside=lambda: on("its own"), broadcast=note)
    assert sender.hold("a server's connection", sender._sum)
    sender.send("a server's connection", joined)
    assert said == ["its own", "a bucket", "back"]


def test_groups_that_are_made_side_by_side_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of a trainer join at once, each in a thread of its own."""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    entered = threading.Event()

    def make() -> None:
        with network_group._stated(CONTAINED):
            entered.set()

    other = threading.Thread(target=make)
    with network_group._stated(CONTAINED):
        other.start()
        assert not entered.wait(0.2)
    other.join(30)
    assert entered.is_set() and "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
