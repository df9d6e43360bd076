"""A server's updates over the network, and what may go wrong with them (`tests.support.network_world`)."""

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from prime_hpc.inference import check_version
from prime_hpc.inference.check_version import BadVersionError
from prime_hpc.inference.policy import PolicyFailedError, UnavailableError
from prime_hpc.inference.vllm import adapters, network_updates, server, weight_updates
from prime_hpc.inference.vllm.network_updates import read_offer
from prime_hpc.inference.vllm.weight_updates import PolicyService
from prime_hpc.trainer.weights.publish_async import BesidePublisher
from prime_hpc.weight_transport.network import group as network_group
from prime_hpc.weight_transport.network import sender as network_sender
from tests.support.network_world import Engine, Worker, World, open_world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with open_world(tmp_path, monkeypatch) as opened:
        yield opened


def test_weights_do_not_change_behind_a_connector_that_cannot_be_emptied(tmp_path: Path) -> None:
    engine: Any = Engine(tmp_path)
    engine.vllm_config.kv_transfer_config = SimpleNamespace(kv_connector="LMCacheMPConnector")
    service = PolicyService(engine, SimpleNamespace(), None, lambda reason: None)
    with pytest.raises(BadVersionError, match="LMCacheMPConnector would keep keys and values of other weights"):
        asyncio.run(service.update(str(tmp_path / "step_000001"), 1))
    assert engine.said == []


def test_a_kept_cache_shares_nothing_of_older_weights_with_new_requests(tmp_path: Path) -> None:
    """Neither blocks of a common prompt nor embeddings of a common image, which vLLM keeps by its content alone."""
    engine: Any = Engine(tmp_path)
    sent: list[tuple[str, str]] = []

    async def add(request: Any) -> None:
        sent.append((request.cache_salt, request.mm_features[0].identifier))

    engine.engine_core.add_request_async = add
    service = PolicyService(engine, SimpleNamespace(), None, lambda reason: None, keep_kv_cache=True)
    service._share_within_version()
    image: Any = MultiModalFeatureSpec(None, "image", "picture", PlaceholderRange(offset=0, length=4), "picture")
    for loads in (0, 0, 1):
        service._num_loads = loads
        asyncio.run(engine.engine_core.add_request_async(SimpleNamespace(cache_salt=None, mm_features=[image])))
    assert sent[0] == sent[1] and not set(sent[0]) & set(sent[2])
    assert image.identifier == image.mm_hash == "picture", "what other requests share has changed"


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


def test_a_version_that_a_run_makes_anew_is_loaded_anew(world: World) -> None:
    async def go() -> None:
        await world.service.start()
        for _ in range(2):
            expected = world.publish(1)
            for changes in (True, False):
                assert (await world.update(1))["changed"] == changes and world.serves(expected)
            shutil.rmtree(world.run.weights_step(1))
        assert not (await world.update(1))["changed"]  # what it serves is gone, or not to be read now

    asyncio.run(go())


