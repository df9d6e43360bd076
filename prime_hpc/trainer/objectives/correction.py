"""Corrections for a trainer whose policy is not the engine's, as a constant factor of each token's loss.

**Importance correction.**

With c = pi / mu, a constant, of a token, of its whole sequence (the product), or that product's |y|-th root:

    truncate (TIS, Yao et al. 2025; IMPALA's rho, arXiv 1802.01561):   min(c, high)
    mask     (MIS; IcePop in Ring-1T, arXiv 2510.18855):        c where low <= c <= high, else 0

and c = 0 for all of a sequence the geometric mean of whose ratios is outside [geometric_low, geometric_high], whatever
the level (verl's Geo-RS; beside token-level truncation its Geo-RS-Token-TIS). There tokens that rose and fell cancel
out; `reject` leaves out sequences by an estimate that is never negative (verl's seq_mean_k3 and the like): with
d = log(pi / mu), the mean, the sum or the greatest of d^2 / 2 (k2) or e^d - 1 - d (k3) over the sequence's tokens is
above a limit. Divisors count what is left out.

With `batch_normalize` c is divided by its mean over the whole step (self-normalised importance sampling; verl's
`rollout_is_batch_normalize`): over targets, or over sequences where a sequence has one ratio, left out ones as 0. It
is then made from the policy before the batch's first update, by a forward pass of its own.

The objective's own ratio then compares pi with the trainer's policy before the batch's first update instead of with mu
(the decoupled form, arXiv 2110.00641): the mismatch is counted once. Where a batch has several updates pi in c is that
policy, too. With one update a batch the ratio is 1 in value, so PPO-like clips never bind and only their gradient at 1
counts.

**Off-policy sequence masking** (DeepSeek-V3.2, arXiv 2512.02556, eq. 9), beside it or any objective's own ratio: a
token does not train where A < 0 and 1/|y| sum_t log(mu / pi) > `off_policy_mask`. What the policy no longer says, and
was bad, teaches it little and may push it anywhere.

Edge cases: the ratio saturates at e^+-20. Where mu gave the token probability 0, `truncate` uses high and `mask` 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from prime_hpc.config.sections.trainer import CorrectionConfig, RejectConfig
from prime_hpc.trainer.batching.micro_batches import MicroBatch, objective_part
from prime_hpc.trainer.objectives.base import MAX_LOG_RATIO, Targets


def correction_factor(
    config: CorrectionConfig, targets: Targets, behaviour: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor [N] of each target's loss, and bool [N]: where the ratio was truncated, masked or left out.

    Args:
        targets: their `anchor`, log pi before the batch's first update, and sequences.
        behaviour: float32 `[N]`, log mu.
    """
    difference = (targets.anchor - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    geometric = targets.sequence_mean(difference)[targets.sequence].exp()
    left_out = geometric < config.geometric_low
    if config.geometric_high is not None:
        left_out = left_out | (geometric > config.geometric_high)
    if config.reject is not None:
        left_out = left_out | _rejected(config.reject, targets, difference)
    if config.level != "token":
        reduce = targets.sequence_mean if config.level == "geometric" else targets.sequence_sum
        difference = reduce(difference)[targets.sequence].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = difference.exp()
    outside = ratio > config.high
    if config.type == "mask":
        outside = outside | (ratio < config.low)
        left_out = left_out | outside
    factor = torch.where(left_out, torch.zeros_like(ratio), ratio.clamp(max=config.high))
    return factor, outside | left_out


def mean_factor(
    config: CorrectionConfig, micros: Iterable[MicroBatch], old: Sequence[torch.Tensor], *, counts: bool
) -> torch.Tensor:
    """Return the mean of the factors over all ranks' micro-batches, float32 0-dim; 1 where all are 0. Collective.

    Args:
        micros: this rank's.
        old: float32 `[N]` of each, log pi before the batch's first update.
        counts: whether they are this rank's own: one of several ranks that have the same part of the batch.
    """
    parts = [torch.zeros(2, dtype=torch.float64, device=own.device) for own in old[:1]]
    for micro, logprobs in zip(micros, old, strict=True):
        whole = replace(micro, old_logprobs=logprobs)
        part = whole if micro.trained is None else objective_part(whole)
        assert part.old_logprobs is not None
        anchors = (part.old_logprobs, part.old_logprobs)
        targets = Targets(*anchors, part.advantages, part.sequence, part.targets_of_sequence)
        factor, _ = correction_factor(config, targets, part.behaviour_logprobs)
        each = factor if config.level == "token" else targets.sequence_mean(factor)
        number = part.targets_of_sequence if config.level == "token" else part.targets_of_sequence > 0
        parts.append(torch.stack([each.double().sum(), number.sum().double()]))
    sums = torch.stack(parts).sum(0)
    dist.all_reduce(sums if counts else sums.zero_())
    mean = (sums[0] / sums[1].clamp(min=1)).float()
    return torch.where(mean > 0, mean, torch.ones_like(mean))


def _rejected(config: RejectConfig, targets: Targets, difference: torch.Tensor) -> torch.Tensor:
    """bool [N]: the targets of sequences whose divergence is above the limit; `difference` is log(pi / mu)."""
    divergence = difference.square() / 2 if config.estimator == "k2" else torch.expm1(difference) - difference
    reduce = {"mean": targets.sequence_mean, "sum": targets.sequence_sum, "max": targets.sequence_max}[config.over]
    return reduce(divergence)[targets.sequence] > config.above


def off_policy(threshold: float, targets: Targets, behaviour: torch.Tensor) -> torch.Tensor:
    """bool [N]: the targets that off-policy sequence masking leaves out; `behaviour` as in `correction_factor`."""
    away = (behaviour - targets.logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (targets.advantages < 0) & (targets.sequence_mean(away)[targets.sequence] > threshold)
