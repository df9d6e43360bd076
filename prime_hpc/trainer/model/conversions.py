"""The checkpoint's tensors that a model's are made of: transformers' weight conversions, followed without values.

They work on whole tensors (`moe.conversion`). Here they run on `Traced` tensors, which have a shape and know
from where in the checkpoint each part of them comes. The outcome serves both ways: a rank reads its part of each tensor
alone (`stored`), and what is published has the names and forms that the checkpoint came with (`weights.aux_files`).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from prime_hpc.moe.conversion import convert
from prime_hpc.store.model.files import StoredTensor

Box = tuple[tuple[int, int], ...]
"""Begin and end along each dimension."""
LM_HEAD = "lm_head.weight"
_IGNORED = r"rotary_emb\.inv_freq"
"""Of old checkpoints; the frequencies come from the config."""


@dataclass(frozen=True)
class Piece:
    """A box of a stored tensor, and the box of the model's tensor that it fills."""

    name: str
    """Of the stored tensor."""
    stored: Box
    model: Box
    dims: tuple[int | None, ...]
    """For each dimension of the model's tensor the stored one's that it is; None: the stored one lacks it."""

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> "Piece":
        """Make the piece of a tensor that is stored as the model has it."""
        box = tuple((0, size) for size in shape)
        return cls(name, box, box, tuple(range(len(shape))))

    def within(self, box: Box) -> "Piece | None":
        """Return the part of it that lies in a box of the model's tensor; None where there is none."""
        stored, model = list(self.stored), []
        for (low, high), (begin, end), dim in zip(self.model, box, self.dims, strict=True):
            first, last = max(low, begin), min(high, end)
            if first >= last:
                return None
            model.append((first, last))
            if dim is not None:
                stored[dim] = (self.stored[dim][0] + first - low, self.stored[dim][0] + last - low)
        return replace(self, stored=tuple(stored), model=tuple(model))

    def to_model(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the stored box as they stand in the model's."""
        order = [dim for dim in self.dims if dim is not None]
        return values.permute(order).reshape([end - begin for begin, end in self.model])

    def to_stored(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the model's box as they stand in the stored one; contiguous."""
        order = [dim for dim in self.dims if dim is not None]
        sizes = [high - low for (low, high), dim in zip(self.model, self.dims, strict=True) if dim is not None]
        return values.reshape(sizes).permute([order.index(dim) for dim in range(len(order))]).contiguous()

    def keeps_rows(self, shape: Sequence[int]) -> bool:
        """Return whether rows of the model's tensor (for a stacked one: of its matrices) are whole rows of the stored
        one. `shape`: of the stored tensor."""
        order = [dim for dim in self.dims if dim is not None]
        stacked = all(dim is None for dim in self.dims[: len(self.dims) - len(order)])
        return stacked and order == sorted(order) and all(self.stored[d] == (0, shape[d]) for d in range(1, len(shape)))


@dataclass(frozen=True)
class Traced:
    """A tensor without values: its shape, and from which stored tensors it comes.

    Takes part in the torch functions that transformers' conversions of causal language models use.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """Along one dimension."""
        return self.shape[dim]

    def contiguous(self) -> "Traced":
        """Itself."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow one of torch's functions."""
        if func not in _FOLLOWED:
            raise NotImplementedError(f"torch.{getattr(func, '__name__', func)} on stored tensors")
        return _FOLLOWED[func](*args, **(kwargs or {}))


def _moved(piece: Piece, dim: int, by: int) -> Piece:
    low, high = piece.model[dim]
    return replace(piece, model=(*piece.model[:dim], (low + by, high + by), *piece.model[dim + 1 :]))


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    shape = tensors[0].shape
    if any(tensor.shape != shape for tensor in tensors):
        raise ValueError(f"they have several shapes: {sorted({tensor.shape for tensor in tensors})}")
    dim %= len(shape) + 1
    pieces = [
        replace(
            piece,
            model=(*piece.model[:dim], (i, i + 1), *piece.model[dim:]),
            dims=(*piece.dims[:dim], None, *piece.dims[dim:]),
        )
        for i, tensor in enumerate(tensors)
        for piece in tensor.pieces
    ]
    return Traced((*shape[:dim], len(tensors), *shape[dim:]), tuple(pieces))


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    dim %= tensors[0].ndim
    others = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(others) > 1:
        raise ValueError(f"they have several shapes: {sorted({tensor.shape for tensor in tensors})}")
    pieces, end = [], 0
    for tensor in tensors:
        pieces += [_moved(piece, dim, end) for piece in tensor.pieces]
        end += tensor.shape[dim]
    shape = tensors[0].shape
    return Traced((*shape[:dim], end, *shape[dim + 1 :]), tuple(pieces))


def _chunk(tensor: Traced, chunks: int, dim: int = 0) -> tuple[Traced, ...]:
    dim %= tensor.ndim
    size = tensor.shape[dim]
    width = -(-size // chunks)
    parts = []
    for begin in range(0, size, width):
        end = min(begin + width, size)
        box = tuple((begin, end) if d == dim else (0, n) for d, n in enumerate(tensor.shape))
        inside = [part for piece in tensor.pieces if (part := piece.within(box)) is not None]
        shape = (*tensor.shape[:dim], end - begin, *tensor.shape[dim + 1 :])
        parts.append(Traced(shape, tuple(_moved(piece, dim, -begin) for piece in inside)))
    return tuple(parts)


def _transpose(tensor: Traced, dim0: int, dim1: int) -> Traced:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    pieces = [
        replace(piece, model=tuple(piece.model[d] for d in order), dims=tuple(piece.dims[d] for d in order))
        for piece in tensor.pieces
    ]
    return Traced(tuple(tensor.shape[d] for d in order), tuple(pieces))


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    torch.stack: _stack,
    torch.cat: _cat,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}


@dataclass(frozen=True)
class WeightMap:
    """From `map_weights`: how a model's tensors and those of its checkpoint belong together."""

    stored: Mapping[str, StoredTensor]
    pieces: Mapping[str, list[Piece]]
    """By the model's names. Of tied tensors the one name that `Policy.named_weights` has."""
    buffers: frozenset[str] = frozenset()
    """Those of the model's that are no parameters."""
    unused: tuple[str, ...] = ()
    """Stored tensors that the model does not use, such as layers for several tokens at once, or a vision tower."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Stored name -> the other stored name of the same values."""

    def base_names(self, modules: Iterable[str]) -> dict[str, str]:
        """Return the checkpoint's names of modules that are to be adapted.
        Raises ValueError: one whose weight is not stored as the model has it: an adapter of it would fit no engine."""
        names = {}
        for module in modules:
            pieces = self.pieces.get(f"{module}.weight", [])
            stored = pieces[0].name if pieces else ""
            if not stored.endswith(".weight") or pieces != [Piece.whole(stored, self.stored[stored].shape)]:
                raise ValueError(
                    f"model.lora.target_modules: the checkpoint holds {module} within {stored or 'nothing'}, so an "
                    "adapter of it would have no name there; leave it out"
                )
            names[module] = stored.removesuffix(".weight")
        return names


def map_weights(hf: Any, stored: Mapping[str, StoredTensor]) -> WeightMap:
    """Follow transformers' loading of a checkpoint.
    `hf`: the model, with or without memory for its parameters.
    Raises ValueError: tensors that are missing, unknown, of another shape, or converted in a way that cannot be
    followed."""
    model = {name: tensor for name, tensor in hf.state_dict().items() if isinstance(tensor, torch.Tensor)}
    traced = {name: Traced(t.shape, (Piece.whole(name, t.shape),)) for name, t in stored.items()}
    made, unknown = convert(hf, model, traced)
    parameters = {id(tensor): name for name, tensor in hf.named_parameters()}
    canonical = {n: parameters.get(id(t), n) for n, t in hf.named_parameters(remove_duplicate=False)}
    pieces: dict[str, list[Piece]] = {}
    tied: dict[str, str] = {}
    for name in sorted(made, key=lambda name: canonical.get(name, name) != name):  # a tied tensor's first name first
        if tuple(made[name].shape) != tuple(model[name].shape):
            names = sorted({piece.name for piece in made[name].pieces})
            raise ValueError(
                f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: the checkpoint holds "
                f"{list(made[name].shape)}, the config says {list(model[name].shape)} (for {name})"
            )
        first = pieces.setdefault(canonical.get(name, name), [])
        if first:
            tied[made[name].pieces[0].name] = first[0].name
        if not first or made[name].pieces[0].name != LM_HEAD:  # engines take that of tied models from the embedding
            first += made[name].pieces
    buffers = frozenset(model.keys() - canonical.keys())
    _refuse_gaps(hf, stored, {canonical.get(n, n) for n in model} - pieces.keys(), buffers, unknown)
    _refuse_parts(stored, pieces)
    return WeightMap(stored, pieces, buffers, tuple(unknown), tied)


def _refuse_gaps(
    hf: Any, stored: Mapping[str, StoredTensor], missing: set[str], buffers: frozenset[str], unknown: Sequence[str]
) -> None:
    """Raise for tensors that the model lacks, and for stored ones of which nobody knows what they are."""
    optional = "|".join(getattr(hf, "_keys_to_ignore_on_load_missing", None) or [r"$^"])
    lacking = sorted(name for name in missing if not (name in buffers and re.search(optional, name)))
    if lacking:
        example = f"; it holds {min(stored)}" if stored else ""
        raise ValueError(
            f"the weights lack {lacking[0]} ({len(lacking)} tensors in all){example}: they are of another model "
            "than the config, or not complete"
        )
    ignored = "|".join([_IGNORED, *(getattr(hf, "_keys_to_ignore_on_load_unexpected", None) or [])])
    strange = [name for name in unknown if not re.search(ignored, name)]
    if strange:
        raise ValueError(
            f"{stored[strange[0]].file} holds {strange[0]} ({len(strange)} such tensors), for which "
            f"{type(hf).__name__} has no place: the weights are of another model than the config"
        )


def _refuse_parts(stored: Mapping[str, StoredTensor], pieces: Mapping[str, list[Piece]]) -> None:
    """Raise where parts of a stored tensor are nowhere in the model: it could not be published again."""
    used: dict[str, int] = {}
    for piece in (piece for parts in pieces.values() for piece in parts):
        used[piece.name] = used.get(piece.name, 0) + prod(end - begin for begin, end in piece.stored)
    for name, count in used.items():
        if count != prod(stored[name].shape):
            raise ValueError(
                f"{stored[name].file} holds {name} of {prod(stored[name].shape)} values, of which the model uses "
                f"{count}: it could not be published under its own name"
            )
