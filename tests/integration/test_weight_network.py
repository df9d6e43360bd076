"""Weights over the network, from real ranks: their bytes, who gets none, and into real vLLM engines on CPU.

The engines' answers are compared with transformers' log-probabilities of whole versions that the same ranks wrote.
"""

import asyncio
import socket
import threading
from collections import ChainMap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prime_hpc.cli.verbs.run import export
from prime_hpc.client.inference import Generation, InferenceClient, InferenceError
from prime_hpc.config import ConfigError
from prime_hpc.config.experiment import Experiment
from prime_hpc.config.snapshot import write_snapshot
from prime_hpc.store.errors import ArtifactError
from prime_hpc.store.manifest import read_manifest
from prime_hpc.store.messaging.bus import BusServer
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.weights import holds_weights, prune_weights, read_chain
from prime_hpc.weight_transport.network.group import Group, connect
from prime_hpc.weight_transport.network.layout import HEADER_SUFFIX, Sent, buckets, read_layout, sent_of
from prime_hpc.weight_transport.network.link import TrainerLink, TransferError
from tests.support.inference_server import ServerProcess, hf_logprobs_of_all, save_model
from tests.support.network_ranks import Ranks, network_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

PROMPT = list(range(5, 25))
GREEDY = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
TOLERANCE = 1e-4
SOON_S = 20.0


@pytest.fixture
def bus() -> Iterator[BusServer]:
    hub = BusServer()
    yield hub
    hub.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("network") / "base", tied=True, seed=0)


def offered(folder: Path) -> Sent:
    found = sent_of(read_manifest(folder))
    assert found is not None
    return found


def received(folder: Path, secret: str, num_workers: int = 1) -> dict[str, list[bytes]]:
    """Join every rank as the workers of a server, and take what it sends: by file what each worker got."""
    sent, found = offered(folder), {}
    for part in sent.parts:
        link = TrainerLink(part.address, secret)
        where = link.join(sent.session, 1 + num_workers)
        suffix = "" if (folder / part.file).exists() else HEADER_SUFFIX
        layout = read_layout(folder / (part.file + suffix))
        got: dict[int, bytes] = {}
        go = threading.Event()

        def work(rank: int, where: dict = where, layout: list = layout, got: dict = got, go: Any = go) -> None:
            group = Group(
                connect(where["host"], where["port"]),
                where["name"],
                rank,
                1 + num_workers,
                sent.backend,
                where["host"],
                torch.device("cpu"),
            )
            group.connect()
            came = b""
            go.wait(SOON_S)
            for bucket in buckets(layout):
                values = torch.empty(bucket[-1].end - bucket[0].begin, dtype=torch.uint8)
                try:
                    group.broadcast(values)
                except RuntimeError:  # the rank was not asked to send
                    return
                came += values.numpy().tobytes()
            got[rank] = came

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(1, 1 + num_workers)]
        for thread in threads:
            thread.start()
        link.joined(SOON_S)
        link.hold(part.xxh3)
        link.send(part.xxh3)
        go.set()
        for thread in threads:
            thread.join(SOON_S)
        link.sent(SOON_S)
        link.close()
        found[part.file] = [got[rank] for rank in sorted(got)]
    return found


def tensors_of(layout: Path, values: bytes | None = None) -> dict[str, bytes]:
    """By name; `values`: of a file of which `layout` has the header alone."""
    content = layout.read_bytes()
    size = 8 + int.from_bytes(content[:8], "little")
    content = content[:size] + (content[size:] if values is None else values)
    return {entry.name: content[entry.begin : entry.end] for entry in read_layout(layout)}


def modules_of(names: Iterable[str]) -> set[str]:
    """What an engine may fuse is below one: `model.layers.0.mlp`."""
    return {".".join(name.split(".")[:4]) for name in names if ".layers." in name}


@pytest.mark.parametrize(("num_ranks", "dtype"), [(1, torch.bfloat16), (2, torch.float32), (2, torch.bfloat16)])
def test_what_ranks_send_are_the_bytes_of_files(
    base: Path, tmp_path: Path, bus: BusServer, num_ranks: int, dtype: torch.dtype
) -> None:
    run, whole = RunPaths(tmp_path / "run"), RunPaths(tmp_path / "whole")
    secret = bus.address.rpartition("@")[0]
    with network_ranks(num_ranks, base, tmp_path, dtype, bus.address) as ranks:
        for version in (1, 2):
            ranks.tell("publish", version)
            folder = run.weights_step(version)
            assert holds_weights(read_manifest(folder)) == (version == 1)
            found = received(folder, secret, num_workers=2)
            files = sorted(whole.weights_step(version).glob("*.safetensors"))
            assert sorted(found) == [file.name for file in files] and len(files) == num_ranks
            ending = "" if version == 1 else HEADER_SUFFIX
            parts = []
            for name, (copy, other) in found.items():
                assert copy == other
                parts.append(tensors_of(folder / f"{name}{ending}", copy))
            assert dict(ChainMap(*parts)) == dict(ChainMap(*map(tensors_of, files)))
            modules = [modules_of(part) for part in parts]
            assert len(set.union(*modules)) == sum(map(len, modules)), "an engine would keep halves of what it fuses"
        assert not list(run.weights_step(2).glob("*.safetensors"))
        tree = {"name": "run", "output_dir": str(tmp_path), "model": {"name": str(base)}}
        write_snapshot(Experiment.model_validate(tree), run.root, ["test"])
        with pytest.raises(ConfigError, match="over the network alone"):
            export.run([str(run.root), "--merged", "2", "--output", str(tmp_path / "out")], "prime-hpc")
        with pytest.raises(ArtifactError, match="over the network alone"):
            read_chain(run.weights_step(2))
        _check_fences(run, secret, ranks)


