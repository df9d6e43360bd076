"""Corrections for a trainer whose policy is not the engine's, as a constant factor of each token's loss.

**Importance correction.**

With c = pi / mu, a constant, of a token, of its whole sequence (the product), or that product's |y|-th root:

    truncate (TIS, Yao et al. 2025; IMPALA's rho, arXiv 1802.01561):   min(c, high)
    mask     (MIS; IcePop in Ring-1T, arXiv 2510.18855):        c where low <= c <= high, else 0

The objective's own ratio then compares pi with the trainer's policy before this update instead of with mu (the
decoupled form, arXiv 2110.00641): the mismatch is counted once. With one update a batch that ratio is 1 in value, so
PPO-like clips never bind and only their gradient at 1 counts.

**Off-policy sequence masking** (DeepSeek-V3.2, arXiv 2512.02556, eq. 9), beside it or any objective's own ratio: a
token does not train where A < 0 and 1/|y| sum_t log(mu / pi) > `off_policy_mask`. What the policy no longer says, and
was bad, teaches it little and may push it anywhere.

Edge cases: the ratio saturates at e^+-20. Where mu gave the token probability 0, `truncate` uses high and `mask` 0.
"""

import torch

from prime_hpc.config.sections.trainer import CorrectionConfig
from prime_hpc.trainer.objectives.base import MAX_LOG_RATIO, Targets


def correction_factor(
    config: CorrectionConfig, targets: Targets, behaviour: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor [N] of each target's loss, and bool [N]: where the ratio was truncated or masked.

    Args:
        targets: their log pi and sequences.
        behaviour: float32 `[N]`, log mu.
    """
    difference = (targets.logprobs.detach() - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if config.level != "token":
        reduce = targets.sequence_mean if config.level == "geometric" else targets.sequence_sum
        difference = reduce(difference)[targets.sequence].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = difference.exp()
    outside = ratio > config.high
    if config.type == "truncate":
        return ratio.clamp(max=config.high), outside
    outside = outside | (ratio < config.low)
    return torch.where(outside, torch.zeros_like(ratio), ratio), outside


def off_policy(threshold: float, targets: Targets, behaviour: torch.Tensor) -> torch.Tensor:
    """bool [N]: the targets that off-policy sequence masking leaves out; `behaviour` as in `correction_factor`."""
    away = (behaviour - targets.logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (targets.advantages < 0) & (targets.sequence_mean(away)[targets.sequence] > threshold)
