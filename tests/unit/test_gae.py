"""Generalized advantage estimation and the critic's loss against sums written out in float64, token by token."""

from typing import Any

import numpy as np
import pytest
import torch

from prime_hpc.config.sections.trainer import CriticConfig
from prime_hpc.trainer.critic.gae import discounted_sums, estimate
from tests.proofs.reference_algorithms import gae


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lam": 0.95},
        {"lam": 0.0, "critic_lam": 0.0},
        {"gamma": 0.97, "lam": 0.9, "critic_lam": 0.8},
        {"gamma": 0.99, "length_adaptive_alpha": 0.05},
        {"length_adaptive_alpha": 2.0, "critic_lam": 0.5},
    ],
)
def test_advantages_and_returns_are_those_of_the_sums_written_out(changes: dict[str, Any]) -> None:
    config = CriticConfig.model_validate(changes)
    rng = np.random.default_rng(len(changes))
    lengths = [1, 33, 2, 700, 1, 64]
    sequence = np.repeat([0, 2, 3, 5, 6, 9], lengths)  # those between them train no token
    values = rng.standard_normal(len(sequence)).astype(np.float32)
    rewards = np.where(rng.random(len(sequence)) < 0.1, rng.standard_normal(len(sequence)), 0).astype(np.float32)
    found = estimate(config, *map(torch.from_numpy, (values, rewards, sequence)))
    parts = np.split(np.arange(len(sequence)), np.cumsum(lengths)[:-1])
    how = config.gamma, config.lam, config.critic_lam, config.length_adaptive_alpha
    expected = [gae(values[p].tolist(), rewards[p].tolist(), *how) for p in parts]
    for mine, theirs in zip((found.advantages, found.returns), zip(*expected, strict=True), strict=True):
        assert mine.dtype == torch.float64
        np.testing.assert_allclose(mine.numpy(), np.concatenate(theirs), rtol=1e-12, atol=1e-12)


def test_a_reward_at_the_end_is_every_tokens_return() -> None:
    values, rewards = torch.randn(6), torch.tensor([0.0, 0, 2, 0, 0, -1])
    found = estimate(CriticConfig(), values, rewards, torch.tensor([0, 0, 0, 4, 4, 4]))
    torch.testing.assert_close(found.returns, torch.tensor([2.0, 2, 2, -1, -1, -1], dtype=torch.float64))
    torch.testing.assert_close(found.advantages, found.returns - values.double())


def test_nothing_at_all_has_no_sums() -> None:
    none, nowhere = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    found = estimate(CriticConfig(length_adaptive_alpha=0.05), none, none, nowhere)
    assert not len(found.advantages) and not len(found.returns)
    assert discounted_sums(torch.tensor([3.0]), 0.5, torch.tensor([0])).tolist() == [3.0]
