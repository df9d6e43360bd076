"""Weight versions that four ranks write together hold every tensor bit by bit, however the ranks hold it.

Rows that do not divide evenly, ranks without any, copies, tensor-parallel rows and columns, experts that a checkpoint
keeps apart; on one node, and on two, where what lies on both must be gathered.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, empty
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoConfig, AutoModelForCausalLM

from prime_hpc.inference.check_version import read_signature, receive_version
from prime_hpc.store.artifact import stage_dir
from prime_hpc.store.errors import StoreError
from prime_hpc.store.manifest import verify_artifact
from prime_hpc.store.model.files import stored_tensors
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.model.conversions import Piece, WeightMap, map_weights
from prime_hpc.trainer.model.hf_checkpoint import read_tensors
from prime_hpc.trainer.weights import gathering
from prime_hpc.trainer.weights.publish import Publisher
from prime_hpc.trainer.weights.publish_async import BesidePublisher
from prime_hpc.trainer.weights.write_plan import ranks_of_copy
from prime_hpc.weight_transport.transport import VersionReader
from tests.support.published_policy import stand_in
from tests.support.ranks import spawn
from tests.support.tiny_checkpoints import make_checkpoint

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


def checkpoint_tensors() -> dict[str, torch.Tensor]:
    """The same as a checkpoint holds it."""
    tensors = whole_tensors()
    gate_up, down = tensors.pop(f"{EXPERTS}.gate_up_proj"), tensors.pop(f"{EXPERTS}.down_proj")
    for e in range(len(down)):
        gate, up = gate_up[e].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[e]}
        tensors |= {f"{EXPERTS}.{e}.{part}.weight": tensor.contiguous() for part, tensor in parts.items()}
    return tensors


def weight_map(folder: Path) -> WeightMap:
    """How the two belong together."""
    stored = stored_tensors(folder)
    pieces = {n: [Piece.whole(n, t.shape)] for n, t in whole_tensors().items() if EXPERTS not in n}
    kept = {"gate_up_proj": [("gate_proj", (0, 4)), ("up_proj", (4, 8))], "down_proj": [("down_proj", (0, 4))]}
    for name, parts in kept.items():
        pieces[f"{EXPERTS}.{name}"] = [
            Piece(f"{EXPERTS}.{e}.{part}.weight", ((0, 4), (0, 4)), ((e, e + 1), rows, (0, 4)), (None, 0, 1))
            for e in range(6)
            for part, rows in parts
        ]
    return WeightMap(stored, pieces)


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
                # of the smaller one many rounds, in which large tensors come row by row
                gathering.ROUND_BYTES = 128 << 20 if dtype == torch.float32 else 600
                out = root / f"{layout} {local_size} {dtype}".replace(" ", "-")
                policy: Any = stand_in(lambda tensors=tensors: list(tensors.items()), weight_map(root / "model"))
                publisher = Publisher(
                    policy, root / "model", RunPaths(out), dtype=dtype, incarnation=0, model_name="ours"
                )
                publisher.publish(1)
                if rank == 0:
                    (out / "in-place.json").write_text(json.dumps(sorted(publisher._plan.in_place)), encoding="utf-8")
    dist.destroy_process_group()


def test_published_tensors_are_the_models_bit_by_bit(tmp_path: Path) -> None:
    stored = checkpoint_tensors()
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


def gather_counted(rank: int, store: str, root: Path) -> None:
    """Four ranks, two copies, two nodes: what each sends and receives of what only gathering brings to its file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE)
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    mesh = init_device_mesh("cpu", (2, 2))
    whole = {name: tensor for name, tensor in whole_tensors().items() if name in SHAPES}
    copies_across_nodes = [Shard(0), Replicate()]
    tensors = {name: distribute_tensor(tensor, mesh, copies_across_nodes) for name, tensor in whole.items()}
    wanted = [
        gathering.Wanted(name, number % WORLD_SIZE, tuple(tensor.shape), torch.bfloat16, may_split=True)
        for number, (name, tensor) in enumerate(whole.items())
    ]
    plan = gathering.Gathering(wanted, tensors, {name: ranks_of_copy(tensor) for name, tensor in tensors.items()})
    moved = [0, 0]
    exchange = dist.all_to_all_single

    def counted(output: torch.Tensor, sent: torch.Tensor, *splits: Any) -> Any:
        moved[0] += sent.nbytes
        moved[1] += output.nbytes
        return exchange(output, sent, *splits)

    setattr(dist, "all_to_all_single", counted)  # noqa: B010  # a type checker holds it constant
    found = dict.fromkeys(whole, 0)
    for index, box, values in plan.gather(tensors):
        name = wanted[index].name
        assert wanted[index].owner == rank
        assert torch.equal(values, whole[name][tuple(slice(*ends) for ends in box)].bfloat16()), name
        found[name] += values.numel()
    dist.all_to_all_single = exchange
    assert {name: n for name, n in found.items() if n} == {
        each.name: whole[each.name].numel() for each in wanted if each.owner == rank
    }
    (root / f"moved-{rank}").write_text(json.dumps(moved), encoding="utf-8")
    dist.destroy_process_group()


