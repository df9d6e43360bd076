"""REINFORCE: the plain policy gradient (Williams 1992), without any importance ratio.

    l_t = - A_t log pi(t)

What RLOO (arXiv 2402.14740) and OPO (arXiv 2505.23585) train with: both are exactly on-policy and differ in the
baseline alone (`orchestrator.advantage.type`). Off-policy it is biased; `trainer.loss.correction` makes it REINFORCE
with truncated (TIS) or masked (MIS) importance sampling.

Edge cases: what the engine reported does not matter here, so log mu = -inf is harmless.
"""

import torch

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import Bounds, Targets, Terms


def reinforce(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    loss = -targets.advantages * targets.logprobs
    return Terms(loss, torch.zeros_like(loss, dtype=torch.bool))
