"""A trainer that sends versions over the network, and a server: a real sender, links and groups; engines whose workers
only keep what comes."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from prime_hpc.config.sections.inference import WeightsConfig
from prime_hpc.inference.vllm.transfer_engine import DTYPES
from prime_hpc.inference.vllm.weight_updates import PolicyService
from prime_hpc.runtime.role_context import BUS
from prime_hpc.store.model.files import stored_tensors
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.model.conversions import Piece, WeightMap
from prime_hpc.trainer.weights.publish import Publisher
from prime_hpc.weight_transport.network.group import Group, connect
from prime_hpc.weight_transport.network.layout import buckets, read_layout
from tests.support.published_policy import stand_in

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
        policy: Any = stand_in(lambda: list(self.tensors.items()), weights)
        publisher = Publisher(
            policy,
            self.base,
            self.run,
            dtype=torch.float32,
            incarnation=incarnation,
            model_name="ours",
            weights=WeightsConfig(transport="gloo"),
        )
        sender: Any = publisher.sender
        sender.hold(None, "")  # as if a server had asked before: without, versions stay whole
        return publisher

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


@contextlib.contextmanager
def open_world(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Give a trainer of one rank and its server, in a process group of this process alone."""
    monkeypatch.setenv(BUS, "the-secret-of-the-job@127.0.0.1:1")
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(root)
    finally:
        dist.destroy_process_group()