def test_gathered_bytes_move_once_and_to_their_owner_alone(tmp_path: Path) -> None:
    spawn(gather_counted, (str(tmp_path / "store"), tmp_path), WORLD_SIZE)
    moved = [json.loads((tmp_path / f"moved-{rank}").read_text(encoding="utf-8")) for rank in range(WORLD_SIZE)]
    # of each tensor an owner lacks the half that the other node holds: some 8 bytes each more, and a row of the largest
    sizes = [torch.Size(shape).numel() * 2 for shape in SHAPES.values()]
    assert sum(sent for sent, _ in moved) == sum(received for _, received in moved)
    assert abs(sum(sent for sent, _ in moved) - sum(sizes) // 2) <= 64 + SHAPES["long"][1] * 2
    assert max(received for _, received in moved) < sum(sizes)  # nobody has everything


FAMILIES = ("mixtral", "minimax_m2", "hrm_text", "kimi_linear")


def load_and_publish(rank: int, store: str, root: Path) -> None:
    """Two ranks read their rows of checkpoints with other names than the model's, and publish them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    mesh = init_device_mesh("cpu", (2,))
    for family in FAMILIES:
        with torch.device("meta"):
            hf: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(root / family), dtype=torch.float32)
        weights = map_weights(hf, stored_tensors(root / family))
        meta = {name: hf.state_dict()[name] for name in weights.pieces}
        tensors = {n: empty(t.shape, device_mesh=mesh, placements=[Shard(0)]) for n, t in meta.items()}
        read_tensors(tensors, weights)
        policy: Any = stand_in(lambda tensors=tensors: list(tensors.items()), weights)
        run = RunPaths(root / f"{family}-run")
        Publisher(policy, root / family, run, dtype=torch.bfloat16, incarnation=0, model_name=family).publish(1)
    dist.destroy_process_group()


def test_two_ranks_publish_a_checkpoint_as_it_came(tmp_path: Path) -> None:
    for family in FAMILIES:
        make_checkpoint(tmp_path / family, family, torch.bfloat16)
    spawn(load_and_publish, (str(tmp_path / "store"), tmp_path), 2)
    for family in FAMILIES:
        version = RunPaths(tmp_path / f"{family}-run").weights_step(1)
        receive_version(VersionReader(tmp_path), version, 1, read_signature(tmp_path / family), tied=False)
        before, after = (
            {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
            for folder in (tmp_path / family, version)
        )
        assert before.keys() == after.keys()
        assert all(after[n].dtype == t.dtype and torch.equal(after[n], t) for n, t in before.items()), family
        loaded = [AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (tmp_path / family, version)]
        assert all(torch.equal(tensor, loaded[1][name]) for name, tensor in loaded[0].items()), family


def publish_beside(rank: int, store: str, root: Path) -> None:
    """Two ranks publish beside changes of the tensors; then one of them fails."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    mesh = init_device_mesh("cpu", (2,))
    whole = whole_tensors()
    tensors = {n: distribute_tensor(t, mesh, [Shard(t.ndim - 1)]) if t.ndim else t for n, t in whole.items()}
    policy: Any = stand_in(lambda: list(tensors.items()), weight_map(root / "model"))
    run = RunPaths(root / "run")
    publisher = Publisher(policy, root / "model", run, dtype=torch.bfloat16, incarnation=0, model_name="ours")
    told: list[int | None] = []
    beside = BesidePublisher(publisher, lambda manifest: told.append(manifest.version), timeout_s=60.0)
    for version in (1, 2, 3):
        beside.begin(version)
        for tensor in tensors.values():  # the update of the next step
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.add_(1)
    beside.finish()
    assert told == ([1, 2, 3] if rank == 0 else []) and not beside.has_ended
    if rank == 1:
        publisher.sender.open = refuse  # type: ignore[method-assign, assignment]
    beside.begin(4)
    with pytest.raises(StoreError, match="rank 1: no space left"):
        beside.finish()
    assert not run.weights_step(4).exists()
    if rank == 0:
        assert not stage_dir(run.weights_step(4), 0).exists()
    else:
        del publisher.sender.open
    beside.begin(5)
    beside.finish()
    crowded = BesidePublisher(publisher, lambda manifest: told.append(manifest.version), timeout_s=60.0)
    os.environ["LOCAL_WORLD_SIZE"] = str(1 << 30) if rank == 1 else "2"  # on one node nothing fits
    for version in (6, 7):
        crowded.begin(version)
        assert verify_artifact(run.weights_step(version)).version == version  # by now, not beside what follows
        for tensor in tensors.values():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.add_(1)
    assert told[3:] == ([5, 6, 7] if rank == 0 else []) and not crowded.has_ended
    crowded.finish()
    publisher._put_aux_files = refuse  # type: ignore[method-assign, assignment]
    beside.begin(8)
    with pytest.raises(StoreError, match="no space left"):  # rank 0 alone met it
        beside.finish()
    dist.destroy_process_group()


def refuse(*_: Any) -> Any:
    raise StoreError("no space left")


def test_versions_are_of_the_step_at_which_they_began(tmp_path: Path) -> None:
    stored = checkpoint_tensors()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    save_file(stored, tmp_path / "model" / "model.safetensors")
    spawn(publish_beside, (str(tmp_path / "store"), tmp_path), 2)
    for version, added in ((1, 0), (2, 1), (3, 2), (5, 3), (6, 3), (7, 4)):
        folder = RunPaths(tmp_path / "run").weights_step(version)
        manifest = verify_artifact(folder, deep=True)
        assert manifest.version == version
        found = {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}
        assert found.keys() == stored.keys()
        for name, tensor in stored.items():
            changed = tensor.clone()
            for _ in range(added):
                changed += 1
            expected = changed.bfloat16() if tensor.is_floating_point() else changed
            assert torch.equal(found[name], expected), (version, name)
