"""Top-p, top-k and min-p of the sampler, reproduced on the trainer's own logits.

The policy that is trained is the distribution that is sampled: the softmax at the temperature over the tokens that
vLLM's sampler would keep, in its order:

    min-p (arXiv 2407.01082):  p(v) >= min_p * max p
    top-k (arXiv 1805.04833):  v among the k likeliest of these
    top-p (arXiv 1904.09751):  the tokens likelier than v together have less than top_p of what is left

The trained token is kept even where it falls outside (its logits moved since it was sampled, or rounding did it), so
that its importance ratio exists. Which tokens are kept is not differentiated. What follows from the distribution,
entropy and KL, is of the truncated one too; the reference model's is truncated by its own logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

ROW_BLOCKS = 8
"""Parts in which whole rows of the vocabulary are gone through, to need an eighth of the logits' memory beside them."""
LISTED = 1024
"""So many of the likeliest tokens are sorted; rows whose nucleus is larger are sorted whole."""
SORTED_ROWS = 64
"""Rows that are sorted whole at once."""
REMOVED = -1e30
"""Logit of a token that is never sampled: its exponential is 0, and so is that times itself (infinity's is not)."""


@dataclass(frozen=True)
class Truncation:
    """Of each of N targets."""

    top_p: torch.Tensor
    """float32 [N], in (0, 1]; 1: off."""
    top_k: torch.Tensor
    """int64 [N]; 0: off."""
    min_p: torch.Tensor
    """float32 [N], in [0, 1]; 0: off."""
    most_k: int
    """Largest top_k."""
    is_bounded: bool
    """True if every target that has a top_p has a top_k as well: no row is ever sorted whole, nothing synchronises."""

    def part(self, which: slice | torch.Tensor) -> "Truncation":
        """Of some of the targets."""
        return Truncation(self.top_p[which], self.top_k[which], self.min_p[which], self.most_k, self.is_bounded)


class Cut(NamedTuple):
    """The logits of each of n rows that are kept."""

    least: torch.Tensor
    """float32 [n], the smallest; -inf: all."""
    share: torch.Tensor
    """float32 [n], logarithm of the share of the logits equal to `least` that is kept: in bfloat16 ties are common."""


