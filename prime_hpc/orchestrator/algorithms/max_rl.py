"""MaxRL: maximum likelihood of success (arXiv 2602.02710).

    A_i = (r_i - mean(r)) / mean(r)

Hard questions weigh about 1/p: in expectation it is the gradient of the maximum-likelihood objective, log p of a
correct answer, cut off at order G, where the plain policy gradient has p alone.

Edge cases: rewards are meant to be 0 or 1, at least never negative. A group whose mean is not positive holds no
success and gets zeros; so do equal rewards.
"""

import numpy as np

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray, RewardGroup, centered


def max_rl(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    mean = float(group.rewards.mean())
    return centered(group.rewards) / mean if mean > 0 else np.zeros_like(group.rewards)
