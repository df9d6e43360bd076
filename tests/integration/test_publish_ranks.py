"""Weight versions that four ranks write together hold every tensor bit by bit, however the ranks hold it.

Rows that do not divide evenly, ranks without any, copies, tensor-parallel rows and columns, experts that a checkpoint
keeps apart; on one node, and on two, where what lies on both must be gathered.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from prime_hpc.store.artifact import verify_artifact
from prime_hpc.store.layout import RunPaths
from prime_hpc.trainer.publish import Publisher
from tests.support.ranks import spawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

WORLD_SIZE = 4
EXPERTS = "layers.0.mlp.experts"
SHAPES = {"odd": (7, 5), "few": (2, 3), "long": (1001, 130), "vector": (6,), "even": (8, 16)}


def whole_tensors() -> dict[str, torch.Tensor]:
    """The model as it is before it is sharded."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["half"] = torch.randn(9, 4, generator=generator).bfloat16()
    tensors["scalar"] = torch.tensor(3.5)
    tensors["count"] = torch.tensor([1, 2, 3])
    tensors[f"{EXPERTS}.gate_up_proj"] = torch.randn(6, 8, 4, generator=generator)
    tensors[f"{EXPERTS}.down_proj"] = torch.randn(6, 4, 4, generator=generator)
    return tensors


def stored_tensors() -> dict[str, torch.Tensor]:
    """The same as a checkpoint holds it."""
    tensors = whole_tensors()
    gate_up, down = tensors.pop(f"{EXPERTS}.gate_up_proj"), tensors.pop(f"{EXPERTS}.down_proj")
    for e in range(len(down)):
        gate, up = gate_up[e].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[e]}
        tensors |= {f"{EXPERTS}.{e}.{part}.weight": tensor.contiguous() for part, tensor in parts.items()}
    return tensors


def sharded(layout: str, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The model's tensors as the ranks of a layout hold them; scalars and counts everywhere."""
    placements: list[Placement]
    if layout == "fsdp":
        mesh, placements = init_device_mesh("cpu", (4,)), [Shard(0)]
    elif layout == "hybrid":
        mesh, placements = init_device_mesh("cpu", (2, 2)), [Replicate(), Shard(0)]
    else:
        mesh, placements = init_device_mesh("cpu", (2, 2)), [Replicate(), Replicate()]
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in whole.items():
        own = list(placements)
        if layout == "tensor parallel":
            split: dict[str, list[Placement]] = {
                "even": [_StridedShard(0, split_factor=2), Shard(0)],  # as FSDP leaves what was split by rows before
                "long": [Shard(0), Shard(1)],
                "odd": [Replicate(), Shard(1)],
                "half": [Shard(0), Replicate()],
                f"{EXPERTS}.down_proj": [Shard(1), Shard(0)],
                f"{EXPERTS}.gate_up_proj": [Shard(0), Shard(0)],
            }
            own = split.get(name, own)
        tensors[name] = distribute_tensor(tensor, mesh, own) if tensor.dtype != torch.int64 and tensor.ndim else tensor
    return tensors


def work(rank: int, store: str, root: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    whole = whole_tensors()
    for layout in ("fsdp", "hybrid", "tensor parallel"):
        tensors = sharded(layout, whole)
        for local_size in (4, 2):
            os.environ |= {"LOCAL_WORLD_SIZE": str(local_size), "LOCAL_RANK": str(rank % local_size)}
            for dtype in (torch.float32, torch.bfloat16):
                out = root / f"{layout} {local_size} {dtype}".replace(" ", "-")
                policy: Any = SimpleNamespace(named_weights=lambda tensors=tensors: list(tensors.items()))
                publisher = Publisher(
                    policy, root / "model", RunPaths(out), dtype=dtype, incarnation=0, model_name="ours"
                )
                publisher.publish(1)
                if rank == 0:
                    (out / "in-place.json").write_text(json.dumps(sorted(publisher._plan.in_place)), encoding="utf-8")
    dist.destroy_process_group()


def test_published_tensors_are_the_models_bit_by_bit(tmp_path: Path) -> None:
    stored = stored_tensors()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    save_file(stored, tmp_path / "model" / "model.safetensors")
    spawn(work, (str(tmp_path / "store"), tmp_path), WORLD_SIZE)
    in_place = {}
    for layout in ("fsdp", "hybrid", "tensor-parallel"):
        for local_size in (4, 2):
            for dtype in (torch.float32, torch.bfloat16):
                out = tmp_path / f"{layout}-{local_size}-{dtype}"
                version = RunPaths(out).weights_step(1)
                verify_artifact(version, deep=True)
                index = json.loads((version / "model.safetensors.index.json").read_text(encoding="utf-8"))
                found = {n: t for file in version.glob("*.safetensors") for n, t in load_file(file).items()}
                assert found.keys() == stored.keys() == index["weight_map"].keys()
                for name, tensor in stored.items():
                    expected = tensor.to(dtype) if tensor.is_floating_point() else tensor
                    assert found[name].dtype == expected.dtype and torch.equal(found[name], expected), (out, name)
                in_place[layout, local_size] = set(json.loads((out / "in-place.json").read_text(encoding="utf-8")))
    everything = whole_tensors().keys()
    assert in_place["fsdp", 4] == in_place["hybrid", 4] == in_place["hybrid", 2] == everything
    assert in_place["fsdp", 2] == {"scalar", "count"}
    assert in_place["tensor-parallel", 4] == everything - {"long", "odd", f"{EXPERTS}.down_proj"}
