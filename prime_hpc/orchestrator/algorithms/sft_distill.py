"""Distillation by imitation: the teacher samples, the policy learns its tokens (Kim & Rush 2016, arXiv 1606.07947).

    A_i = 1,    with trainer.loss.type = nll:    l_t = - log pi(t)

Rollouts come from `orchestrator.teacher`'s servers instead of the policy's: sequence-level distillation, with the
environments' harnesses, tools and rewards (which are logged). No policy version sampled the tokens, so they carry
NOT_SAMPLED, none grows stale, and there is no importance ratio; the log-probabilities on the wire are the teacher's, so
that the trainer's metric `kl` reads KL(teacher || policy) and its alarm is off.

Edge cases: all rollouts train, good or bad, except those that `overlong` takes out. A group of one is fine.
"""

import numpy as np

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray, RewardGroup


def sft(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    return np.ones_like(group.rewards)
