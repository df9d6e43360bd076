"""A HF checkpoint on disk: which file holds which tensor, under which name, and how a rank reads its part of it.

Used by `model.py` (loading) and `publish.py` (which writes the names that it came with). A model's tensor is stored
under its own name, but for the experts of a mixture: transformers fuses `experts.<e>.{gate,up,down}_proj.weight` into
`experts.gate_up_proj` [experts, 2 x width, hidden] and `experts.down_proj` [experts, hidden, width], while checkpoints
(and vLLM) keep them apart.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

SAFETENSORS_INDEX = "model.safetensors.index.json"
SAFETENSORS_FILE = "model.safetensors"


@dataclass(frozen=True)
class Piece:
    """One stored tensor, and the part of the model's tensor that it is."""

    name: str
    expert: int | None = None
    """Index into the first dimension, which the stored tensor lacks; None: it is the whole."""
    rows: tuple[int, int] | None = None
    """Of the expert's matrix; None: all."""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """This part of the whole tensor."""
        if self.expert is None:
            return whole
        matrix = whole[self.expert]
        return matrix if self.rows is None else matrix[slice(*self.rows)]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Shape of this part of a tensor of shape `whole`."""
        if self.expert is None:
            return tuple(whole)
        return tuple(whole[1:]) if self.rows is None else (self.rows[1] - self.rows[0], *whole[2:])


def checkpoint_files(source: Path) -> dict[str, Path]:
    """Stored name -> safetensors file of a HF checkpoint; {} where it has no safetensors."""
    from safetensors import safe_open

    index = source / SAFETENSORS_INDEX
    if index.exists():
        return {k: source / v for k, v in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
    single = source / SAFETENSORS_FILE
    if not single.exists():
        return {}
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def pieces(name: str, shape: Sequence[int], files: Mapping[str, Path]) -> list[Piece]:
    """Under which names a checkpoint holds a model's tensor; [] where it is not known how.

    Args:
        name, shape: of the model's tensor.
        files: from `checkpoint_files`.
    """
    if name in files:
        return [Piece(name)]
    prefix, _, matrix = name.rpartition(".")
    if not prefix.endswith(".experts") or len(shape) != 3:
        return []
    found = []
    for e in range(shape[0]):
        if matrix == "gate_up_proj":
            half = shape[1] // 2
            found.append(Piece(f"{prefix}.{e}.gate_proj.weight", e, (0, half)))
            found.append(Piece(f"{prefix}.{e}.up_proj.weight", e, (half, shape[1])))
        else:
            found.append(Piece(f"{prefix}.{e}.{matrix}.weight", e))
    return found if all(piece.name in files for piece in found) else []


@torch.no_grad()
def read_tensors(tensors: Mapping[str, torch.Tensor], files: Mapping[str, Path]) -> None:
    """Fill (sharded) tensors with their parts of the stored ones.

    Args:
        tensors: by the model's names; each has `pieces`.
        files: from `checkpoint_files`.

    Raises:
        ValueError: a stored tensor has another shape than the model's.
    """
    from safetensors import safe_open

    by_file: dict[Path, list[tuple[Piece, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        for piece in pieces(name, tensor.shape, files):
            by_file.setdefault(files[piece.name], []).append((piece, tensor))
    for path, wanted in by_file.items():
        with safe_open(path, framework="pt") as handle:
            for piece, tensor in wanted:
                _read(handle, piece, tensor)


def _read(handle: Any, piece: Piece, tensor: torch.Tensor) -> None:
    stored = handle.get_slice(piece.name)
    expected = piece.shape(tensor.shape)
    if tuple(stored.get_shape()) != expected:
        raise ValueError(f"{piece.name}: the checkpoint holds {stored.get_shape()}, the config says {list(expected)}")
    local, offset = tensor, (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if not local.numel():
        return
    if piece.expert is not None:
        expert = piece.expert - offset[0]
        if not 0 <= expert < local.shape[0]:
            return
        local, offset = local[expert], offset[1:]
    ranges = [(o, o + s) for o, s in zip(offset, local.shape, strict=True)]
    if piece.rows is not None:
        (first, stop), (own_first, own_stop) = piece.rows, ranges[0]
        low, high = max(first, own_first), min(stop, own_stop)
        if low >= high:
            return
        local, ranges[0] = local[low - own_first : high - own_first], (low - first, high - first)
    local.copy_(stored[tuple(slice(*r) for r in ranges)] if ranges else stored[...])
