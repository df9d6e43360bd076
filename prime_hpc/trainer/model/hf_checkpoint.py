"""How a rank reads its part of a checkpoint: for each of the model's tensors the rows of the stored ones that it holds.

Which stored tensors a model's are made of says `conversions.WeightMap`. Files are memory-mapped: of a tensor no more is
read than this rank keeps, and the host never holds a whole one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from prime_hpc.trainer.model.conversions import Box, Piece, WeightMap
from prime_hpc.trainer.parallel.tensor import local

COMPARED_ROWS = 4096
"""Of tied tensors, at once."""


def local_box(tensor: torch.Tensor) -> Box:
    """Return where this rank's part of a tensor stands in the whole."""
    offset: tuple[int, ...] = (0,) * tensor.ndim
    shape: tuple[int, ...] = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple((begin, begin + size) for begin, size in zip(offset, shape, strict=True))


def inside(part: Box, box: Box) -> tuple[slice, ...]:
    """Return a part of a box, counted from the box's beginning."""
    return tuple(slice(low - begin, high - begin) for (low, high), (begin, _) in zip(part, box, strict=True))


@torch.no_grad()
def read_tensors(tensors: Mapping[str, torch.Tensor], weights: WeightMap) -> None:
    """Fill (sharded) tensors with their parts of the stored ones; those that are not stored stay as they are.
    `tensors`: by the model's names."""
    from safetensors import safe_open

    by_file: dict[Path, list[tuple[Piece, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        for piece in weights.pieces.get(name, []):
            by_file.setdefault(weights.stored[piece.name].file, []).append((piece, tensor))
    for path, wanted in by_file.items():
        with safe_open(path, framework="pt") as handle:
            for piece, tensor in wanted:
                _read(handle, weights.stored[piece.name].name or piece.name, piece, tensor)


def _read(handle: Any, name: str, piece: Piece, tensor: torch.Tensor) -> None:
    box = local_box(tensor)
    part = piece.within(box)
    if part is None:
        return
    stored = handle.get_slice(name)
    values = stored[tuple(slice(*ends) for ends in part.stored)] if part.stored else stored[...]
    local(tensor)[inside(part.model, box)].copy_(part.to_model(values))


def check_tied(weights: WeightMap) -> None:
    """Raise a ValueError for tensors that the config ties and whose stored values differ: only one can be right."""
    from safetensors import safe_open

    for name, other in weights.tied.items():
        with (
            safe_open(weights.stored[name].file, framework="pt") as own,
            safe_open(weights.stored[other].file, framework="pt") as others,
        ):
            slices = own.get_slice(name), others.get_slice(other)
            for row in range(0, slices[0].get_shape()[0], COMPARED_ROWS):
                mine, theirs = (s[row : row + COMPARED_ROWS] for s in slices)
                if not torch.equal(mine, theirs):
                    raise ValueError(
                        f"{weights.stored[name].file} holds {name} and {other} with different values, which "
                        "config.json ties; set tie_word_embeddings to false if the model was trained so"
                    )
