"""Divergence between the teacher's distribution and the policy's at every trained token (arXiv 2306.13649).

    forward_kl    D_t = sum_v p(v) log p(v) / q(v),    p the teacher's, q the policy's
    reverse_kl    D_t = sum_v q(v) log q(v) / p(v)
    jsd           D_t = beta KL(p || m) + (1 - beta) KL(q || m),    m = beta p + (1 - beta) q

The sum goes over the teacher's k likeliest tokens, each as it is, and over the rest of the vocabulary as one more: both
p and q are then distributions, D_t is 0 where they agree and never negative, and it is a lower bound of the whole
vocabulary's divergence, which it equals where the k are all of it. q is the trainer's own softmax over the whole
vocabulary at those tokens (`ops/logprobs.py`), so that the gradient is that of D_t, not an estimate of it; it sees the
token at hand alone, as each token's advantage of `opd` does: what a token makes likely later is left out.

Edge cases: tokens that the policy's model does not have, and those to which the teacher gives no probability, count
among the rest. Below `LEAST` the probability of the rest is rounding, and counts as `LEAST` for both. A stale token
counts as a fresh one: the divergence is of the place in the text, whoever sampled it.
"""

import torch

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.sections.trainer import DistillationConfig
from prime_hpc.trainer.batching.micro_batches import MicroBatch

LEAST = 1e-6
"""Smallest probability of the rest: sums of float32 probabilities are not known better."""
LEAST_LOGPROB = -80.0
"""Of a token that the teacher names; e^-80 is about the smallest number of float32. Servers say -9999 for none."""


def teacher_divergence(config: DistillationConfig, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return D_t of each target, float32 `[N]`, differentiable in `listed_logprobs`, and the teacher's probability of
    the tokens that it names, `[N]`.
    Raises ConfigError: the micro-batch has targets and nothing of a teacher's."""
    if micro.teacher_logprobs is None or micro.listed_logprobs is None:
        if not micro.num_targets:  # of a rank that has nothing, and takes part for the others
            nothing = torch.zeros_like(micro.behaviour_logprobs)
            return nothing, nothing
        raise ConfigError(
            "this batch has nothing of a teacher's distribution: it was made by an orchestrator without this section; "
            "leave it out, or make the batches anew",
            "trainer.loss.distillation",
        )
    teacher, policy = micro.teacher_logprobs, micro.listed_logprobs
    named = (teacher > LEAST_LOGPROB) & (policy > -torch.inf)
    log_p, mass = _with_rest(teacher, named)
    log_q, _ = _with_rest(policy, named)
    p, q = log_p.exp(), log_q.exp()
    named = torch.nn.functional.pad(named, (0, 1), value=True)
    if config.divergence == "forward_kl":
        terms = p * (log_p - log_q)
    elif config.divergence == "reverse_kl":
        terms = q * (log_q - log_p)
    else:
        beta = config.beta
        mixture = (beta * p + (1 - beta) * q).log()
        terms = beta * p * (log_p - mixture) + (1 - beta) * q * (log_q - mixture)
    return torch.where(named, terms, 0.0).sum(dim=1), mass


def _with_rest(logprobs: torch.Tensor, named: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities with the rest's behind them, `[N, k + 1]`, 0 where they are not `named`; and the
    probability of those that are, `[N]`."""
    kept = torch.where(named, logprobs, 0.0)
    mass = torch.where(named, kept.exp(), 0.0).sum(dim=1)
    rest = (1 - mass).clamp(min=LEAST).log()
    return torch.cat([kept, rest[:, None]], dim=1), mass
