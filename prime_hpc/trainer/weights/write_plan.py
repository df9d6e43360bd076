"""Plan of a weight version's files: which rank writes which of their bytes.

A file per rank, which owns it: it writes the header and seals it. A tensor stands whole in one file. Where every rank
that holds a part of it holds whole rows, and all of them are on one node, each writes its rows to their place
("in place"): nothing is sent, and nobody needs memory for the whole tensor. Of a tensor with several copies (hybrid
sharding, replicated parameters) the ranks of the owner's own copy write. Everything else (matrices that are split by
columns, or stored transposed, shards spread over nodes) comes to its owner, and to it alone (`gathering`).
"""

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from prime_hpc.store.model.files import SINGLE
from prime_hpc.trainer.model.conversions import LM_HEAD, Box, Piece, WeightMap
from prime_hpc.trainer.model.hf_checkpoint import inside, local_box
from prime_hpc.trainer.parallel.tensor import local
from prime_hpc.trainer.rank_group import RankGroup
from prime_hpc.trainer.weights.gathering import Gathering, Wanted
from prime_hpc.trainer.weights.safetensors_layout import (
    DTYPES,
    SafetensorsLayout,
    TensorSpec,
    host_bytes,
    in_file_order,
)
from prime_hpc.weight_transport.transport import Place

BLOCK_BYTES = 4 << 20
"""Of a version, at most, in one block from a CPU: it is cast, compared or written, and summed while it is in the
cache."""
UNUSED_FILE = "model-unused.safetensors"
"""Tensors of the source that the model does not use, as they are."""


@dataclass(frozen=True)
class VersionFile:
    """One safetensors file."""

    name: str
    owner: int
    """The rank that seals it."""
    tensors: list[str]
    """Of the model, in the file's order; in the file each may be several."""
    layout: SafetensorsLayout


@dataclass(frozen=True)
class Block:
    """A contiguous run of elements of a file, from this rank."""

    file: VersionFile
    offset: int
    """Bytes from the file's beginning."""
    values: torch.Tensor
    """As the model holds them, on the device."""
    dtype: torch.dtype
    """In which they are published."""

    @property
    def place(self) -> Place:
        """Its place in the version."""
        return Place(self.file.name, self.offset, self.dtype.itemsize)

    def published(self) -> torch.Tensor:
        """Return the values in the published dtype, on the device."""
        return self.values.to(self.dtype)


@dataclass(frozen=True)
class _Cut:
    """A part of what this rank holds of one of the model's tensors, and the stored tensor that it belongs to."""

    part: Piece
    held: tuple[slice, ...]
    """Its place in what this rank holds."""
    base: int
    """Of the stored tensor in the file, in bytes."""
    spec: TensorSpec
    element: int | None
    """Its first element in the stored tensor, if it is one run of it as it stands, which it is as a rule; else None."""


