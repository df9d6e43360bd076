"""Terms beside any objective, the distance to another policy and the policy's entropy.

**KL divergence** to another policy, estimated from one sampled token (Schulman 2020, "Approximating KL").

With d = log pi(t) - log q(t), q the other policy (a frozen reference, or the one that sampled):

    k1 = d                        unbiased for KL(pi || q) under pi; as a loss its gradient is 0 in expectation
    k2 = d^2 / 2                  low variance; as a loss its gradient is that of KL(pi || q) under pi
    k3 = exp(-d) - 1 + d          unbiased and never negative; GRPO's (arXiv 2402.03300, eq. 4)

Edge cases: d saturates at +-20, so that k3 cannot overflow; there its gradient is 0. log q = -inf saturates, too.
Off-policy tokens are not reweighted: on stale batches the estimate is that of the sampling policy's tokens.

**Entropy** of the policy at the trained tokens: a bonus for it, and the tokens where it is high.

    loss -= alpha sum_t w_t H_t,      H_t = - sum_v pi(v) log pi(v)   over the whole vocabulary, differentiable

With a target the coefficient is controlled (Skywork-OR1, arXiv 2505.22312), H the mean over a step's tokens:

    c += delta  where H <= target,  else  c -= delta,   within [0, max_coef];      alpha = c where H <= target, else 0

The report measures H on the rollouts before the update; here, as in TRL, it is that of the step before, so that no step
computes anything twice.

**High entropy alone** (Wang et al. 2025, "Beyond the 80/20 Rule", arXiv 2506.01939, eq. 5): a token trains where H_t is
among the ceil(share N) highest of all N tokens of the batch, over all ranks; divisors count what is left out.

Edge cases: a step without targets leaves the coefficient as it is. Tokens that tie for the last place all train. Of a
truncated distribution (`orchestrator.sampling.top_p`) it is the entropy of what is left.
"""

import math

import numpy as np
import torch
import torch.distributed as dist

from prime_hpc.config.sections.trainer import EntropyConfig
from prime_hpc.trainer.objectives.base import MAX_LOG_RATIO


def kl_estimate(logprobs: torch.Tensor, other: torch.Tensor, estimator: str) -> torch.Tensor:
    """Return the estimate of each target, [N], differentiable in `logprobs`.

    Args:
        logprobs: float32 `[N]`, log pi.
        other: float32 `[N]`, log q, a constant.
        estimator: `k1`, `k2` or `k3`.
    """
    difference = (logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    assert estimator == "k3", estimator
    return torch.expm1(-difference) + difference


class EntropyBonus:
    """The bonus' coefficient over a run's steps."""

    def __init__(self, config: EntropyConfig) -> None:
        self._config = config
        self._values = np.array([config.coef, 0.0])  # c; H of the last step
        self.state = torch.from_numpy(self._values)
        """float64[2], in host memory, the same on all ranks: what a checkpoint keeps."""

    @property
    def coef(self) -> float:
        """Alpha of the next step."""
        if self._config.target is None:
            return self._config.coef
        coef, entropy = self._values.tolist()
        return float(coef) if entropy <= self._config.target else 0.0

    def observe(self, entropy: float) -> None:
        """Take note of a step's mean entropy, in nats a token."""
        if self._config.target is not None:
            change = self._config.delta if entropy <= self._config.target else -self._config.delta
            self._values[:] = min(max(self._values[0] + change, 0.0), self._config.max_coef), entropy


def entropy_threshold(entropy: torch.Tensor, share: float, *, counts: bool) -> torch.Tensor:
    """Return the entropy from which on tokens are among the highest `share` of all ranks' tokens, 0-dim. Collective.

    Args:
        entropy: float32 `[N]`, of this rank's tokens.
        share: in (0, 1].
        counts: whether they are this rank's own: one of several ranks that have the same part of the batch.
    """
    own = entropy if counts else entropy[:0]
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=own.device)
    dist.all_gather_single(sizes, torch.tensor([len(own)], device=own.device))
    lengths = sizes.tolist()
    most = max(*lengths, len(own))  # a rehearsal reads no true lengths
    padded = own.new_full((most,), -math.inf)
    padded[: len(own)] = own
    table = own.new_empty((len(lengths), most))
    dist.all_gather_single(table, padded[None])
    if not table.numel():
        return own.new_zeros(())
    place = max(1, math.ceil(round(share * sum(lengths), 6)))  # however small the share, one token is of it
    return table.flatten().sort(descending=True).values[place - 1]  # `kthvalue` and `deterministic` exclude each other
