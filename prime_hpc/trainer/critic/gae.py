"""Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16) over the trained tokens of
sequences, and the critic's loss.

With the trained tokens of a sequence numbered 0 .. n-1, V_t the critic's value of all that comes before token t, r_t
the token's reward, V_n = 0:

    delta_t = r_t + gamma V_(t+1) - V_t
    A_t     = delta_t + gamma lam A_(t+1)
    R_t     = V_t + A'_t        A' with the critic's own lam (1: the discounted sum of the rewards to come)
    loss_t  = 1/2 (V_t - R_t)^2

and with `value_clip` = c, V' the value before the batch's first update (of no effect in that one),

    loss_t  = 1/2 max((V_t - R_t)^2, (clip(V_t, V'_t - c, V'_t + c) - R_t)^2)

What a tool or a user says between the policy's turns is no token of its own: nothing is decided there, so that delta
goes from the last token of a turn to the first of the next. With `length_adaptive_alpha` lam is 1 - 1 / (alpha n), at
least 0, of each sequence (VAPO, arXiv 2504.05118, eq. 12).

All in float64 on the device, by doubling: after k rounds every token has the discounted sum of 2^k deltas, so that a
sequence of n tokens takes log2(n) rounds and the host waits for none.

Edge cases: a sequence that a limit cut short ends there all the same (V_n = 0). One whose advantages are all equal is
left at 0 by whitening, as is a batch of one token.
"""

from dataclasses import dataclass

import torch

from prime_hpc.config.sections.trainer import CriticConfig
from prime_hpc.trainer.batching.micro_batches import MicroBatch
from prime_hpc.trainer.objectives import LossStats

WHITEN_EPS = 1e-8
"""Added to the variance by which advantages are divided."""


@dataclass(frozen=True)
class Estimates:
    """The values of a micro-batch's N trained tokens and what they and the rewards come to, each float64[N]."""

    values: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


def estimate(config: CriticConfig, values: torch.Tensor, rewards: torch.Tensor, sequence: torch.Tensor) -> Estimates:
    """Return the advantages and returns of the N trained tokens of a micro-batch.

    Args:
        values, rewards: [N], sequence after sequence.
        sequence: int64[N], the sequence of each, never falling.
    """
    values, rewards = values.double(), rewards.double()
    follows = torch.zeros_like(values)
    if len(values) > 1:
        follows[:-1] = torch.where(sequence[1:] == sequence[:-1], values[1:], 0.0)
    deltas = rewards + config.gamma * follows - values
    lam: float | torch.Tensor = config.lam
    if config.length_adaptive_alpha is not None:
        first, behind = torch.searchsorted(sequence, sequence), torch.searchsorted(sequence, sequence, right=True)
        lam = (1 - 1 / (config.length_adaptive_alpha * (behind - first).double())).clamp(min=0)
    advantages = discounted_sums(deltas, config.gamma * lam, sequence)
    of_critic = discounted_sums(deltas, config.gamma * config.critic_lam, sequence)
    return Estimates(values, advantages, values + of_critic)


def discounted_sums(terms: torch.Tensor, factor: float | torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """float64[N], x_t + factor x_(t+1) + factor^2 x_(t+2) + ... to the end of each sequence.
    `factor`: one for all, or of each token [N], the same throughout a sequence."""
    sums, reach = terms, 1
    while reach < len(sums):
        later = torch.where(sequence[reach:] == sequence[:-reach], sums[reach:], 0.0)
        near = factor if isinstance(factor, float) else factor[:-reach]
        sums = torch.cat([sums[:-reach] + near * later, sums[-reach:]])
        factor, reach = factor * factor, 2 * reach
    return sums


def value_loss(
    micro: MicroBatch, values: torch.Tensor, weights: torch.Tensor, clip: float | None = None
) -> tuple[torch.Tensor, LossStats]:
    """Half the squared error to the returns, and no statistics besides: those are of the whole batch. `clip`: see the
    module."""
    assert micro.returns is not None and micro.old_values is not None
    error = (values - micro.returns).square()
    if clip is not None:
        near = torch.minimum(torch.maximum(values, micro.old_values - clip), micro.old_values + clip)
        error = torch.maximum(error, (near - micro.returns).square())
    return (weights * error).sum() / 2, LossStats({}, {})
