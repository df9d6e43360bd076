"""REINFORCE without a baseline (Williams 1992): A_i = r_i. Also called none.

Edge cases: groups of one rollout are fine. Rewards that are never negative push every sampled token up, some less
than others: with large groups prefer a baseline.
"""

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray, RewardGroup


def reinforce(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    return group.rewards.copy()
