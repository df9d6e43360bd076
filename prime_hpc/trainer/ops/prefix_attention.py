"""Tokens that several samples of a packed row begin with are computed once.

The rollouts of a group begin with the same prompt. A causal model computes the same hidden states for it in each of
them, so the row keeps one copy: embeddings, projections, norms and feed-forward layers see it once, and attention
reads it from there for every sample (technique: "Prefix Grouper", arXiv 2506.05433). Gradients of the one copy are the
sums over the samples. Nothing is approximated; only the order of some sums differs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

LEAST_SHARE = 0.05
"""Sharing fewer of a row's tokens is not worth spreading them in every attention layer."""


def shared_rows(
    token_ids: NDArray[np.integer[Any]], lengths: NDArray[np.int64], groups: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Return the row that computes each token of a packed micro-batch.

    Samples of one group share the longest prefix that all of them have in common.

    Args:
        token_ids: int64[T], or what else tells tokens apart (`shared_prefixes.token_keys`).
        lengths: int64[S], all positive.
        groups: int64[S], the group of each sequence.

    Returns:
        int64[T] into the kept tokens, which keep their order; None where too few tokens are shared.
    """
    starts = np.cumsum(lengths) - lengths
    owner = np.arange(len(token_ids))
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if len(members) < 2:
            continue
        offsets = np.arange(lengths[members].min())
        places = starts[members][:, None] + offsets
        differs = (token_ids[places] != token_ids[places[0]]).any(axis=0)
        length = int(differs.argmax()) if differs.any() else len(offsets)
        owner[places[:, :length]] = places[0, :length]
    kept = owner == np.arange(len(owner))
    if len(owner) - kept.sum() < LEAST_SHARE * len(owner):
        return None
    return (np.cumsum(kept) - 1)[owner]


@dataclass(frozen=True)
class Spread:
    """From the rows that are computed to the tokens of all samples, and back."""

    rows: torch.Tensor
    """int64[T], the row of each token."""
    first: torch.Tensor
    """int64[rows], the token whose result each row takes."""
    tokens: torch.Tensor
    """int64[T], the tokens in the order of their rows."""
    starts: torch.Tensor
    """int64[rows], where each row's tokens begin in `tokens`."""

    @classmethod
    def of(cls, rows: NDArray[np.int64]) -> "Spread":
        """From `shared_rows`; in host memory."""
        tokens = np.argsort(rows, kind="stable")
        _, starts = np.unique(rows[tokens], return_index=True)
        return cls(*(torch.from_numpy(a) for a in (rows, tokens[starts], tokens, starts)))

    def to_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, H, D] -> [T, H, D]`; in the backward pass a row's gradient is the sum over its tokens."""
        return _Copy.apply(x, self)

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, H, D] -> [rows, H, D]`: every token of a row has the same result, the first one's is taken."""
        return _Take.apply(x, self)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, spread: Spread) -> torch.Tensor:
        ctx.spread = spread  # type: ignore[attr-defined]
        return x.index_select(0, spread.rows)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        spread: Spread = ctx.spread  # type: ignore[attr-defined]
        flat = grad.reshape(grad.shape[0], -1)
        summed = F.embedding_bag(spread.tokens, flat, spread.starts, mode="sum")  # in a fixed order, unlike index_add
        return summed.view(-1, *grad.shape[1:]), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, spread: Spread) -> torch.Tensor:
        ctx.spread = spread  # type: ignore[attr-defined]
        return x.index_select(0, spread.first)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        spread: Spread = ctx.spread  # type: ignore[attr-defined]
        out = grad.new_zeros((len(spread.rows), *grad.shape[1:]))
        return out.index_copy_(0, spread.first, grad), None
