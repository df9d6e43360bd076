"""Trainer ranks that publish a small sharded model over the network, told what to do over sockets."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.runtime.role_context import BUS
from prime_hpc.store.model.files import stored_tensors
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.model.conversions import Piece, WeightMap
from prime_hpc.trainer.weights.publish import Publisher
from tests.support.published_policy import stand_in
from tests.support.ranks import started

ANSWER_S = 120.0


def work(rank: int, num_ranks: int, base: Path, root: Path, dtype: torch.dtype, bus: str, address: str) -> None:
    """One rank: `change` the weights; `publish` a version over the network, and whole files of it beside; `die`, when
    asked to send."""
    torch.set_num_threads(1)
    os.environ |= {BUS: bus, "LOCAL_WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    store = dist.FileStore(str(root / "rendezvous"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    stored = stored_tensors(base)
    weights = WeightMap(stored, {name: [Piece.whole(name, tensor.shape)] for name, tensor in stored.items()})
    loaded = load_file(base / "model.safetensors")
    tensors = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in loaded.items()}
    policy: Any = stand_in(lambda: list(tensors.items()), weights)
    publishers = {
        name: Publisher(
            policy,
            base,
            RunPaths(root / name),
            dtype=dtype,
            incarnation=0,
            model_name="ours",
            weights=WeightsConfig(transport=transport, whole_interval=100),
            is_kept=lambda version: version == 9,
        )
        for name, transport in (("run", "gloo"), ("whole", "files"))
    }
    joined: Any = publishers["run"].sender
    joined.hold(None, "")  # as if a server had asked before: without, versions stay whole
    generator = torch.Generator().manual_seed(rank)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    pipe = Connection(connection.detach())
    pipe.send(rank)
    while (said := pipe.recv()) is not None:
        if said[0] == "publish":
            for tensor in tensors.values():
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                local += torch.randn(local.shape, generator=generator) * 0.05
            for publisher in publishers.values():
                publisher.publish(said[1])
        elif said[0] == "die":
            sender: Any = publishers["run"].sender
            sender.send = lambda *_: os._exit(1)
        pipe.send(True)
    dist.destroy_process_group()


class Ranks:
    """The ranks of a test."""

    def __init__(self, pipes: list[Connection]) -> None:
        self.pipes = pipes

    def tell(self, *words: Any, ranks: list[int] | None = None) -> None:
        """Have ranks (default: all) do something; returns when they have."""
        chosen = [self.pipes[rank] for rank in (range(len(self.pipes)) if ranks is None else ranks)]
        for pipe in chosen:
            pipe.send(words)
        for pipe in chosen:
            assert pipe.poll(ANSWER_S), f"{words} was not done within {ANSWER_S:.0f} s"
            pipe.recv()


@contextmanager
def network_ranks(num_ranks: int, base: Path, root: Path, dtype: torch.dtype, bus: str) -> Iterator[Ranks]:
    """Run ranks that publish `run` over the network and `whole` as files, in `root`."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as listener:
        address = f"{folder}/s"  # socket paths must stay short
        listener.bind(address)
        listener.listen(num_ranks)
        listener.settimeout(ANSWER_S)
        with started(work, (num_ranks, base, root, dtype, bus, address), num_ranks):
            pipes: dict[int, Connection] = {}
            while len(pipes) < num_ranks:
                connection, _ = listener.accept()
                connection.setblocking(True)
                pipe = Connection(connection.detach())
                pipes[pipe.recv()] = pipe
            yield Ranks([pipes[rank] for rank in range(num_ranks)])
