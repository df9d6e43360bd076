"""The rows of tokens that a rank computes for a micro-batch.

    one row, samples behind each other (packed)        what the samples of a group begin with is computed once
    that row cut into spans                            with context parallelism: this rank's span
    a row for each sample, padded at its end           for models that cannot be packed (`config.families`)

What comes after a sample does not change it in a causal model, whatever its layers are. Rows of one micro-batch have
the length of its longest sample, so samples of similar length share one.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prime_hpc.trainer.ops.context_parallel import local_targets
from prime_hpc.trainer.ops.prefix_attention import shared_rows
from prime_hpc.trainer.parallel import Parallel

Indices = NDArray[np.int64]


class Rows(NamedTuple):
    """Tokens of a micro-batch as this rank computes them; with T tokens and N targets altogether."""

    ids: Indices
    """int64[rows * L], token ids."""
    positions: Indices
    """int64[rows * L], the place of each in its sample."""
    predicting: Indices
    """int64[n], tokens that predict a target of this rank."""
    lengths: Indices
    """int64[S], of the samples, with a last one of padding where ranks split the row."""
    num_rows: int = 1
    own: Any = slice(None)
    """Index of this rank's targets into all N."""
    shared: Indices | None = None
    """int64[T], the computed token of each token; None: each is computed."""
    source: Indices | None = None
    """int64[rows * L], the token of the micro-batch that each is; -1 for padding. None: they are the same."""


def lay_out(
    ids: Indices,
    positions: Indices,
    predicting: Indices,
    lengths: Indices,
    groups: Indices,
    parallel: Parallel | None,
    *,
    keys: NDArray[np.integer[Any]] | None = None,
    share_prefixes: bool,
    single_rows: bool,
) -> Rows:
    """From samples behind each other to what this rank computes.

    Args:
        ids: int64[T], token ids.
        positions: int64[T], the place of each token in its sample.
        predicting: int64[N], tokens that predict a target.
        lengths: int64[S], all positive.
        groups: int64[S], samples of one group may begin alike.
        parallel: the layout; None: the whole row.
        keys: int[T], what tokens must have in common to be computed as one; None: their ids.
        share_prefixes: compute what samples of a group begin with once; not where ranks split rows.
        single_rows: a row for each sample; not with context parallelism.
    """
    multiple = 1 if parallel is None else parallel.row_multiple
    if single_rows:
        num, longest = len(lengths), -(-int(lengths.max()) // multiple) * multiple
        place = np.repeat(np.arange(num), lengths) * longest + positions
        padded, source = np.zeros(num * longest, np.int64), np.full(num * longest, -1)
        padded[place], source[place] = ids, np.arange(len(ids))
        return Rows(
            padded,
            np.tile(np.arange(longest), num),
            place[predicting],
            np.full(num, longest),
            num_rows=num,
            source=source,
        )
    if parallel is not None and multiple > 1:
        fill = -len(ids) % multiple
        source = np.append(np.arange(len(ids)), np.full(fill, -1))
        ids, positions = np.append(ids, np.zeros(fill, np.int64)), np.append(positions, np.arange(fill))
        lengths = np.append(lengths, fill) if fill else lengths
        span = len(ids) // parallel.dims.cp
        first, stop = parallel.cp_rank * span, (parallel.cp_rank + 1) * span
        own = local_targets(predicting, first, stop)
        here = slice(first, stop)
        return Rows(ids[here], positions[here], predicting[own] - first, lengths, own=own, source=source[here])
    shared = shared_rows(ids if keys is None else keys, lengths, groups) if share_prefixes else None
    if shared is None:
        return Rows(ids, positions, predicting, lengths)
    where = np.unique(shared, return_index=True)[1]
    return Rows(ids[where], positions[where], shared[predicting], lengths, shared=shared, source=where)


def group_rows(lengths: Indices, budget: int, together: int = 1) -> list[Indices]:
    """Return samples by micro-batch, the longest first: ranks then meet with rows of similar length.

    Args:
        lengths: int64[S]; empty samples are left out.
        budget: rows times their length in one micro-batch; a longer sample is alone in one.
        together: samples that follow each other and stay together.
    """
    if together > 1:
        groups = group_rows(lengths.reshape(-1, together).max(1), budget // together)
        return [(group[:, None] * together + np.arange(together)).ravel() for group in groups]
    order = np.argsort(-lengths, kind="stable")
    order = order[lengths[order] > 0]
    groups, at = [], 0
    while at < len(order):
        count = max(1, budget // int(lengths[order[at]]))
        groups.append(order[at : at + count])
        at += count
    return groups
