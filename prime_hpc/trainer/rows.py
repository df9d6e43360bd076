"""Each sample in a row of its own, padded at its end: for models that cannot be packed (`config.families`).

What comes after a sample does not change it in a causal model, whatever its layers are. Rows of one micro-batch have
the length of its longest sample, so samples of similar length share one.
"""

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def rows_of_their_own(
    ids: Indices, positions: Indices, predicting: Indices, lengths: Indices, multiple: int = 1
) -> tuple[Indices, Indices, Indices, Indices]:
    """From S samples behind each other to S rows of L tokens behind each other.

    Args:
        ids: int64[T], token ids.
        positions: int64[T], the place of each token in its sample.
        predicting: int64[N], tokens that predict a target.
        lengths: int64[S].
        multiple: L is rounded up to one.

    Returns:
        token ids int64[S * L] (0 where padded), positions int64[S * L], where the predicting tokens lie in them, and
        the rows' lengths int64[S], all L.
    """
    num, longest = len(lengths), -(-int(lengths.max()) // multiple) * multiple
    place = np.repeat(np.arange(num), lengths) * longest + positions
    padded = np.zeros(num * longest, np.int64)
    padded[place] = ids
    return padded, np.tile(np.arange(longest), num), place[predicting], np.full(num, longest)


def group_rows(lengths: Indices, budget: int) -> list[Indices]:
    """Samples by micro-batch, the longest first: ranks then meet with rows of similar length.

    Args:
        lengths: int64[S]; empty samples are left out.
        budget: rows times their length in one micro-batch; a longer sample is alone in one.
    """
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    groups, at = [], 0
    while at < len(order):
        count = max(1, budget // int(lengths[order[at]]))
        groups.append(order[at : at + count])
        at += count
    return groups
