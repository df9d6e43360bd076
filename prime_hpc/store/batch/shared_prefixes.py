"""Prefixes that samples of one group share, for `packing.pack`: tokens that a micro-batch computes once.

The trainer computes the prompt of a group's samples once where they lie in one micro-batch
(`trainer/ops/prefix_attention.py`), so it is worth keeping groups together: with a prompt as long as its answers and
eight rollouts, 44 % of all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sharing:
    """Of N samples."""

    groups: Indices
    """[N] the group of each, 0 .. G - 1."""
    prefixes: Indices
    """[N] how many tokens each has in common with all others of its group."""

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed if every group lies in one micro-batch."""
        _, firsts = np.unique(self.groups, return_index=True)
        return int(self.prefixes.sum() - self.prefixes[firsts].sum())

    def computed(self, sizes: Indices, bins: Indices, num_bins: int) -> Indices:
        """[num_bins] tokens that are computed in each micro-batch.

        Args:
            sizes: [N] tokens of each sample.
            bins: [N] its micro-batch.
        """
        _, firsts = np.unique(bins * len(self.groups) + self.groups, return_index=True)
        saved = self.prefixes.copy()
        saved[firsts] = 0
        return np.bincount(bins, weights=sizes - saved, minlength=num_bins).astype(np.int64)

    def chunks(self, sizes: Indices, most: float) -> Indices:
        """[N] the chunk of each sample, 0 .. C - 1: a group, or as few and as even parts of it as have about `most`
        tokens at most."""
        totals = np.bincount(self.groups, weights=sizes)
        parts = np.maximum(1, np.ceil(totals / most)).astype(np.int64)
        order = np.lexsort((-sizes, self.groups))
        sorted_groups = self.groups[order]
        place = np.empty(len(sizes), np.int64)  # of each within its group, longest first
        place[order] = np.arange(len(sizes)) - np.searchsorted(sorted_groups, sorted_groups)
        chunk = (np.cumsum(parts) - parts)[self.groups] + place % parts[self.groups]
        return np.unique(chunk, return_inverse=True)[1]  # parts may be more than samples


def find_sharing(token_ids: Sequence[npt.NDArray[np.integer[Any]]], group_ids: Sequence[int]) -> Sharing:
    """Compare the samples of every group.

    Args:
        token_ids: N times int [tokens of the sample], or their `token_keys`.
        group_ids: [N] any numbers.
    """
    groups = np.unique(np.asarray(group_ids, np.int64), return_inverse=True)[1]
    common: dict[int, npt.NDArray[np.integer[Any]]] = {}
    for tokens, group in zip(token_ids, groups.tolist(), strict=True):
        known = common.get(group)
        common[group] = tokens if known is None else known[: _num_equal(known, tokens)]
    lengths = np.array([len(common[group]) for group in range(len(common))], np.int64)
    return Sharing(groups, lengths[groups] if len(groups) else np.empty(0, np.int64))


def token_keys(
    token_ids: npt.NDArray[np.integer[Any]],
    routed: npt.NDArray[np.unsignedinteger[Any]] | None,
    images: npt.NDArray[np.integer[Any]] | None = None,
) -> npt.NDArray[np.integer[Any]]:
    """Return what two tokens must have in common, as one number, to be computed as one: their ids, the image that they
    are a part of, and the experts that the trainer sends them to.

    Args:
        token_ids: int [T].
        routed: [T, layers, k] recorded experts; None: none are prescribed.
        images: [T] one number for each image (`images.image_keys`, or numbers of one table); None: there are none.

    Returns:
        [T]; different tokens have different keys up to a chance of 2**-64.
    """
    if images is not None:
        mixed = images.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + token_ids.astype(np.uint64)
        token_ids = np.where(images > 0, mixed.view(np.int64), token_ids)
    if routed is None or not len(token_ids):
        return token_ids
    rows = routed.reshape(len(token_ids), -1).astype(np.uint64)
    factors = np.random.default_rng(0).integers(1, 2**63, rows.shape[1] + 1, dtype=np.uint64) * np.uint64(2)
    keys = rows @ (factors[1:] | np.uint64(1)) + token_ids.astype(np.uint64) * (factors[0] | np.uint64(1))
    return keys.view(np.int64)


def _num_equal(a: npt.NDArray[np.integer[Any]], b: npt.NDArray[np.integer[Any]]) -> int:
    """With how many equal tokens two sequences begin."""
    least = min(len(a), len(b))
    differs = a[:least] != b[:least]
    return int(differs.argmax()) if differs.any() else least