def test_a_version_that_is_made_anew_while_the_one_before_is_loaded_is_loaded_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of the new one was noted for the old one, which was loaded, and served from then on."""
    label, newer = world.engine.update_weight_version, list[dict[str, Any]]()

    async def note(version: str) -> None:
        """All workers have loaded."""
        if version == "1" and not newer:
            shutil.rmtree(world.run.weights_step(1))
            world.publisher = world.new_publisher(incarnation=1)
            newer.append(world.publish(1))
        await label(version)

    async def go() -> None:
        await world.service.start()
        world.service._network = None
        world.publish(1)
        monkeypatch.setattr(world.engine, "update_weight_version", note)
        await world.update(1)
        assert (await world.update(1))["changed"] and world.serves(newer[0])
        assert not (await world.update(1))["changed"]

    asyncio.run(go())


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
    joins, join_s = Worker.policy_join, network_group.JOIN_S
    monkeypatch.setattr(network_group, "JOIN_S", 0.5)

    async def go() -> None:
        await world.service.start()
        monkeypatch.setattr(Worker, "policy_join", lambda worker, said: {"rank": "1", "error": "no way to the trainer"})
        for version in (1, 2):
            expected = world.publish(version)
            assert (await world.update(version))["version"] == version and world.serves(expected)
        assert world.engine.said[2:8] == ["policy_join", "policy_open", "pause", "policy_apply", "label 1", "resume"]
        monkeypatch.setattr(Worker, "policy_join", joins)
        monkeypatch.setattr(network_group, "JOIN_S", join_s)
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
    world.engine.model_config.is_moe = True
    if not can_join:
        monkeypatch.setattr(network_group, "JOIN_S", 0.5)
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
    over = threading.Event()

    async def go() -> None:
        await world.service.start()
        world.publish(1)
        monkeypatch.setattr(weight_updates, "PHASE_TIMEOUT_S", 0.2)
        monkeypatch.setattr(Worker, "policy_join", lambda worker, said: over.wait())
        with pytest.raises(PolicyFailedError, match="joining the trainer took longer than"):
            await world.update(1)
        over.set()
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


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, UnavailableError), (errno.ENOENT, BadVersionError)])
def test_a_header_that_cannot_be_read_now_is_asked_for_again(
    number: int, kind: type[Exception], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal would end the run."""
    for version in (1, 2):
        world.publish(version)

    def fail(path: Path, *_: Any) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    folder = world.run.weights_step(2)
    manifest = check_version.verify_version(folder, 2)
    monkeypatch.setattr(network_updates, "verify_version", lambda *_: manifest)
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(kind, match=f"cannot be had on this node: .*{os.strerror(number)}"):
        read_offer(folder, 2, None, False)


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
    service = adapters.AdapterService(engine, models, None)
    with pytest.raises(UnavailableError, match="was not loaded within"):
        asyncio.run(service.update("policy", tmp_path, 3))
    assert removed == [7] and service.served("policy") is None


def test_an_adapter_is_in_the_books_as_soon_as_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is cancelled while it reads its manifest leaves none in the engines that nobody would remove."""
    updates: list[asyncio.Task[Any]] = []
    loaded: list[int] = []

    async def load(request: Any) -> None:
        loaded.append(request.lora_int_id)

    def digest(folder: Path) -> None:
        if loaded:
            updates[0].get_loop().call_soon_threadsafe(updates[0].cancel)

    engine: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(lora_config=SimpleNamespace(max_cpu_loras=2, max_lora_rank=8)), add_lora=load
    )
    models = SimpleNamespace(lora_id_counter=SimpleNamespace(inc=lambda _: 7), lora_requests={})
    monkeypatch.setattr(adapters, "check_adapter", lambda *_: None)
    monkeypatch.setattr(adapters, "digest_of", digest)
    service = adapters.AdapterService(engine, models, None)

    async def go() -> None:
        updates.append(asyncio.create_task(service.update("policy", tmp_path, 3)))
        await asyncio.wait(updates)
        assert loaded == [7] and service.served("policy") == (3, str(tmp_path))

    asyncio.run(go())


def test_a_name_more_than_there_is_room_for_is_refused_and_no_version_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last name that found a place took that of the next versions, each of which was refused: all runs ended."""

    async def load(request: Any) -> None:
        pass

    engine: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(lora_config=SimpleNamespace(max_cpu_loras=3, max_lora_rank=8)),
        output_processor=SimpleNamespace(request_states={}),
        add_lora=load,
        remove_lora=load,
        abort=load,
    )
    numbers = iter(range(1, 99))
    models = SimpleNamespace(lora_id_counter=SimpleNamespace(inc=lambda _: next(numbers)), lora_requests={})
    monkeypatch.setattr(adapters, "check_adapter", lambda *_: None)
    monkeypatch.setattr(adapters, "digest_of", lambda _: None)
    service = adapters.AdapterService(engine, models, None)

    async def go() -> None:
        for name in ("run_a", "run_b"):
            await service.update(name, tmp_path, 1)
        with pytest.raises(
            BadVersionError, match=r"run_c finds no place among the 3 .*\['run_a', 'run_b'\] are served"
        ):
            await service.update("run_c", tmp_path, 1)
        for version in (2, 3, 4):
            for name in ("run_a", "run_b"):
                await service.update(name, tmp_path, version)
        assert service.versions() == {"run_a": 4, "run_b": 4}

    asyncio.run(go())


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
