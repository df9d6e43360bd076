"""The values of a micro-batch's sequences and tokens, cut out of a rank batch as numpy arrays."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prime_hpc.store.batches import RankBatch


class Columns(NamedTuple):
    """A micro-batch's sequences (the first four: one value a sequence) and their tokens, without the empty ones."""

    lengths: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    groups: NDArray[np.int64]
    rollouts: NDArray[np.int64] | None
    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    ce_weights: NDArray[np.float32]


def columns_of(batch: RankBatch, sequences: slice, tokens: slice, kept: NDArray[np.bool_]) -> Columns:
    """Return the columns of a part of a rank batch; of an empty one, a dummy sequence of one token that is no target.

    Args:
        batch: the rank's part of the batch.
        sequences: of the micro-batch.
        tokens: of those sequences.
        kept: bool, of each sequence, whether it has tokens.
    """
    nothing = np.zeros(1, np.float32)
    if not kept.any():
        ones = np.ones(1, np.int64)
        rollouts = None if batch.rollout_tokens is None else ones
        zeros = np.zeros(1, np.int64)
        masked = np.zeros(1, bool)
        return Columns(ones, np.ones(1, np.float32), zeros, rollouts, zeros, masked, nothing, nothing, nothing)
    return Columns(
        lengths=np.diff(batch.seq_offsets[sequences.start : sequences.stop + 1])[kept],
        temperatures=batch.temperatures[sequences][kept],
        groups=batch.group_ids[sequences][kept],
        rollouts=None if batch.rollout_tokens is None else batch.rollout_tokens[sequences][kept].astype(np.int64),
        ids=batch.token_ids[tokens].astype(np.int64),
        mask=batch.loss_mask[tokens],
        logprobs=batch.logprobs[tokens],
        advantages=batch.advantages[tokens],
        ce_weights=batch.ce_weights[tokens] if batch.ce_weights is not None else nothing,
    )
