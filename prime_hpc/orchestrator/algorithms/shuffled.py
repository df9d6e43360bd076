"""A control, not an algorithm to train with: GRPO's advantages of rewards that were dealt out anew within their group.

    A = grpo(r_perm)     perm: a random permutation of the G rollouts, fixed by the prompt's place and their lengths

Every batch has the advantages that it would have had, on other rollouts of the same prompts. What a run with it gains
on held-out tasks comes from sampling, noise and regularisation; what a run gains beyond it was taught by the reward.

Edge cases: as GRPO's. Where episodes have several agents, a role's rewards are dealt out among its traces.
"""

from dataclasses import replace

import numpy as np

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray, RewardGroup
from prime_hpc.orchestrator.algorithms.grpo import grpo


def grpo_shuffled(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    rng = np.random.default_rng([group.position, *group.num_tokens.tolist()])
    return grpo(replace(group, rewards=rng.permutation(group.rewards)), config)
