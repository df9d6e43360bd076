"""Which files a weight version has, and which rank writes which of their bytes. Used by `publish.py`.

A file per rank, which owns it: it writes the header and seals it. A tensor stands whole in one file. Where every rank
that holds a part of it holds whole rows, and all of them are on one node, each writes its rows to their place
("in place"): nothing is sent, and nobody needs memory for the whole tensor. Of a tensor with several copies (hybrid
sharding, replicated parameters) the ranks of the owner's own copy write. Everything else (matrices that are split by
columns, shards spread over nodes) is gathered for its owner.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from prime_hpc.trainer.safetensors_file import SafetensorsLayout, TensorSpec, in_file_order
from prime_hpc.trainer.stored import SAFETENSORS_FILE, Piece, pieces


@dataclass(frozen=True)
class VersionFile:
    """One safetensors file."""

    name: str
    owner: int
    """The rank that seals it."""
    tensors: list[str]
    """Of the model, in the file's order; in the file each may be several."""
    layout: SafetensorsLayout


class VersionPlan:
    """From `plan_version`; the same on all ranks but for what is this rank's. Good as long as the policy lives."""

    def __init__(
        self,
        files: list[VersionFile],
        stored: Mapping[str, list[Piece]],
        in_place: set[str],
        copies: Mapping[str, list[int]],
    ) -> None:
        self.files, self.in_place = files, in_place
        self._stored, self._copies = stored, copies
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()

    @property
    def file_bytes(self) -> int:
        """Size of the largest file."""
        return max(file.layout.size for file in self.files)

    def mine(self) -> list[VersionFile]:
        """Files into which this rank writes, its own first and the others in turn: a file takes one write at a time."""
        found = [file for file in self.files if file.owner == self._rank or self._owners_rows(file)]
        return sorted(found, key=lambda file: (file.owner - self._rank) % self._world_size)

    def _owners_rows(self, file: VersionFile) -> bool:
        return any(name in self.in_place and file.owner in self._copies[name] for name in file.tensors)

    def gathered(self) -> list[tuple[VersionFile, str]]:
        """Tensors that must be gathered, in the order in which all ranks do it."""
        return [(file, name) for file in self.files for name in file.tensors if name not in self.in_place]

    def blocks(self, file: VersionFile, name: str, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """What this rank writes of a tensor: offsets in the file, and the values that belong there.

        Args:
            file: that it stands in.
            name: of the tensor.
            tensor: the model's; or whole, once it was gathered.
        """
        local, first = tensor.detach(), 0
        if isinstance(local, DTensor):
            if file.owner not in self._copies[name]:  # the owner's own copy is written by others
                return
            first = _first_row(local)
            local = local.to_local()
        elif name in self.in_place and file.owner != self._rank:
            return
        for piece in self._stored[name]:
            if piece.expert is None:
                row, values = first, local
            elif first <= piece.expert < first + len(local):
                matrix = local[piece.expert - first]
                row, values = 0, matrix if piece.rows is None else matrix[slice(*piece.rows)]
            else:
                continue
            if values.numel():
                yield file.layout.offset(piece.name, row), values

    def index(self) -> dict[str, object]:
        """Content of `model.safetensors.index.json`."""
        weight_map = {name: file.name for file in self.files for name in file.layout.specs}
        total = sum(spec.nbytes for file in self.files for spec in file.layout.specs.values())
        return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def plan_version(
    policy_tensors: Mapping[str, torch.Tensor], source: Mapping[str, Path], dtype: torch.dtype
) -> VersionPlan:
    """Share the tensors out. Collective over the default process group.

    Args:
        policy_tensors: by the model's names, sharded or not.
        source: stored name -> file of the checkpoint that training began with: under these names the tensors leave.
        dtype: floating-point dtype of the published weights.

    Raises:
        ValueError: a dtype that no file can hold.
    """
    specs = [
        TensorSpec(name, tuple(t.shape), dtype if t.is_floating_point() else t.dtype)
        for name, t in policy_tensors.items()
    ]
    order = in_file_order(specs)
    stored = {spec.name: pieces(spec.name, spec.shape, source) or [Piece(spec.name)] for spec in order}
    owners = share_out([spec.nbytes for spec in order], dist.get_world_size())
    num_files = len(set(owners))
    files = []
    for rank in sorted(set(owners)):
        held = [spec for spec, owner in zip(order, owners, strict=True) if owner == rank]
        parts = [TensorSpec(p.name, p.shape(spec.shape), spec.dtype) for spec in held for p in stored[spec.name]]
        name = SAFETENSORS_FILE if num_files == 1 else f"model-{rank + 1:05d}-of-{num_files:05d}.safetensors"
        files.append(VersionFile(name, rank, [spec.name for spec in held], SafetensorsLayout(parts)))
    copies = {spec.name: ranks_of_copy(policy_tensors[spec.name]) for spec in order}
    return VersionPlan(files, stored, _agreed_in_place(policy_tensors, copies), copies)


def _agreed_in_place(tensors: Mapping[str, torch.Tensor], copies: Mapping[str, list[int]]) -> set[str]:
    """Tensors that every rank can write in place. Collective."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    able = [
        name
        for name, tensor in tensors.items()
        if has_whole_rows(tensor) and len({rank // local_size for rank in copies[name]}) == 1
    ]
    every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, able)
    return set(able).intersection(*every)


def has_whole_rows(tensor: torch.Tensor) -> bool:
    """Whether what each rank holds is a block of whole rows; the same on all ranks."""
    if not isinstance(tensor, DTensor):
        return True
    return all(placement.is_replicate() or getattr(placement, "dim", None) == 0 for placement in tensor.placements)


def ranks_of_copy(tensor: torch.Tensor) -> list[int]:
    """The ranks that hold the parts of one copy of a tensor together: this rank's copy."""
    if not isinstance(tensor, DTensor):
        return [dist.get_rank()]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank has a part of every tensor"
    place = tuple(
        own if placement.is_replicate() else slice(None)
        for own, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return tensor.device_mesh.mesh[place].flatten().tolist()


def _first_row(tensor: DTensor) -> int:
    """Index of this rank's first row in the whole."""
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] if offset else 0


def share_out(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank in whose file each tensor stands, so that all are about as large: each goes to the one with the least
    so far.

    Ranks that get something come first.
    """
    load = [0] * num_ranks
    owners = []
    for size in sizes:
        rank = load.index(min(load))
        owners.append(rank)
        load[rank] += max(size, 1)
    return owners
