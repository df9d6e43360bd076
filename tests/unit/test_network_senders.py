"""The trainer's side of updates over the network: what its ranks offer, and their groups with engines on GPUs."""

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.inference.vllm.network_updates import read_offer
from prime_hpc.runtime.role_context import BUS
from prime_hpc.store.artifact import commit_stage, prepare_stage
from prime_hpc.store.io import files as store_files
from prime_hpc.store.manifest import Manifest
from prime_hpc.store.messaging import sockets
from prime_hpc.store.model.files import INDEX
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.determinism import NCCL_VARIABLES
from prime_hpc.trainer.weights.safetensors_layout import SafetensorsLayout, TensorSpec
from prime_hpc.weight_transport.network import group as network_group
from prime_hpc.weight_transport.network import sender as network_sender
from prime_hpc.weight_transport.network.group import BUCKET_S, CONTAINED, Group
from prime_hpc.weight_transport.network.nccl import SHARED, read_again
from prime_hpc.weight_transport.network.sender import NetworkSender
from prime_hpc.weight_transport.transport import Place, VersionForm, WholeFile
from tests.support.network_world import World, open_world


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with open_world(tmp_path, monkeypatch) as opened:
        yield opened


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
    senders[0].hold(None, "")  # a server has joined
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


@pytest.mark.parametrize("left", [10**9, 100])
def test_a_rank_without_memory_for_its_share_makes_all_versions_files(
    left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_of = [left, 10**9]  # of the two ranks' nodes
    monkeypatch.setattr(network_sender, "available_bytes", lambda: left_of.pop())
    monkeypatch.setattr(network_sender, "dist", TwoRanks())
    monkeypatch.setenv(BUS, "the-secret-of-the-job@127.0.0.1:1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    senders, run = network_sender.dist.senders(), RunPaths(tmp_path)  # type: ignore[attr-defined]
    senders[0].hold(None, "")  # a server has joined
    for version in (1, 2):
        is_whole = INDEX in publish_parts(senders, run, version).files
        assert is_whole == (version == 1 or left == 100)
    for sender in senders:
        assert (sender._image is None) == (left == 100)
        sender.close()


def test_a_version_that_lacks_a_part_is_not_offered(world: World) -> None:
    sender = world.publisher.sender
    world.publish(1)
    facts = {"file": "model.safetensors", "address": "127.0.0.1:1", "size": 9, "xxh3": "0"}
    assert "network" in sender.meta([facts, {}])  # a rank that owns no file
    assert sender.meta([facts, {"not sent": "model-2.safetensors"}]) == {} == sender.meta([{}, {}])


def test_versions_are_whole_until_a_server_has_joined(world: World) -> None:
    """Where none can reach the trainer, nobody tells it: engines would wait for ever for what goes by network alone."""
    file: Any = world.publisher.sender._own  # type: ignore[attr-defined]
    sender = NetworkSender(WeightsConfig(transport="gloo"), [file], 0, "gloo")
    for version in (1, 2):
        form = sender.plan(version)
        assert form.is_whole
        sender._form = form
        sender.sent(Manifest("weights", version, version, "t", 0, {}, {}))
    sender.hold("a server's connection", "")  # type: ignore[arg-type]
    assert not sender.plan(3).is_whole
    sender.close()


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
    """The servers of a trainer join at once, each in a thread of its own, and none waits for another."""
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.setenv("NCCL_PROTO", "LL")
    stated = contextlib.ExitStack(), contextlib.ExitStack()
    for each in stated:
        each.enter_context(network_group._stated(CONTAINED | SHARED))
    stated[0].close()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0" and os.environ["NCCL_PROTO"] == SHARED["NCCL_PROTO"]
    stated[1].close()
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ and os.environ["NCCL_PROTO"] == "LL"
    assert not network_group._stated_before


class RecordingNccl:
    """NCCL as far as a group needs it; notes what it would read when it makes its communicator, in the first
    operation."""

    read: list[dict[str, str | None]]

    class Options:
        pass

    def __init__(self, *_: Any) -> None:
        self._is_connected = False

    def broadcast(self, tensors: Any, options: Any) -> Any:
        if not self._is_connected:
            self.read.append({name: os.environ.get(name) for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS")})
        self._is_connected = True
        return SimpleNamespace(wait=lambda: None)

    def abort(self) -> None:
        """Nothing is under way."""


def test_both_ends_of_a_group_read_the_same_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """`trainer.deterministic` states an algorithm and a protocol in the trainer alone, and vLLM's batch invariance
    another algorithm, and one channel, in engines alone: each end would wait for the other's protocol for ever."""
    from vllm.utils import nccl as vllm_nccl

    from prime_hpc.inference.vllm import transfer_engine

    monkeypatch.setattr(RecordingNccl, "read", [], raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", RecordingNccl, raising=False)
    monkeypatch.setattr(Group, "beside", lambda group: contextlib.nullcontext())
    for name in ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_NO_CACHE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    store: Any = dist.HashStore()
    store.set("g/here/1", "")
    with monkeypatch.context() as trainers:
        for name, value in NCCL_VARIABLES.items():
            trainers.setenv(name, value)
        Group(store, "g", 0, 2, "nccl", "127.0.0.1", torch.device("cpu")).connect()
    monkeypatch.setattr(vllm_nccl, "_unpinned_env", None)
    monkeypatch.setattr(vllm_nccl, "_nccl_has_no_cache", lambda: True)
    vllm_nccl.pin_nccl_env({"NCCL_PROTO": "LL", "NCCL_ALGO": "allreduce:tree", "NCCL_MAX_NCHANNELS": "1"})
    pinned = dict(os.environ)
    monkeypatch.setattr(transfer_engine, "connect", lambda host, port: store)
    engine: Any = object.__new__(transfer_engine.TransferEngine)
    engine.parallel_config = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    engine.device = torch.device("cpu")
    engine.init_transfer_engine(transfer_engine.JoinInfo("nccl", 2, [{"host": "127.0.0.1", "port": 1, "name": "g"}]))
    trainer, server = RecordingNccl.read
    assert trainer == server == {**SHARED, "NCCL_MAX_NCHANNELS": None}
    assert dict(os.environ) == pinned


def test_who_joins_a_group_has_nccl_read_its_variables_again() -> None:
    assert read_again({}) == {"NCCL_NO_CACHE": "NCCL_ALGO,NCCL_PROTO"}
    assert (
        read_again({"NCCL_NO_CACHE": "NCCL_PROTO,NCCL_IB_HCA"})["NCCL_NO_CACHE"] == "NCCL_PROTO,NCCL_IB_HCA,NCCL_ALGO"
    )
