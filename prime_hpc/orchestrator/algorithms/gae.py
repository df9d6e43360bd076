"""Rewards of single tokens for a critic in the trainer (PPO, arXiv 1707.06347), which makes advantages of them by
generalized advantage estimation (`prime_hpc/trainer/critic`).

The last trained token of each sample has the reward of its trace, penalties taken off, all others 0:

    r_t = R  at the last sampled token,  else  0

Edge cases: groups of one rollout are fine, and nothing compares rollouts. A trace in several samples (a context that
was shortened on its way) gives each of them its reward: all of them led there, and a value is of what a sample shows.
"""

import numpy as np

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray, RewardGroup, traces_of


class TokenRewards:
    """See the module."""

    def __init__(self, config: AdvantageConfig) -> None:
        pass

    def score_group(self, group: RewardGroup) -> FloatArray:
        """Return the rewards themselves: what the log shows of rollouts."""
        return group.rewards.copy()

    def score_tokens(self, group: RewardGroup, advantages: FloatArray) -> list[list[FloatArray]]:
        """For every rollout, each of its samples, the tokens' rewards, float64[L]."""
        rewards = {(trace.episode, trace.number): trace.reward for trace in traces_of(group)}
        found = []
        for i, episode in enumerate(group.episodes):
            rows = []
            for sample in episode.result.samples:
                row = np.zeros(sample.num_tokens)
                row[np.flatnonzero(sample.loss_mask)[-1:]] = rewards[i, sample.trace]
                rows.append(row)
            found.append(rows)
        return found
