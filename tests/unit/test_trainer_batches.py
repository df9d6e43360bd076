"""From rank batches to micro-batches: nothing lost, lags right, any number of ranks."""

import numpy as np
import pytest

from prime_hpc.config.sections.trainer import FakeDataConfig
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import batch_facts, fake_batch, make_micro_batch, redistribute
from tests.support.tiny_model import random_rank_batch

LENGTHS = [[17, 40, 9], [60], [33, 5], [50, 12], []]


def sequences_of(batches: list[RankBatch]) -> list[tuple]:
    """Every sequence with all that belongs to it, in an order of its own."""
    rows = []
    for b in batches:
        for s in range(b.num_sequences):
            part = slice(int(b.seq_offsets[s]), int(b.seq_offsets[s + 1]))
            tokens = (b.token_ids, b.loss_mask, b.logprobs, b.versions, b.advantages)
            rows.append((int(b.sample_ids[s]), float(b.temperatures[s]), *(tuple(x[part].tolist()) for x in tokens)))
    return sorted(rows)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_redistribution_loses_and_doubles_nothing(world_size: int) -> None:
    whole = random_rank_batch(LENGTHS, seed=0)
    parts = [redistribute([whole], rank, world_size) for rank in range(world_size)]
    assert len({p.num_micro_batches for p in parts}) == 1
    for part in parts:
        part.check()
    assert sequences_of(parts) == sequences_of([whole])
    assert sequences_of([redistribute(parts, 0, 1)]) == sequences_of([whole])
    total = sum(make_micro_batch(p, i).num_targets for p in parts for i in range(p.num_micro_batches))
    assert total == batch_facts(whole, 1).num_targets == int(whole.loss_mask.sum())


def test_lag_counts_sampled_targets_only() -> None:
    batch = random_rank_batch([[4, 4]], seed=0)
    versions = np.array([-1, 3, 3, 1, -1, -1, 2, 3], dtype=np.int32)
    mask = np.array([0, 1, 1, 1, 0, 1, 1, 0], dtype=bool)
    facts = batch_facts(RankBatch(**{**batch.__dict__, "versions": versions, "loss_mask": mask}), step=4)
    # step 4 trains version 3; targets were sampled by 3, 3, 1, (not sampled), 2
    assert (facts.lag_sum, facts.num_sampled, facts.lag_max) == (3.0, 4, 2)
    assert (facts.num_targets, facts.num_trained_sequences, facts.num_sequences) == (5, 2, 2)
    assert facts.lengths.tolist() == [4, 4]


def test_an_empty_micro_batch_is_one_dummy_token_without_targets() -> None:
    micro = make_micro_batch(random_rank_batch(LENGTHS, seed=0), 4)
    assert micro.input_ids.shape == (1, 1) and micro.num_targets == 0 and micro.num_tokens == 0


def test_fake_batches_repeat_and_do_not_depend_on_the_ranks() -> None:
    config = FakeDataConfig(batch_size=10, seq_len=16, micro_batch_size=4, length="variable")
    one = [fake_batch(config, 50, 0, 3, 0, 1)]
    two = [fake_batch(config, 50, 0, 3, r, 2) for r in range(2)]
    assert sequences_of(one) == sequences_of(two)
    assert two[0].num_micro_batches == two[1].num_micro_batches == 2
    assert sequences_of([fake_batch(config, 50, 0, 4, 0, 1)]) != sequences_of(one)
