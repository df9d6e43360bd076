"""One micro-batch's RL loss: the configured objective, its correction, its KL penalty, and what the log shows.

loss = sum_t w_t ( c_t l_t + coef KL_t + coef D_t ), c_t the correction's factor, 0 where off-policy masking or the
second moment leaves t out, t is not of high entropy, or Clip-Cov cuts it; D_t the divergence to the teacher
(`distillation.py`).
`covariance.py` has KL-Cov's penalty, `entropy.py` the bonus for entropy, which are added.
"""

import torch

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.sections.trainer import KLConfig, LossConfig
from prime_hpc.trainer.batching.micro_batches import MicroBatch
from prime_hpc.trainer.objectives.base import MAX_LOG_RATIO, LossStats, Targets, get_objective
from prime_hpc.trainer.objectives.correction import correction_factor, off_policy
from prime_hpc.trainer.objectives.covariance import bounded
from prime_hpc.trainer.objectives.distillation import teacher_divergence
from prime_hpc.trainer.objectives.kl import kl_estimate


def normalization(config: LossConfig) -> str:
    """`token`, `sequence` or `batch`: the configured one, or with `auto` that of the objective's paper."""
    return config.objective.normalize if config.normalize == "auto" else config.normalize


def requires_reference(config: LossConfig) -> bool:
    """Return whether micro-batches must carry the reference model's log-probabilities."""
    return config.kl is not None and config.kl.target == "reference"


def rl_loss(
    config: LossConfig, micro: MicroBatch, logprobs: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, LossStats]:
    """Loss (0-dim) and statistics of one micro-batch.

    No targets: loss 0, still connected to the graph.

    Args:
        micro: sequences, advantages, log mu and, where the config asks for it, the reference's log-probabilities.
        logprobs: float32 `[N]`, log pi, differentiable.
        weights: float32 `[N]`.

    Returns:
        the loss and its statistics over targets: see `mismatch_stats`; `clipped` (by the objective; `clipped_high`,
        `clipped_low`: those whose ratio is above 1, and below), `corrected` (by the correction; `correction_mean`:
        the weights' mean over the batch, by which they are divided), `off_policy_masked`, `second_moment_masked`,
        `low_entropy_masked`, `high_covariance` (cut, or penalised), `kl_penalty` (the estimate, without coef),
        `teacher_divergence` (likewise), `teacher_mass` (the teacher's probability of the tokens that are compared).

    Raises:
        ConfigError: a KL to the reference is asked for, but the micro-batch has no reference log-probabilities; or a
            divergence to the teacher, and it has nothing of a teacher.
    """
    objective, behaviour = get_objective(config.type), micro.behaviour_logprobs
    targets = Targets(
        logprobs=logprobs,
        anchor=_anchor(config, micro, logprobs),
        advantages=micro.advantages,
        sequence=micro.sequence,
        targets_of_sequence=micro.targets_of_sequence,
    )
    terms = objective(targets, config, config.bounds)
    stats = mismatch_stats(logprobs, behaviour)
    compared = logprobs.detach() - targets.anchor if terms.log_ratio is None else terms.log_ratio
    stats.sums["clipped"] = terms.clipped.sum().float()
    stats.sums["clipped_high"] = (terms.clipped & (compared > 0)).sum().float()
    stats.sums["clipped_low"] = (terms.clipped & (compared < 0)).sum().float()
    per_target = terms.loss
    if config.correction is not None:
        factor, outside = correction_factor(config.correction, targets, behaviour)
        if micro.correction_mean is not None:
            factor = factor / micro.correction_mean
            stats.sums["correction_mean"] = micro.correction_mean.sum()
        per_target = factor * per_target
        stats.sums["corrected"] = outside.sum().float()
    if config.off_policy_mask is not None:
        masked = off_policy(config.off_policy_mask, targets, behaviour)
        per_target = torch.where(masked, torch.zeros_like(per_target), per_target)
        stats.sums["off_policy_masked"] = masked.sum().float()
    if micro.far is not None:
        per_target = torch.where(micro.far, torch.zeros_like(per_target), per_target)
        stats.sums["second_moment_masked"] = micro.far.sum().float()
    if micro.high_entropy is not None:
        per_target = torch.where(micro.high_entropy, per_target, torch.zeros_like(per_target))
        stats.sums["low_entropy_masked"] = (~micro.high_entropy).sum().float()
    if config.covariance is not None and micro.high_covariance is not None:
        per_target = bounded(config.covariance, per_target, micro.high_covariance, logprobs, behaviour)
        stats.sums["high_covariance"] = micro.high_covariance.sum().float()
    if config.kl is not None and not config.kl.in_rewards:
        penalty = kl_estimate(logprobs, _kl_target(config.kl, micro), config.kl.estimator)
        if config.kl.unbiased:
            ratio = (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
            penalty = penalty * (ratio.detach() if config.kl.estimator == "k2" else ratio)
        stats.sums["kl_penalty"] = penalty.detach().sum()
        if config.kl.coef > 0:
            per_target = per_target + config.kl.coef * penalty
    if config.distillation is not None:
        divergence, mass = teacher_divergence(config.distillation, micro)
        stats.sums["teacher_divergence"], stats.sums["teacher_mass"] = divergence.detach().sum(), mass.sum()
        per_target = per_target + config.distillation.coef * divergence
    return (weights * per_target).sum(), stats


def _anchor(config: LossConfig, micro: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """float32[N], what the objective's ratio is to: `Targets.anchor`."""
    if config.correction is None:
        return micro.behaviour_logprobs
    return logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs


def _kl_target(config: KLConfig, micro: MicroBatch) -> torch.Tensor:
    if config.target == "behaviour":
        return micro.behaviour_logprobs
    if micro.reference_logprobs is None:
        raise ConfigError(
            "a KL to the reference model needs its log-probabilities, and this batch has none: let the trainer "
            "hold the reference (trainer.loss.kl.model), or set target = behaviour",
            "trainer.loss.kl.target",
        )
    return micro.reference_logprobs


def mismatch_stats(logprobs: torch.Tensor, behaviour: torch.Tensor) -> LossStats:
    """How far the trainer's log-probabilities are from the engine's, whatever the objective does about it.

    Of d = log pi - log mu: sum and maximum of |d| and of the ratio rho = exp(d), and the sum of rho - 1 - d, whose mean
    under mu estimates KL(mu || pi) without ever being negative (`kl`, the alarm's metric).
    """
    difference = logprobs.detach() - behaviour
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, gap = bounded.exp(), difference.abs()
    empty = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
    sums = {"logprob_diff": gap.sum(), "ratio": ratio.sum(), "kl": (ratio - 1 - bounded).sum()}
    maxima = {
        "logprob_diff_max": gap.max() if len(gap) else empty,
        "ratio_max": ratio.max() if len(ratio) else empty,
    }
    return LossStats(sums, maxima)
