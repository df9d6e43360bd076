"""IPO: the symmetric trust region of PRIME-RL's loss of that name; no paper of its own (compare `dppo.py`).

    l_t = - M_t r_t A_t,      M_t = 0 where pi(t) - mu(t) > high or pi(t) - mu(t) < -low, whatever the sign of A_t

A token whose probability has moved too far does not train at all, not even back towards the sampling policy. Default
bounds 0.1. Its squared-log-ratio regulariser is `trainer.loss.kl` with target `behaviour`, estimator `k2`.

Edge cases: as in `dppo.py`.
"""

import torch

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import Bounds, Targets, Terms


def ipo(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    moved = targets.logprobs.detach().exp() - targets.anchor.exp()
    masked = (moved > bounds.high) | (moved < -bounds.low)
    gain = targets.log_ratio().exp() * targets.advantages
    return Terms(torch.where(masked, torch.zeros_like(gain), -gain), masked)
