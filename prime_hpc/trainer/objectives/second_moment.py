"""Second-moment trust region (M2PO; Zheng et al. 2025, "Prosperity before Collapse", arXiv 2510.01161): of a step's
tokens, those whose probability has moved farthest since they were sampled do not train.

    m_t = (log pi(t) - log mu(t))^2
    left out: m_t > b,   b the greatest bound with  mean { m_t : m_t <= b } <= limit

The paper's objective is the importance-weighted advantage without a clip: `ppo_clip` with bounds that nothing reaches.
A clip cuts by each token's own ratio, and under stale data cuts most where tokens are rare and informative; this bounds
the variance of the ratios over the step, and cuts few. pi is the policy before the batch's first update, by a forward
pass of its own, and the step is the whole batch, over all ranks: the same tokens whatever the layout and the packing.
Like AReaL's, it is over all trained tokens, whatever the sign of their advantage.

Edge cases: logarithms of ratios saturate at +-20. Tokens that are equally far stay or go together. Where even the
nearest token is too far none trains. Divisors count what is left out. A batch without targets is left alone.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from prime_hpc.trainer.batching.micro_batches import MicroBatch
from prime_hpc.trainer.objectives.base import MAX_LOG_RATIO


def beyond_second_moment(
    limit: float, micros: Iterable[MicroBatch], old: Sequence[torch.Tensor], *, counts: bool
) -> Sequence[torch.Tensor]:
    """Return which targets are left out, bool[N] of each micro-batch. Collective.

    Args:
        limit: of the mean of m over what trains, above 0.
        micros: this rank's.
        old: float32 `[N]` of each, log pi before the batch's first update.
        counts: whether they are this rank's own: one of several ranks that have the same part of the batch.
    """
    moments, counted = list[torch.Tensor](), [torch.zeros(0, dtype=torch.float32, device=own.device) for own in old[:1]]
    for micro, logprobs in zip(micros, old, strict=True):
        away = (logprobs.float() - micro.behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        moments.append(away.square())
        counted.append(moments[-1] if micro.trained is None else moments[-1].index_select(0, micro.trained))
    bound = second_moment_bound(torch.cat(counted), limit, counts=counts)
    return [moment > bound for moment in moments]  # a NaN is above nothing: it stays, and the step is refused


def second_moment_bound(moments: torch.Tensor, limit: float, *, counts: bool) -> torch.Tensor:
    """Return the greatest bound, float32 0-dim, up to which all ranks' moments have a mean within the limit; -1 where
    the least is above it. Collective.

    Args:
        moments: float32 `[N]`, not negative, of this rank's tokens.
        limit: above 0.
        counts: see `beyond_second_moment`.
    """
    own = moments if counts else moments[:0]
    # floats that are not negative are ordered as their bits are: bisection by these ends after 31 steps, exactly, and
    # without a host that waits for the device
    bits, exact = own.view(torch.int32), own.double()
    low = torch.full((), -1, dtype=torch.int32, device=own.device)
    high = torch.full((), MAX_LOG_RATIO**2, dtype=torch.float32, device=own.device).view(torch.int32)
    for _ in range(31):
        middle = low + (high - low + 1) // 2
        within = bits <= middle
        sums = torch.stack([torch.where(within, exact, 0).sum(), within.sum().double()])
        dist.all_reduce(sums)
        fits = sums[0] <= limit * sums[1]  # also where there is none within
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle - 1)
    return torch.where(low < 0, low.float(), low.view(torch.float32))
