"""Negative log-likelihood of the batch's tokens, whoever sampled them: imitation (`orchestrator.advantage.type = sft`).

    l_t = - log pi(t)

The same as supervised fine-tuning's loss, over rollouts. Advantages are not looked at, and there is no importance
ratio; a KL penalty may stand beside it.

Edge cases: what the engine reported does not matter here, so log mu = -inf is harmless; the mismatch alarm is off,
since another model may have sampled the tokens. All trained tokens count, those of bad rollouts too.
"""

import torch

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import Bounds, Targets, Terms, register


@register("nll", normalize="token")
def nll(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    loss = -targets.logprobs
    return Terms(loss, torch.zeros_like(loss, dtype=torch.bool))