class Ranks(Protocol):
    """The part of `logprobs.VocabShard` that is needed here."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, in place."""

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' columns of a matrix, in the ranks' order."""


def find_cut(
    logits: torch.Tensor, truncation: Truncation, shard: Ranks | None, *, keeps_ties: bool | None = None
) -> Cut:
    """Find where vLLM's sampler would cut each row.

    Args:
        logits: float32 `[n, V]` at the temperature, or this rank's columns of them.
        shard: sums and gathers over the ranks that have the other columns. Collective then.
        keeps_ties: whether all tokens that tie for the k-th place are kept, as vLLM's sampler on a CPU does, or exactly
            k, as its GPU kernel does; default: as on this device.
    """
    if keeps_ties is None:
        keeps_ties = logits.device.type == "cpu"
    top_p, top_k = truncation.top_p, truncation.top_k
    listed = _largest(logits, max(LISTED, truncation.most_k + 1), shard)
    top, num_listed = listed[:, 0], listed.shape[1]
    kth = listed.gather(1, (top_k - 1).clamp(min=0, max=num_listed - 1)[:, None])[:, 0]
    has_k = (top_k > 0) & (top_k < num_listed)
    floor = torch.maximum(torch.where(has_k, kth, -torch.inf), top + truncation.min_p.log())
    mass, ties = _sums(logits, top, floor, shard)
    kept_ties = ties
    if not keeps_ties:
        cuts_ties = has_k & (floor <= kth)
        kept_ties = torch.where(cuts_ties, top_k - (listed > floor[:, None]).sum(1), ties)
        mass = mass - torch.where(cuts_ties, (ties - kept_ties) * (floor - top).exp(), 0)

    exps = (listed - top[:, None]).exp()
    kept = (exps.cumsum(1) - exps < (top_p * mass)[:, None]) & (listed >= floor[:, None])
    count = kept.sum(1).clamp(min=1)
    least = listed.gather(1, (count - 1)[:, None])[:, 0]
    kept_tied = count - (listed > least[:, None]).sum(1)
    nucleus = top_p < 1
    if not truncation.is_bounded:
        _sort_whole(logits, (nucleus & (count == num_listed)).nonzero()[:, 0], top_p, floor, least, kept_tied, shard)
    least = torch.where(nucleus, least, floor)
    kept_ties = torch.where(nucleus, kept_tied, kept_ties)
    ties = _sums(logits, top, least, shard)[1]
    return Cut(least, (kept_ties.clamp(min=1) / ties.clamp(min=1)).clamp(max=1).log())


def apply_cut(logits: torch.Tensor, cut: Cut, column: torch.Tensor, own: torch.Tensor | None) -> None:
    """Remove what is not sampled, in place, but never the target.

    Args:
        logits: float32 `[n, V]`, or this rank's columns of them.
        column: int64 `[n]` of each target.
        own: bool `[n]`, whether this rank has that column; None: it has all.
    """
    target = logits.gather(1, column[:, None])
    for rows in _blocks(logits):
        block, least = logits[rows], cut.least[rows, None]
        tied = block == least
        block.masked_fill_(block < least, REMOVED)
        block.add_(tied * cut.share[rows, None])
    if own is not None:
        target = torch.where(own[:, None], target, logits.gather(1, column[:, None]))
    logits.scatter_(1, column[:, None], target)


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    step = max(1, -(-logits.shape[0] // ROW_BLOCKS))
    for first in range(0, logits.shape[0], step):
        yield slice(first, first + step)


def _largest(logits: torch.Tensor, count: int, shard: Ranks | None) -> torch.Tensor:
    """Return the largest logits of each row over all ranks, descending, `[n, min(count, V)]`."""
    values = logits.topk(min(count, logits.shape[1]), dim=1).values
    if shard is None:
        return values
    gathered = shard.columns(values)
    return gathered.topk(min(count, gathered.shape[1]), dim=1).values


def _sums(
    logits: torch.Tensor, top: torch.Tensor, floor: torch.Tensor, shard: Ranks | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the sum of exp(l - top) over the logits from `floor` on, and how many are equal to `floor`."""
    sums = torch.empty((2, len(top)), dtype=top.dtype, device=top.device)
    for rows in _blocks(logits):
        block, least = logits[rows], floor[rows, None]
        sums[1, rows] = (block == least).sum(1, dtype=top.dtype)
        sums[0, rows] = (block - top[rows, None]).exp_().masked_fill_(block < least, 0).sum(1)
    mass, ties = sums if shard is None else shard.total(sums)
    return mass, ties


def _sort_whole(
    logits: torch.Tensor,
    rows: torch.Tensor,
    top_p: torch.Tensor,
    floor: torch.Tensor,
    least: torch.Tensor,
    kept_tied: torch.Tensor,
    shard: Ranks | None,
) -> None:
    """Find `least` and how many equal to it are kept, in place, of the rows whose nucleus exceeds what was listed."""
    for chosen in rows.split(SORTED_ROWS):
        whole = logits[chosen] if shard is None else shard.columns(logits[chosen])
        values = whole.sort(dim=1, descending=True).values
        exps = (values - values[:, :1]).exp_().masked_fill_(values < floor[chosen, None], 0).double()
        sums = exps.cumsum(1)
        kept = (sums - exps < top_p[chosen, None] * sums[:, -1:]) & (values >= floor[chosen, None])
        count = kept.sum(1).clamp(min=1)
        least[chosen] = values.gather(1, (count - 1)[:, None])[:, 0]
        kept_tied[chosen] = count - (values > least[chosen, None]).sum(1)
