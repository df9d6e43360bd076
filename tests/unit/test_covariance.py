"""Clip-Cov and KL-Cov choose tokens over a whole batch, whatever its layout; what they do to those is proved in
`tests/proofs`."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from prime_hpc.config.sections.trainer import CovarianceConfig, LossConfig
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import make_micro_batch, redistribute
from prime_hpc.trainer.objectives.covariance import high_covariance
from tests.support.ranks import spawn
from tests.support.tiny_model import random_rank_batch

CPU = torch.device("cpu")
LENGTHS = [[20, 9], [15], [], [3, 30], [40, 7, 12]]
CLIP = CovarianceConfig(type="clip", share=0.1, low=0.05, high=1.0)
KL = CovarianceConfig(type="kl", share=0.1)


def a_batch(seed: int = 0) -> RankBatch:
    """Some tokens that the objective trains, some that echo does."""
    batch = random_rank_batch(LENGTHS, seed=seed)
    return replace(batch, ce_weights=np.where(batch.loss_mask, 0, np.arange(batch.num_tokens) % 2).astype(np.float32))


def chosen(config: CovarianceConfig, batch: RankBatch, step: int = 1, *, counts: bool = True) -> set[tuple[int, int]]:
    """(sample, token's place in the batch of its sample) of what is chosen; Collective."""
    found = set()
    for i, mark in enumerate(high_covariance(config, batch, step, CPU, counts=counts)):
        micro = make_micro_batch(batch, i)
        assert len(mark) == micro.num_targets
        part = batch.micro_batch(i)
        for place in np.flatnonzero(part.computed_mask())[mark.numpy()].tolist():
            sequence = int(np.searchsorted(part.seq_offsets, place, "right")) - 1
            assert part.loss_mask[place]
            found.add((int(part.sample_ids[sequence]), place - int(part.seq_offsets[sequence])))
    return found


def covariances(batch: RankBatch) -> dict[tuple[int, int], float]:
    """Of every target, by what `chosen` calls it."""
    trained = batch.target_mask()
    log_mu, advantages = (x[trained].astype(np.float64) for x in (batch.logprobs, batch.advantages))
    values = (log_mu - log_mu.mean()) * (advantages - advantages.mean())
    lengths = np.diff(batch.seq_offsets)
    samples, starts = np.repeat(batch.sample_ids, lengths), np.repeat(batch.seq_offsets[:-1], lengths)
    names = zip(samples[trained].tolist(), (np.arange(batch.num_tokens) - starts)[trained].tolist(), strict=True)
    return dict(zip(names, values.tolist(), strict=True))


def test_the_tokens_of_highest_covariance_are_penalised(group: None) -> None:
    of = covariances(a_batch())
    ranked = sorted(of, key=lambda token: -of[token])
    assert chosen(KL, a_batch()) == set(ranked[: math.ceil(0.1 * len(of))])
    assert len(chosen(CovarianceConfig(type="kl", share=1e-9), a_batch())) == 1
    everything = chosen(CovarianceConfig(type="kl", share=1), a_batch())
    assert everything == {token for token, value in of.items() if value > 1e-9} and len(everything) < len(of)


def test_tokens_within_the_bounds_are_drawn(group: None) -> None:
    batch = a_batch()
    of = covariances(batch)
    inside = {token for token, value in of.items() if 0.05 <= value <= 1}
    draws = [chosen(CLIP, batch, step) for step in (1, 2, 3, 1)]
    assert all(len(draw) == math.ceil(0.1 * len(of)) < len(inside) and draw < inside for draw in draws)
    assert draws[0] == draws[3] and len({frozenset(draw) for draw in draws}) == 3
    assert chosen(CLIP.model_copy(update={"share": 1.0}), batch) == inside
    again = [chosen(CLIP.model_copy(update={"share": 0.02}), batch, step) for step in range(60)]
    assert len(set().union(*again)) > 0.6 * len(inside)  # any of them may be drawn


@pytest.mark.parametrize("config", [CLIP, KL], ids=lambda config: config.type)
def test_they_are_the_same_however_the_batch_is_packed(group: None, config: CovarianceConfig) -> None:
    packed = replace(a_batch(), micro_offsets=np.array([0, 8]))
    backwards = redistribute([replace(packed, micro_offsets=np.arange(9))], 0, 1)  # the longest first
    assert backwards.sample_ids.tolist() != packed.sample_ids.tolist()
    assert chosen(config, a_batch()) == chosen(config, packed) == chosen(config, backwards)


def test_nothing_is_chosen_without_a_covariance(group: None) -> None:
    batch = a_batch()
    for same in (0.0, 0.1):
        equal = replace(batch, advantages=np.full_like(batch.advantages, same))
        assert not chosen(CLIP, equal) and not chosen(KL, equal)
    assert not chosen(CLIP, RankBatch.empty(2)) and not chosen(KL, RankBatch.empty(2))
    assert not chosen(KL, replace(batch, loss_mask=np.zeros_like(batch.loss_mask)))


def run_rank(rank: int, out: str) -> None:
    """One of four ranks: two that hold the batch's halves, one without anything, one with the second half as well."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{out}/store", 4), rank=rank, world_size=4)
    half = [0, 1, None, 1][rank]
    part = RankBatch.empty(3) if half is None else redistribute([a_batch()], half, 2)
    found = [sorted(chosen(config, part, step, counts=rank < 3)) for config in (CLIP, KL) for step in (1, 2)]
    Path(f"{out}/{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def test_they_are_the_same_over_ranks(group: None, tmp_path: Path) -> None:
    spawn(run_rank, (str(tmp_path),), 4)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert ranks[3] == ranks[1] and ranks[2] == [[]] * 4
    wanted = [chosen(config, a_batch(), step) for config in (CLIP, KL) for step in (1, 2)]
    assert [{tuple(token) for half in halves for token in half} for halves in zip(*ranks[:2], strict=True)] == wanted


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"covariance": {"share": 0}}, "greater than 0"),
        ({"covariance": {"low": 5, "high": 5}}, r"low \(5\) must be below high \(5\), or no token is drawn"),
        ({"covariance": {"type": "cut"}}, "'clip' or 'kl'"),
        ({"type": "nll", "covariance": {}}, "leave covariance out"),
        ({"correction": {"reject": {"above": 0}}}, "greater than 0"),
        ({"correction": {"reject": {"estimator": "k1", "above": 1}}}, "'k2' or 'k3'"),
    ],
)
def test_settings_that_cannot_work_are_refused(tree: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LossConfig.model_validate(tree)