class VersionPlan:
    """From `plan_version`; the same on all ranks but for what is this rank's. Good as long as the policy lives."""

    def __init__(
        self,
        files: list[VersionFile],
        weights: WeightMap,
        in_place: set[str],
        copies: Mapping[str, list[int]],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        self.files, self.in_place = files, in_place
        self._stored: Mapping[str, list[Piece]] = weights.pieces
        self._weights, self._copies = weights, copies
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._gathered = [(file, name) for file in files for name in file.tensors if name not in in_place]
        self._own: list[tuple[VersionFile, str, list[_Cut]]] | None = None
        self._gathering = Gathering([self._wanted(*each, tensors) for each in self._gathered], tensors, copies)

    def _wanted(self, file: VersionFile, name: str, tensors: Mapping[str, torch.Tensor]) -> Wanted:
        keeps_rows = all(piece.keeps_rows(file.layout.specs[piece.name].shape) for piece in self._stored[name])
        dtype = file.layout.specs[self._stored[name][0].name].dtype
        return Wanted(name, file.owner, tuple(tensors[name].shape), dtype, may_split=keeps_rows)

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

    def blocks(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[Block]:
        """Return what this rank writes, in the same blocks for every version. Collective: every rank takes all of its
        own. `tensors`: the model's, sharded or not."""
        for file, name, cuts in self._own_cuts(tensors):
            with torch.no_grad():  # else a part of a sharded tensor is a computation of its own
                held = local(tensors[name]).detach()
            for cut in cuts:
                yield from _runs_of(file, cut, held)
        for index, box, values in self._gathering.gather(tensors):
            file, name = self._gathered[index]
            for cut in self._cuts(file, name, box):
                yield from _runs_of(file, cut, values)

    def _own_cuts(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[VersionFile, str, list[_Cut]]]:
        """Return what this rank holds of tensors that are written in place, unless others write it; found out once."""
        if self._own is None:
            self._own = [
                (file, name, self._cuts(file, name, local_box(tensors[name])))
                for file in self.mine()
                for name in file.tensors
                if name in self.in_place and self._writes(file, name, tensors[name])
            ]
        return self._own

    def _writes(self, file: VersionFile, name: str, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, DTensor):
            return file.owner in self._copies[name]  # else the owner's own copy is written by others
        return file.owner == self._rank

    def _cuts(self, file: VersionFile, name: str, box: Box) -> list[_Cut]:
        """Return the places in a file of a part of one of the model's tensors.
        `box`: place of the part in the tensor."""
        found = []
        for piece in self._stored[name]:
            part = piece.within(box)
            if part is not None:
                spec = file.layout.specs[piece.name]
                base = file.layout.offset(piece.name)
                found.append(_Cut(part, inside(part.model, box), base, spec, only_run(part, spec.shape)))
        return found

    @property
    def has_unused(self) -> bool:
        """True if the source holds tensors that the model does not use."""
        return bool(self._weights.unused)

    @property
    def is_indexed(self) -> bool:
        """True if there are several files."""
        return len(self.files) > 1 or self.has_unused

    def index(self) -> dict[str, object]:
        """Content of `model.safetensors.index.json`."""
        specs = {name: (file.name, spec.nbytes) for file in self.files for name, spec in file.layout.specs.items()}
        specs |= {spec.name: (UNUSED_FILE, spec.nbytes) for spec in self._unused()}
        total = sum(nbytes for _, nbytes in specs.values())
        return {
            "metadata": {"total_size": total},
            "weight_map": {name: file for name, (file, _) in sorted(specs.items())},
        }

    def _unused(self) -> list[TensorSpec]:
        stored = self._weights.stored
        return in_file_order([TensorSpec(n, stored[n].shape, DTYPES[stored[n].dtype]) for n in self._weights.unused])

    def unused_file(self) -> Iterator[bytes]:
        """Content of `UNUSED_FILE`, a tensor at a time."""
        from safetensors import safe_open

        specs = self._unused()
        yield SafetensorsLayout(specs).header
        for spec in specs:
            with safe_open(self._weights.stored[spec.name].file, framework="pt") as handle:
                yield host_bytes(handle.get_tensor(spec.name)).tobytes()


def only_run(part: Piece, shape: Sequence[int]) -> int | None:
    """Return where a part that is stored as the model has it begins, if it is one run."""
    if part.dims != tuple(range(len(shape))):
        return None
    split = max((d for d in range(len(shape)) if part.stored[d] != (0, shape[d])), default=0)
    if any(high - low != 1 for low, high in part.stored[:split]):
        return None
    return sum(low * math.prod(shape[d + 1 :]) for d, (low, _) in enumerate(part.stored))


def _runs_of(file: VersionFile, cut: _Cut, values: torch.Tensor) -> Iterator[Block]:
    """Return the blocks of a part of what this rank holds."""
    itemsize, values = cut.spec.dtype.itemsize, values[cut.held]
    whole = cut.part.stored, cut.spec.shape
    found: Iterable[tuple[int, torch.Tensor]]
    found = runs(*whole, cut.part.to_stored(values)) if cut.element is None else [(cut.element, values)]
    for element, run in found:
        flat = run.reshape(-1)
        step = BLOCK_BYTES // itemsize if flat.device.type == "cpu" else len(flat)
        for first in range(0, len(flat), max(step, 1)):
            part = flat[first : first + step]
            yield Block(file, cut.base + (element + first) * itemsize, part, cut.spec.dtype)


def runs(box: Box, shape: Sequence[int], values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut a box of a stored tensor into pieces that are contiguous in the file: one, where it has whole rows.

    Args:
        box: where it stands.
        shape: of the stored tensor.

    Yields:
        index of the first element in the flattened tensor; the values from there on.
    """
    if not values.numel():
        return
    split = max((d for d in range(len(shape)) if box[d] != (0, shape[d])), default=0)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    first = sum(begin * stride for (begin, _), stride in zip(box, strides, strict=True))
    if not shape or all(values.shape[d] == 1 for d in range(split)):
        yield first, values
        return
    for index in product(*(range(values.shape[d]) for d in range(split))):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), values[index]


def plan_version(
    policy_tensors: Mapping[str, torch.Tensor], weights: WeightMap, dtype: torch.dtype, *, gathers: bool = False
) -> VersionPlan:
    """Share the tensors out. Collective over the default process group.

    Parameters leave in `dtype`, which the computation used; buffers, which no mixed precision rounds, as they came.

    Args:
        policy_tensors: by the model's names, sharded or not.
        weights: what of the checkpoint that training began with they are made of: so they leave.
        dtype: of the published floating-point parameters.
        gathers: every rank gets the whole of its file, so that no other writes into it. An engine then receives file
            by file: what it fuses comes in one.

    Raises:
        ValueError: a dtype that no file can hold; names that are not the checkpoint's.
    """
    together = _kept_together(weights, by_module=gathers)
    groups = [_Group(names, _specs(names, policy_tensors, weights, dtype)) for names in together]
    _check_names(groups, weights)
    groups.sort(key=lambda group: -max(spec.dtype.itemsize for spec in group.specs))
    owners = balance_writes([group.nbytes for group in groups], dist.get_world_size())
    num_files = len(set(owners))
    files = []
    for rank in sorted(set(owners)):
        held = [group for group, owner in zip(groups, owners, strict=True) if owner == rank]
        layout = SafetensorsLayout(in_file_order([spec for group in held for spec in group.specs]))
        name = f"model-{rank + 1:05d}-of-{num_files:05d}.safetensors" if num_files > 1 or weights.unused else SINGLE
        files.append(VersionFile(name, rank, [name for group in held for name in group.names], layout))
    names = [name for group in groups for name in group.names]
    copies = {name: ranks_of_copy(policy_tensors[name]) for name in names}
    in_place: set[str] = set()
    if not gathers:
        in_place = _agreed_in_place({name: policy_tensors[name] for name in names}, copies, weights)
    return VersionPlan(files, weights, in_place, copies, policy_tensors)


@dataclass(frozen=True)
class _Group:
    """Tensors of the model that share stored ones: they stand in one file."""

    names: list[str]
    specs: list[TensorSpec]

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)


def _kept_together(weights: WeightMap, *, by_module: bool) -> list[list[str]]:
    """Return the model's names, those together of which the checkpoint stores parts in one tensor.
    `by_module`: those too that stand below one module of a block. An engine makes one matrix of some of these, and
    keeps what came of it, whole and on each of its GPUs, until the last has: over several ranks' files that would be a
    quarter of the model."""
    key = _module if by_module else str
    groups: list[list[str]] = []
    place: dict[str, list[str]] = {}  # of a stored tensor, or its module
    for name, pieces in weights.pieces.items():
        keys = [key(piece.name) for piece in pieces]
        found = list({id(g): g for k in keys if (g := place.get(k)) is not None}.values())
        group = found[0] if found else []
        if not found:
            groups.append(group)
        for other in found[1:]:
            group += other
            place |= {stored: group for stored, where in place.items() if where is other}
            groups = [each for each in groups if each is not other]
        group.append(name)
        place |= dict.fromkeys(keys, group)
    return groups


def _module(stored: str) -> str:
    """Return `model.layers.3.mlp` of all that stands below it; what stands in no block, as it is."""
    found = re.match(r".*?\.\d+\.[^.]+(?=\.)", stored)
    return found[0] if found else stored


def _specs(
    names: Sequence[str], tensors: Mapping[str, torch.Tensor], weights: WeightMap, dtype: torch.dtype
) -> list[TensorSpec]:
    """Return the stored tensors of some of the model's, as they are published."""
    found: dict[str, TensorSpec] = {}
    for name in names:
        for piece in weights.pieces[name]:
            stored = weights.stored[piece.name]
            is_trained = tensors[name].is_floating_point() and name not in weights.buffers
            found[piece.name] = TensorSpec(piece.name, stored.shape, dtype if is_trained else DTYPES[stored.dtype])
    return list(found.values())


def _check_names(groups: Sequence[_Group], weights: WeightMap) -> None:
    """Check that what would be published has the names of the checkpoint, or no engine would take it."""
    published = {spec.name for group in groups for spec in group.specs} | set(weights.unused)
    differing = sorted(published ^ (weights.stored.keys() - (weights.tied.keys() & {LM_HEAD})))
    if differing:
        raise ValueError(f"{differing[0]} ({len(differing)} tensors) would be published under another name")


def _agreed_in_place(
    tensors: Mapping[str, torch.Tensor], copies: Mapping[str, list[int]], weights: WeightMap
) -> set[str]:
    """Tensors that every rank can write in place. Collective."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    able = [
        name
        for name, tensor in tensors.items()
        if has_whole_rows(tensor)
        and all(piece.keeps_rows(weights.stored[piece.name].shape) for piece in weights.pieces[name])
        and len({rank // local_size for rank in copies[name]}) == 1
    ]
    return set(able).intersection(*RankGroup().gather_all(able))


def has_whole_rows(tensor: torch.Tensor) -> bool:
    """Return whether what each rank holds is a block of whole rows; the same on all ranks."""
    if not isinstance(tensor, DTensor):
        return True
    return all(placement.is_replicate() or getattr(placement, "dim", None) == 0 for placement in tensor.placements)


def ranks_of_copy(tensor: torch.Tensor) -> list[int]:
    """Return the ranks that hold the parts of one copy of a tensor together: this rank's copy."""
    if not isinstance(tensor, DTensor):
        return [dist.get_rank()]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank has a part of every tensor"
    place = tuple(
        own if placement.is_replicate() else slice(None)
        for own, placement in zip(coordinate, tensor.placements, strict=True)
    )
    return tensor.device_mesh.mesh[place].flatten().tolist()


def balance_writes(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank in whose file each tensor stands, so that all are about as large: each goes to the one with the
    least so far.

    Ranks that get something come first.
    """
    load = [0] * num_ranks
    owners = []
    for size in sizes:
        rank = load.index(min(load))
        owners.append(rank)
        load[rank] += max(size, 1)
    return owners
