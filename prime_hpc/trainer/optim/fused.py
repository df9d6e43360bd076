"""Matrices that a model keeps as one parameter: gate and up projections, queries, keys and values.

Muon's orthogonalisation is of one linear map, and its authors orthogonalise these maps separately (Jordan et al. 2024):
of a fused one, the spectrum of the whole would be flattened, and a small part would move with its neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_CONCATENATED = ("qkv_proj", "Wqkv", "W_pack", "c_attn")
"""Names of projections whose outputs are all queries, then all keys, then all values."""


@dataclass(frozen=True)
class Fused:
    """How a parameter's last two dimensions hold several matrices: `groups` times one after the other along `dim`, a
    block of `sizes[i]` of each."""

    dim: int
    """-2 (rows) or -1 (columns)."""
    sizes: tuple[int, ...]
    groups: int = 1

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the matrices [..., rows, columns], copies."""
        blocks = whole.movedim(self.dim, -2)
        blocks = blocks.reshape(*blocks.shape[:-2], self.groups, sum(self.sizes), blocks.shape[-1])
        parts = blocks.split(self.sizes, dim=-2)
        return [part.flatten(-3, -2).movedim(-2, self.dim).contiguous() for part in parts]

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the reverse of `split`."""
        rows = [part.movedim(self.dim, -2) for part in parts]
        blocks = [r.unflatten(-2, (self.groups, n)) for r, n in zip(rows, self.sizes, strict=True)]
        return torch.cat(blocks, dim=-2).flatten(-3, -2).movedim(-2, self.dim)


def find_fused(module: nn.Module) -> dict[int, Fused]:
    """id of every parameter below a module that holds several matrices -> how.

    Known are `gate_up_proj` (of a block, or of a stack of experts, rows first), `qkv_proj` and its like, and GPT-NeoX's
    `query_key_value`, which goes head by head. What does not fit the config's heads counts as one matrix.
    """
    found: dict[int, Fused] = {}
    for owner in module.modules():
        for name, child in [*owner.named_children(), *owner.named_parameters(recurse=False)]:
            weight = child if isinstance(child, nn.Parameter) else getattr(child, "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.ndim not in (2, 3):
                continue
            fused = _gate_up(owner, name, weight) or _attention(owner, name, child, weight)
            if fused is not None:
                found[id(weight)] = fused
    return found


def _gate_up(owner: nn.Module, name: str, weight: torch.Tensor) -> Fused | None:
    """Gate and up projection, each as high as the down projection is wide."""
    down = getattr(owner, "down_proj", None)
    down = getattr(down, "weight", down)
    if name != "gate_up_proj" or not isinstance(down, torch.Tensor):
        return None
    width = down.shape[-1]
    rows_first = weight.shape[-2] == 2 * width and weight.shape[-1] == down.shape[-2]
    return Fused(-2, (width, width)) if rows_first else None


def _attention(owner: nn.Module, name: str, child: Any, weight: torch.Tensor) -> Fused | None:
    """Return queries, keys and values, by the config's heads."""
    config = getattr(owner, "config", None)
    by_head = name == "query_key_value" and getattr(config, "model_type", "").startswith("gpt_neox")
    if config is None or weight.ndim != 2 or not (by_head or name in _CONCATENATED):
        return None  # before its heads are asked for: transformers answers for no model whose layers' differ
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not heads or not hidden:
        return None
    size = getattr(config, "head_dim", None) or hidden // heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    dim = -1 if type(child).__name__ == "Conv1D" else -2  # GPT-2's has its outputs in the columns
    if name in _CONCATENATED and weight.shape[dim] == (heads + 2 * keys) * size:
        return Fused(dim, (heads * size, keys * size, keys * size))
    return Fused(dim, (size,) * 3, heads) if by_head and weight.shape[dim] == 3 * heads * size else None
