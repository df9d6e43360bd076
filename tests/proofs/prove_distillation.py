"""Distillation x property: the divergence to a teacher's k likeliest tokens and its gradient, through the LM head.

The reference is float64 over the whole vocabulary: softmax of all logits, tokens outside of the teacher's k added up,
the divergence of the two lists, and autograd's gradient of it in hidden states and head. Beside it, what must hold by
itself: D is 0 where both agree, never negative, and no greater than the whole vocabulary's divergence, which it equals
where the k are all of it.
"""

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from prime_hpc.config.sections.trainer import DistillationConfig
from prime_hpc.trainer.objectives.distillation import teacher_divergence
from prime_hpc.trainer.ops.logprobs import token_logprobs
from tests.proofs import Proof

BOUND = 1e-5
TOKENS, WIDTH, VOCAB = 23, 12, 61
KINDS = ("forward_kl", "reverse_kl", "jsd")
WAYS: Mapping[str, Mapping[str, Any]] = {
    "head": {"chunk_tokens": 64},
    "chunks": {"chunk_tokens": 5},
    "bias, cap, scale": {"chunk_tokens": 5, "softcap": 3.0, "logit_scale": 0.7, "bias": True},
}
"""How the head computes."""


def divergence_of(kind: str, beta: float, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Of log-probabilities `[N, m]`, by definition."""

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.exp() * (a - b)).sum(1)

    mixture = (beta * p.exp() + (1 - beta) * q.exp()).log()
    both = {"forward_kl": kl(p, q), "reverse_kl": kl(q, p)}
    return both[kind] if kind in both else beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


def with_rest(logprobs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[N, V]` at `ids`, and of all others together."""
    listed = logprobs.gather(1, ids)
    if ids.shape[1] == logprobs.shape[1]:
        return listed
    others = torch.ones_like(logprobs, dtype=torch.bool).scatter_(1, ids, False)
    return torch.cat([listed, logprobs.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)], 1)


def exact(h: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, how: Mapping[str, Any]) -> torch.Tensor:
    """Log-probabilities `[N, V]` of the policy, in float64."""
    logits = h @ w.T * how.get("logit_scale", 1.0) + (0.0 if bias is None else bias)
    cap = how.get("softcap")
    return (logits if cap is None else cap * (logits / cap).tanh()).log_softmax(1)


def errors(kind: str, way: str, seed: int) -> dict[str, float]:
    """Of one random instance, by property."""
    rng, how = torch.Generator().manual_seed(seed), dict(WAYS[way])
    top_k = (1, 7, VOCAB)[seed % 3]
    config = DistillationConfig(top_k=top_k, divergence=kind, beta=0.1 + 0.8 * float(torch.rand(1, generator=rng)))
    hidden, weight = (torch.randn(n, WIDTH, generator=rng) for n in (TOKENS, VOCAB))
    bias = torch.randn(VOCAB, generator=rng) if how.pop("bias", False) else None
    teacher = (2 * torch.randn(TOKENS, VOCAB, generator=rng)).log_softmax(1)
    targets, outer = torch.randint(0, VOCAB, (TOKENS,), generator=rng), torch.randn(2, TOKENS, generator=rng)
    targets[0] = teacher[0].argmax()  # a target that is among the teacher's

    def ours(teacher: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        values, ids = teacher.topk(top_k, dim=1)
        both = torch.cat([targets[:, None], ids], dim=1)
        found, _ = token_logprobs(h, w, both, torch.ones(TOKENS), bias=bias, **how)
        seen: Any = SimpleNamespace(teacher_logprobs=values, listed_logprobs=found[:, 1:])
        divergence, _ = teacher_divergence(config, seen)
        (outer[0] @ divergence + outer[1] @ found[:, 0]).backward()
        assert h.grad is not None and w.grad is not None
        return divergence.detach(), [h.grad, w.grad]

    divergence, grads = ours(teacher)
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    policy = exact(h, w, None if bias is None else bias.double(), how)
    p, ids = teacher.double(), teacher.topk(top_k, dim=1).indices
    wanted = divergence_of(kind, config.beta, with_rest(p, ids), with_rest(policy, ids))
    (outer[0].double() @ wanted + outer[1].double() @ policy.gather(1, targets[:, None])[:, 0]).backward()
    whole = divergence_of(kind, config.beta, p, policy).detach()
    itself, _ = ours(policy.detach().float())
    size = float(whole.max())
    references = [h.grad, w.grad]
    return {
        "value": float((divergence - wanted.detach()).abs().max()) / size,
        "gradient": max(
            float((a - b).abs().max() / b.abs().max()) for a, b in zip(grads, references, strict=True) if b is not None
        ),
        "0 of itself": float(itself.abs().max()),
        "never negative": float((-divergence).clamp(min=0).max()),
        "below the whole": float((divergence - whole).clamp(min=0).max()) / size,
        "all of it": float((divergence - whole).abs().max()) / size if top_k == VOCAB else 0.0,
    }


def prove(trials: int) -> Iterable[Proof]:
    """Every divergence and way of the head against every property, `trials` random instances each."""
    for kind in KINDS:
        for way in WAYS:
            rows = [errors(kind, way, seed) for seed in range(max(trials, 3))]
            for claim in rows[0]:
                yield Proof(f"{kind} / {way}", claim, len(rows), float(np.max([row[claim] for row in rows])), BOUND)
