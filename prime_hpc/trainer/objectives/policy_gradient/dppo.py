"""DPPO: the trust region as a divergence of probabilities instead of their ratio (arXiv 2602.04879, eq. 12-14).

    l_t = - M_t r_t A_t,      r_t = pi(t) / mu(t)
    M_t = 0  where  A_t > 0, r_t > 1 and D_t > high,   or   A_t < 0, r_t < 1 and D_t > low;   else 1

D_t is the divergence between the two policies seen as "this token or another one":
    tv: |pi(t) - mu(t)|                        kl: mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))

A ratio says little where the probability is small: 1e-6 -> 1e-5 is r = 10 and no change of the policy. Default bounds
0.2 (tv) and 0.05 (kl). PRIME-RL's objective is this with tv and a KL term: `trainer.loss.kl` with target `behaviour`,
estimator `k2`; its tau for d^2 is half our coef.

Edge cases: the mask is a constant (no gradient). r saturates at e^+-20. Probabilities that reach 1 in float32 keep
1 - p at the smallest normal number, so the kl form stays finite. A_t = 0: no gradient, no mask counted.
"""

import torch

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import Bounds, Targets, Terms


def _binary_kl(log_mu: torch.Tensor, log_pi: torch.Tensor) -> torch.Tensor:
    """KL(Bernoulli(mu) || Bernoulli(pi)) of log-probabilities, in nats."""
    tiny = torch.finfo(log_pi.dtype).tiny
    mu = log_mu.exp()
    rest_mu, rest_pi = (-torch.expm1(x.clamp(max=0.0)) for x in (log_mu, log_pi))
    this = torch.where(mu > 0, mu * (log_mu - log_pi), torch.zeros_like(mu))
    return this + rest_mu * (rest_mu.clamp(min=tiny).log() - rest_pi.clamp(min=tiny).log())


def dppo(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module; `trainer.loss.divergence` picks D."""
    log_pi, log_mu, advantages = targets.logprobs.detach(), targets.anchor, targets.advantages
    if config.divergence == "kl":
        divergence = _binary_kl(log_mu, log_pi)
    else:
        divergence = (log_pi.exp() - log_mu.exp()).abs()
    rises, falls = log_pi > log_mu, log_pi < log_mu
    masked = ((advantages > 0) & rises & (divergence > bounds.high)) | (
        (advantages < 0) & falls & (divergence > bounds.low)
    )
    gain = targets.log_ratio().exp() * advantages
    return Terms(torch.where(masked, torch.zeros_like(gain), -gain), masked)
