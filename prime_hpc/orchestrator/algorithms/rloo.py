"""Baselines that are other rollouts' rewards: those of the group, or one of the likeliest tokens.

RLOO: the other rollouts' mean (Kool et al. 2019; arXiv 2402.14740, section 3).

    A_i = r_i - 1/(G-1) sum_{j != i} r_j  =  G/(G-1) (r_i - mean(r))

Unbiased, where GRPO's own-reward-in-the-mean shrinks the gradient by (G-1)/G.

Edge cases: equal rewards give exact zeros; a group of one has no others and is unusable.

ReMax: the reward of the policy's greedy rollout of the same prompt (arXiv 2310.10505, algorithm 2).

    A_i = r_i - r(greedy)

Unbiased, for the greedy rollout does not depend on what was sampled; it costs one rollout more of each prompt, which
does not train, and the paper samples one beside it (`rollouts_per_example: 1`).

Edge cases: a reward equal to the greedy one gives an exact zero, so a group of equal rewards may have a signal. The
greedy rollout has the penalties of the others, as one of their group. One that failed, or was cut off by its deadline
while `timeout = drop`, leaves nothing to compare with: the group is dropped; nor does one cut off by another limit
while `overlong = drop`: the group does not train. It may be of another version than they are. Where episodes have
several agents, each trace is compared with the greedy one's traces of its role; a role that is not there gives zeros; a
greedy one that was cut off while `timeout = penalize` counts for each of the roles. A seat with a `sampling` of its
own, which would not be greedy, is refused.
"""

import numpy as np

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import SPREAD_TOLERANCE, FloatArray, RewardGroup, centered


def rloo(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    size = len(group.rewards)
    return centered(group.rewards) * (size / (size - 1))


def remax(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    if group.greedy is None:
        return np.zeros_like(group.rewards)
    advantages = group.rewards - group.greedy.rewards.mean()
    largest = max(1.0, float(np.abs(group.rewards).max()))
    return np.where(np.abs(advantages) <= SPREAD_TOLERANCE * largest, 0.0, advantages)
