"""Covariance of log-probability and advantage: the few tokens that drive the policy's entropy down are cut from the
gradient (Clip-Cov) or held back by a penalty (KL-Cov; Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning
for Reasoning Language Models", arXiv 2505.22617).

    Cov_t = (log mu(t) - mean log mu) (A_t - mean A),        means over all N trained tokens of the batch

    clip:  ceil(share N) tokens drawn from those with low <= Cov_t <= high do not train
    kl:    the ceil(share N) tokens of highest Cov_t lose  coef |log pi(t) - log mu(t)|  more

The report has the policy's log pi, on-policy, where it is log mu; verl has means and shares of one micro-batch. With
log mu all of it is known from the batch: no forward pass before the step, and the same tokens whatever the layout, the
packing or the rounding of a kernel. Draws depend on the step and on what a sequence is (its sample and tokens), so that
a repeated step draws the same.

The penalty is that of the report's code, with gradient coef sign(log pi - log mu): of a synchronous run it has the sign
of what engine and trainer compute differently, so KL-Cov is for runs whose policy moves ahead (`async_level` 1 and
more). It is to the policy that sampled, with an importance correction too.

Edge cases: means and shares are of the tokens in the batch; groups without signal that stay out of it are not among
them. KL-Cov never takes a token whose covariance is not positive. Tokens that tie for the last place, in float32, are
all taken. Divisors count what is cut. A batch without targets is left alone.
"""

import zlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from prime_hpc.config.sections.trainer import CovarianceConfig
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.objectives.base import MAX_LOG_RATIO
from prime_hpc.trainer.objectives.top_share import top_share_threshold

_NONE = 1e-9
"""A covariance up to this is 0: means in float64 leave that of equal advantages, and its sign, to rounding."""


def high_covariance(
    config: CovarianceConfig, batch: RankBatch, step: int, device: torch.device, *, counts: bool
) -> Sequence[torch.Tensor]:
    """Return which targets are chosen, bool[N] of each micro-batch, on the device. Collective.

    Args:
        batch: this rank's part.
        step: of the run.
        counts: see `top_share_threshold`.
    """
    trained = batch.target_mask()
    values = [array[trained].astype(np.float64) for array in (batch.logprobs, batch.advantages)]
    known = [len(values[0]), *(float(v.sum()) for v in values)] if counts else [0, 0, 0]
    sums = torch.tensor(known, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    count, *totals = sums.tolist()
    log_mu, advantages = (v - total / max(count, 1) for v, total in zip(values, totals, strict=True))
    covariance = (log_mu * advantages).astype(np.float32)  # the means' rounding, which layouts differ in, makes no rank
    if config.type == "clip":
        inside = (covariance >= config.low) & (covariance <= config.high)
        score = np.where(inside, _draws(batch, step)[trained], -np.inf)
    else:
        score = np.where(covariance > _NONE, covariance, -np.inf)
    threshold = top_share_threshold(torch.from_numpy(score).to(device), config.share, counts=counts).item()
    chosen = np.zeros(batch.num_tokens, bool)
    chosen[trained] = (score >= threshold) & np.isfinite(score)
    computed = batch.computed_mask()
    sizes = [int(computed[batch.tokens_of(i)].sum()) for i in range(batch.num_micro_batches)]
    return torch.from_numpy(chosen[computed]).to(device).split(sizes)


def _draws(batch: RankBatch, step: int) -> NDArray[np.float64]:
    """float64[T] in [0, 1), a draw of each token."""
    draws = [np.zeros(0)]
    for sample, (start, stop) in zip(batch.sample_ids.tolist(), pairwise(batch.seq_offsets.tolist()), strict=True):
        seed = [step, sample, zlib.crc32(batch.token_ids[start:stop].tobytes())]
        draws.append(np.random.default_rng(seed).random(stop - start))
    return np.concatenate(draws)


def bounded(
    config: CovarianceConfig,
    losses: torch.Tensor,
    chosen: torch.Tensor,
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
) -> torch.Tensor:
    """Return the targets' losses, [N], those that are `chosen`, bool[N], cut or with their penalty."""
    if config.type == "clip":
        return torch.where(chosen, torch.zeros_like(losses), losses)
    distance = (logprobs - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).abs()
    return torch.where(chosen, losses + config.coef * distance, losses)
