"""GDPO: each reward function is normalised by itself, then they are added (arXiv 2601.05242).

    A_i = sum_k w_k (s_ik - mean(s_k)) / (std(s_k) + eps)

s_ik is the score that function k gave rollout i, w_k its weight, mean and std are the group's. GRPO normalises the sum:
there rollouts whose rewards add up to the same have one advantage, whatever each is for, and the function that differs
most outweighs the others whatever their weights. The paper's last step, dividing by the standard deviation of the whole
batch, is `orchestrator.advantage.scale = batch` (groups have a mean of 0 already).

Edge cases: one function of weight 1 without penalties is `grpo`. A function that gave a rollout nothing counts as a
score of 0, as it does in the reward. Penalties, and the reward of a rollout that a deadline cut off, are one more
function, of weight 1: its own scale does not matter either. Equal scores of a function add exact zeros; rollouts whose
sums are equal may have a signal.
"""

from dataclasses import replace

import numpy as np

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import SPREAD_TOLERANCE, FloatArray, RewardGroup
from prime_hpc.orchestrator.algorithms.grpo import grpo


def gdpo(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    total, others, largest = np.zeros_like(group.rewards), group.rewards.copy(), 1.0
    for name in sorted({name for rewards in group.named for name in rewards}):
        scores, weights = np.array([rewards.get(name, (0.0, 0.0)) for rewards in group.named]).T
        values, weight = scores * weights, float(np.abs(weights).max())
        others, largest = others - values, max(largest, float(np.abs(values).max()))
        if weight:
            total += weight * grpo(replace(group, rewards=values / weight), config)
    others[np.abs(others) <= SPREAD_TOLERANCE * largest] = 0.0  # rounding
    return total + grpo(replace(group, rewards=others), config)
