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
"""

import torch

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
