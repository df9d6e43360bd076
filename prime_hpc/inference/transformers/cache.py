"""Keys and values of all sequences in the batch: one row each, as transformers' attention layers ask for them.

Row i holds a sequence's keys and values at its positions 0, 1, 2, ...: there is no padding between them, and what lies
behind a sequence's end is hidden by the mask. Rows in use are the first ones, so that a decoding step reads a view.
"""

from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


@dataclass(frozen=True)
class LayerShape:
    """Keys and values of one token in one layer."""

    num_heads: int
    key_width: int
    value_width: int

    @property
    def num_values(self) -> int:
        """Numbers of one token."""
        return self.num_heads * (self.key_width + self.value_width)


def layer_shapes(kept: DynamicCache) -> list[LayerShape]:
    """Shapes of a model's layers, from the cache of a trial pass.
    Raises ValueError: a layer keeps something else than keys and values of every position."""
    shapes = []
    for i, layer in enumerate(kept.layers):
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            raise ValueError(f"layer {i} keeps a {type(layer).__name__}, not keys and values of every position")
        shapes.append(LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
    return shapes


@dataclass
class Window:
    """The rows of one forward pass, and where its tokens go."""

    first: int
    """First row."""
    num_rows: int
    positions: torch.Tensor
    """int64 [num_rows, P], P the tokens of the pass: of a prefill from one start on, of a decoding step one a row."""
    length: int
    """Positions that are read: up to the longest row's last token."""


class _Layer(CacheLayerMixin):
    """One layer's rows. transformers calls `update` once a forward pass."""

    def __init__(self, shape: LayerShape, num_rows: int, max_len: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        sizes = (shape.key_width, shape.value_width)
        self.keys, self.values = (
            torch.zeros((num_rows, shape.num_heads, max_len, width), dtype=dtype, device=device) for width in sizes
        )
        self.is_initialized = True
        self.window: Window | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the rows are there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the pass's keys and values, [rows, heads, P, width]; return all that it may look at."""
        window = self.window
        assert window is not None and self.keys is not None and self.values is not None
        rows = slice(window.first, window.first + window.num_rows)
        start = window.length - key_states.shape[2]  # of a prefill; to read it from `positions` is to wait for the GPU
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            if new.shape[2] == 1:
                kept[torch.arange(rows.start, rows.stop, device=kept.device), :, window.positions[:, 0]] = new[:, :, 0]
            else:
                kept[rows, :, start : start + new.shape[2]] = new
        return self.keys[rows, :, : window.length], self.values[rows, :, : window.length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row."""
        for kept in (self.keys, self.values):
            assert kept is not None
            kept[target, :, :length] = kept[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys; the mask itself is always given."""
        return (self.window.length if self.window else 0), 0

    def get_seq_length(self) -> int:
        """Tokens that are there before the pass, of the longest row; positions are always given."""
        return self.window.length - self.window.positions.shape[1] if self.window else 0

    def get_max_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2]


class RowCache(Cache):
    """The rows of all layers."""

    def __init__(
        self, shapes: list[LayerShape], num_rows: int, max_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take the memory of `num_rows` sequences of `max_len` tokens."""
        self.rows = [_Layer(shape, num_rows, max_len, dtype, device) for shape in shapes]
        super().__init__(layers=list(self.rows))

    def look_at(self, window: Window) -> None:
        """Use these rows in the next forward pass."""
        for layer in self.rows:
            layer.window = window

    def move(self, source: int, target: int, length: int) -> None:
        """Give a sequence another row."""
        for layer in self.rows:
            layer.move(source, target, length)
