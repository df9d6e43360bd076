"""Rewards as they are, of rollouts and of tokens.

REINFORCE without a baseline (Williams 1992): A_i = r_i. Also called none.

Edge cases: groups of one rollout are fine. Rewards that are never negative push every sampled token up, some less
than others: with large groups prefer a baseline.

`gae`: rewards of single tokens for a critic in the trainer (PPO, arXiv 1707.06347), which makes advantages of them by
generalized advantage estimation (`prime_hpc/trainer/critic`). Of each sample

    r_t = R, the reward of its trace, penalties taken off, at the last token that trains,  else  0

Edge cases: groups of one are fine, and nothing compares rollouts. A trace in several samples (a context that was
shortened on its way) gives each of them its reward: all of them led there, and a value is of what a sample shows.
"""

import numpy as np

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray, RewardGroup, traces_of


def reinforce(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    return group.rewards.copy()


class TokenRewards:
    """See the module, `gae`."""

    def __init__(self, config: AdvantageConfig) -> None:
        pass

    def score_group(self, group: RewardGroup) -> FloatArray:
        """Return the rewards themselves: what the log shows of rollouts."""
        return group.rewards.copy()

    def score_tokens(self, group: RewardGroup, advantages: FloatArray) -> list[list[FloatArray]]:
        """For every rollout, each of its samples, the tokens' rewards, float64[L]."""
        rewards = {(trace.episode, trace.number): trace.reward for trace in traces_of(group)}
        found = [[np.zeros(sample.num_tokens) for sample in episode.result.samples] for episode in group.episodes]
        for i, (episode, rows) in enumerate(zip(group.episodes, found, strict=True)):
            for sample, row in zip(episode.result.samples, rows, strict=True):
                row[np.flatnonzero(sample.loss_mask)[-1:]] = rewards[i, sample.trace]
        return found
