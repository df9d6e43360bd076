"""How far back the layers of a model attend, by its config."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NO_ATTENTION = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent", "moe", "mlp"})
"""Entries of `layer_types` of layers in which no token attends to another."""
_SLIDING = frozenset({"sliding_attention", "hybrid_sliding"})


@dataclass(frozen=True)
class Reach:
    """The tokens that one attends to: all before it, those in a sliding window, or those in its chunk."""

    window: int | None = None
    chunk: int | None = None

    def squared_lengths(self, lengths: NDArray[np.int64]) -> float:
        """Twice the pairs of different tokens of which one attends to the other, and all tokens, in sequences of these
        lengths: without a bound the sum of their squares."""
        whole = lengths.astype(np.float64)
        if self.chunk is not None:
            return float((whole // self.chunk * self.chunk**2 + (whole % self.chunk) ** 2).sum())
        beyond = np.maximum(whole - (np.inf if self.window is None else self.window), 0)
        return float((whole**2 - beyond * (beyond + 1)).sum())


def layer_reach(config: Any, layer: int | None) -> Reach | None:
    """Return how far a layer's tokens attend; None: they do not. `config`: the text model's, or None."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds and layer is not None and layer < len(kinds) else "sliding_attention"
    if kind in _NO_ATTENTION:
        return None
    if kind == "chunked_attention":
        return Reach(chunk=getattr(config, "attention_chunk_size", None))
    return Reach(window=getattr(config, "sliding_window", None) if kind in _SLIDING else None)
