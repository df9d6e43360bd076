"""VESPO: REINFORCE with a smooth weight of the whole sequence's ratio (arXiv 2602.10693, appendix I).

    l_t = - sg(phi(W)) A_t log pi(t),      W = prod_t pi(t) / mu(t),      phi(W) = W^c1 exp(c2 (1 - W))

W is the true ratio of the sequence, without a root of its length. phi is 1 at W = 1, greatest at W = c1 / c2 and falls
to 0 on both sides; (c1, c2) is `gamma_pos` where A > 0, else `gamma_neg`. Normalised over tokens, as in TRL.

Edge cases: nothing is clipped, so `clipped` is 0. log W saturates at +-20, where phi is about 0: a long sequence whose
policy moved, or whose engine computes otherwise, counts for nothing. log mu = -inf is harmless. Behind a correction
W = 1.
"""

import torch

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import MAX_LOG_RATIO, Bounds, Targets, Terms


def vespo(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    log_w = targets.sequence_sum(targets.log_ratio())[targets.sequence].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    rises, pairs = targets.advantages > 0, zip(config.gamma_pos, config.gamma_neg, strict=True)
    c1, c2 = (torch.where(rises, torch.full_like(log_w, up), torch.full_like(log_w, down)) for up, down in pairs)
    weight = (c1 * log_w + c2 * (1 - log_w.exp())).exp()
    loss = -weight * targets.advantages * targets.logprobs
    return Terms(loss, torch.zeros_like(weight, dtype=torch.bool), log_w)
