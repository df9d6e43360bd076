"""SAPO: a soft gate in place of the clip (Soft Adaptive Policy Optimization, arXiv 2511.20347, eq. 5-7).

    L = 1/G sum_i 1/|o_i| sum_t - f(r_it) A_it,      f(r) = sigmoid(tau (r - 1)) 4 / tau,      r_t = pi(t) / mu(t)

tau is `tau_pos` where A > 0, else `tau_neg`. On-policy the gradient is REINFORCE's (f' = 1 at r = 1); away from it a
token's weight falls smoothly, 4 sigmoid (1 - sigmoid) r, on both sides, and faster with the greater tau: negative
advantages raise the probability of many other tokens, so theirs is the greater one.

Edge cases: nothing is clipped, so `clipped` is 0. r saturates at e^+-20, where the gate is flat. The value of the loss
is not that of PPO (2 A / tau at r = 1): compare gradients.
"""

import torch

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import Bounds, Targets, Terms


def sapo(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module; `trainer.loss.tau_pos` and `tau_neg` are the gate's temperatures."""
    ratio, advantages = targets.log_ratio().exp(), targets.advantages
    positive, negative = (torch.full_like(advantages, tau) for tau in (config.tau_pos, config.tau_neg))
    tau = torch.where(advantages > 0, positive, negative)
    gate = (1 - torch.sigmoid(tau * (1 - ratio))) * 4 / tau  # exact also in the gradient where the gate is nearly open
    return Terms(-gate * advantages, torch.zeros_like(ratio, dtype=torch.bool))
