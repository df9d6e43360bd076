"""GRPO's advantages, with and without the standard deviation.

grpo (DeepSeekMath, arXiv 2402.03300, section 4.1.2, outcome supervision), std over the group with ddof = 0:

    A_i = (r_i - mean(r)) / (std(r) + eps)

TRL and verl take the sample's, ddof = 1: their advantages are sqrt((G - 1) / G) times these in groups of G.

dr_grpo, also called grpo_no_std (arXiv 2503.20783, section 3.2): A_i = r_i - mean(r). Without the division, questions
whose rewards hardly differ do not get the weight of those that differ much.

Edge cases: equal rewards give exact zeros. eps is far below any real spread (1e-6). Where episodes have several agents
the group is one role's traces (`base.score_by_role`).
"""

import numpy as np

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray, RewardGroup, centered


def grpo(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    delta = centered(group.rewards)
    return delta / (float(np.sqrt(np.mean(delta**2))) + config.eps)


def dr_grpo(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    return centered(group.rewards)