def _check_fences(run: RunPaths, secret: str, ranks: Ranks) -> None:
    sent = offered(run.weights_step(2))
    with pytest.raises(TransferError, match="cannot be reached"):
        TrainerLink(sent.parts[0].address, "another secret")
    link = TrainerLink(sent.parts[0].address, secret)
    with pytest.raises(TransferError, match="has another version"):  # has not joined
        link.hold(sent.parts[0].xxh3)
    link.close()
    ranks.tell("publish", 9)  # kept by the config: whole
    assert holds_weights(read_manifest(run.weights_step(9)))
    with pytest.raises(TransferError, match="has another version"):
        received(run.weights_step(2), secret)
    ranks.tell("publish", 10)
    ranks.tell("publish", 11)
    assert prune_weights(run, 1) == [1, 2, 10]  # 9 is what engines fall back to
    link = TrainerLink(sent.parts[0].address, secret)
    host, port = sent.parts[0].address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), SOON_S) as stranger:
        stranger.sendall(b'{"hold": "x"}\n')
        stranger.settimeout(SOON_S)
        assert not stranger.recv(64)  # closed without a word
    link.close()


def is_model(found: Generation, folder: Path) -> bool:
    """Whether greedy tokens and log-probabilities are those of a model."""
    completion = found.token_ids.tolist()
    every = hf_logprobs_of_all(folder, PROMPT, completion)
    own = every[torch.arange(len(completion)), completion]
    return bool(np.allclose(found.logprobs, own, atol=TOLERANCE, rtol=0))


async def update(client: InferenceClient, run: RunPaths, version: int) -> dict:
    return await client.update_weights(run.weights_step(version), version)


def test_engines_follow_and_fall_back(base: Path, tmp_path: Path, bus: BusServer) -> None:
    """Versions while paused; one that comes too late, and a rank that dies while it sends."""
    run, whole = RunPaths(tmp_path / "run"), RunPaths(tmp_path / "whole")

    async def go(server: ServerProcess, ranks: Ranks) -> None:
        async with InferenceClient(server.url, api_key=server.key, timeout_s=250) as client:
            for version in (1, 2, 3):
                await asyncio.to_thread(ranks.tell, "publish", version)
                answer = await update(client, run, version)
                assert answer["version"] == version and answer["changed"]
                assert "read" not in answer["seconds"]  # no file was
                assert is_model(await client.generate(PROMPT, GREEDY), whole.weights_step(version))
            await asyncio.to_thread(ranks.tell, "publish", 4)
            await asyncio.to_thread(ranks.tell, "publish", 5)
            with pytest.raises(InferenceError, match="another version") as refused:
                await update(client, run, 4)  # too late
            assert refused.value.status == 503 and await client.policy_version() == 3
            assert is_model(await client.generate(PROMPT, GREEDY), whole.weights_step(3))
            await asyncio.to_thread(ranks.tell, "die", ranks=[1])
            with pytest.raises(InferenceError, match="broke off") as refused:
                await update(client, run, 5)  # half of it comes
            assert refused.value.status == 503 and await client.policy_version() == 1
            assert is_model(await client.generate(PROMPT, GREEDY), whole.weights_step(1))
            with pytest.raises(InferenceError, match="cannot be reached"):
                await update(client, run, 5)
            assert is_model(await client.generate(PROMPT, GREEDY), whole.weights_step(1))

    with network_ranks(2, base, tmp_path, torch.float32, bus.address) as ranks:
        server = ServerProcess(tmp_path / "server", base, transport="gloo", bus=bus.address)
        try:
            asyncio.run(go(server.wait_ready(), ranks))
        finally:
            print(server.log.read_text(errors="replace")[-6000:])
            server.close()


@pytest.mark.exhaustive
def test_a_restarted_server_gets_what_the_ranks_still_hold(base: Path, tmp_path: Path, bus: BusServer) -> None:
    """With two data-parallel engines, in bfloat16 from one rank."""
    run, whole = RunPaths(tmp_path / "run"), RunPaths(tmp_path / "whole")
    engines = {"data_parallel_size": 2}

    async def go(server: ServerProcess, ranks: Ranks | None) -> None:
        async with InferenceClient(server.url, api_key=server.key, timeout_s=250) as client:
            if ranks is not None:
                for version in (1, 2):
                    await asyncio.to_thread(ranks.tell, "publish", version)
            assert await client.policy_version() == 0
            await update(client, run, 2)
            for _ in range(4):  # by both engines
                assert is_model(await client.generate(PROMPT, GREEDY), whole.weights_step(2))

    with network_ranks(1, base, tmp_path, torch.bfloat16, bus.address) as ranks:
        for told in (ranks, None):
            server = ServerProcess(tmp_path / "server", base, engines, transport="gloo", bus=bus.address)
            try:
                asyncio.run(go(server.wait_ready(), told))
            finally:
                print(server.log.read_text(errors="replace")[-6000:])
                server.close()
