"""KL divergence to another policy, estimated from one sampled token (Schulman 2020, "Approximating KL").

With d = log pi(t) - log q(t), q the other policy (a frozen reference, or the one that sampled):

    k1 = d                        unbiased for KL(pi || q) under pi; as a loss its gradient is 0 in expectation
    k2 = d^2 / 2                  low variance; as a loss its gradient is that of KL(pi || q) under pi
    k3 = exp(-d) - 1 + d          unbiased and never negative; GRPO's (arXiv 2402.03300, eq. 4)

Edge cases: d saturates at +-20, so that k3 cannot overflow; there its gradient is 0. log q = -inf saturates, too.
Off-policy tokens are not reweighted: on stale batches the estimate is that of the sampling policy's tokens. With
`trainer.loss.kl.unbiased` it is times pi(t) / mu(t), which saturates at e^+-20: differentiable with k1 and k3, whose
value and gradient are then unbiased for those of KL(pi || q) under mu (DeepSeek-V3.2, arXiv 2512.02556); a constant
with k2, whose gradient alone is.

**In the rewards** (`in_rewards`; Ziegler et al. 2019, arXiv 1909.08593, section 2.2) the estimate is of mu, the policy
that sampled, and a constant: r_t -= beta kl_t. With `target_kl` K, the mean of the batch's estimates,
controls beta:

    beta *= 1 + clip(K / target_kl - 1, -0.2, 0.2) n / horizon        n: sequences of the batch

Theirs is the KL of a whole reply; here, as in verl, that of a token, so that a target does not hang on lengths.
"""

import torch

from prime_hpc.config.sections.trainer import KLConfig
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


class KLCoefficient:
    """The weight of a KL penalty in the rewards, over a run's steps."""

    def __init__(self, config: KLConfig) -> None:
        self._config, self.estimator = config, config.estimator
        self.state = torch.tensor([config.coef], dtype=torch.float64)
        """float64[1], in host memory, the same on all ranks: what a checkpoint keeps."""

    @property
    def value(self) -> float:
        """Beta of the next step."""
        return float(self.state[0])

    def observe(self, kl: float, num_sequences: float) -> None:
        """Take note of a step's mean estimate, in nats a token, and of how many sequences it is."""
        if (target := self._config.target_kl) is not None:
            error = min(max(kl / target - 1, -0.2), 0.2)
            self.state *= max(1 + error * num_sequences / self._config.horizon, 0.0)
