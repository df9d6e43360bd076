"""RLOO: the other rollouts' mean as the baseline (Kool et al. 2019; arXiv 2402.14740, section 3).

    A_i = r_i - 1/(G-1) sum_{j != i} r_j  =  G/(G-1) (r_i - mean(r))

Unbiased, where GRPO's own-reward-in-the-mean shrinks the gradient by (G-1)/G.

Edge cases: equal rewards give exact zeros; a group of one has no others and is unusable.
"""

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray, RewardGroup, centered


def rloo(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    size = len(group.rewards)
    return centered(group.rewards) * (size / (size - 1))
