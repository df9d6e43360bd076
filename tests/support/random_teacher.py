"""A teacher of random distributions, for batches."""

from dataclasses import replace

import numpy as np

from prime_hpc.store.batch.rank_batch import RankBatch


def with_random_teacher(batch: RankBatch, vocab_size: int, *, top_k: int, seed: int = 0) -> RankBatch:
    """The batch with the likeliest tokens of a random softmax where a token trains; of every fifth of these the last
    one is of no model, and one of them is the token itself."""
    rng, trained = np.random.default_rng([seed, 3]), batch.target_mask()
    logits = 2 * rng.standard_normal((batch.num_tokens, vocab_size))
    logits[np.arange(0, batch.num_tokens, 2), batch.token_ids[::2] % vocab_size] = 9.0
    logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    ids = np.argsort(-logprobs, axis=1)[:, :top_k].astype(np.int32)
    values = np.take_along_axis(logprobs, ids, axis=1).astype(np.float32)
    ids[np.flatnonzero(trained)[::5], -1] = vocab_size + 40
    ids[~trained], values[~trained] = np.iinfo(np.int32).max, 0
    return replace(batch, teacher_ids=ids, teacher_logprobs=values)
