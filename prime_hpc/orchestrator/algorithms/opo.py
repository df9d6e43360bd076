"""OPO: the variance-minimal baseline, which weighs rewards by length (arXiv 2505.23585, section 3.2).

    A_i = r_i - sum_j l_j r_j / sum_j l_j

l is the number of sampled tokens: a sequence's squared gradient norm grows with it. The paper trains exactly on-policy
(`async_level = 0`) with the plain policy gradient (`trainer.loss.type = reinforce`).

Edge cases: equal rewards give exact zeros. Equal lengths give Dr. GRPO's advantages. No tokens at all counts as equal
lengths.
"""

import numpy as np

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray, RewardGroup, all_equal


def opo(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    if all_equal(group.rewards):
        return np.zeros_like(group.rewards)
    weights = group.num_tokens if group.num_tokens.any() else None
    return group.rewards - np.average(group.rewards, weights=weights)
