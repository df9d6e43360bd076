"""Sampling x claim: log-probabilities, entropies and gradients of the distribution that is sampled, in float64.

The reference cuts each row by the definitions of min-p, top-k and top-p, one token after another, keeps the target,
and differentiates the softmax of what is left by hand.
"""

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from prime_hpc.trainer.ops import truncation
from prime_hpc.trainer.ops.logprobs import token_logprobs
from prime_hpc.trainer.ops.truncation import Truncation
from tests.proofs import Proof

BOUND = 1e-4
"""Float32 against float64, relative to the largest value."""
CLAIMS = ("log p", "entropy", "d hidden", "d head")
RULES: list[dict[str, float]] = [
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_k": 7},
    {"top_k": 1},
    {"min_p": 0.05},
    {"top_p": 0.8, "top_k": 20},
    {"top_p": 0.8, "top_k": 5, "min_p": 0.02},
    {"top_p": 0.999},
    {},
]


def stated(rules: list[dict[str, float]]) -> Truncation:
    top_p, top_k, min_p = ([r.get(k, off) for r in rules] for k, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)))
    bounded = all(k or p == 1 for p, k in zip(top_p, top_k, strict=True))
    return Truncation(
        torch.tensor(top_p), torch.tensor(top_k, dtype=torch.int64), torch.tensor(min_p), int(max(top_k)), bounded
    )


def kept(logits: np.ndarray, rule: dict[str, float]) -> np.ndarray:
    """bool[V] by the definitions, one token after another, float64; ties are none."""
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    keep = p >= rule.get("min_p", 0.0) * p.max()
    if "top_k" in rule:
        keep &= p >= np.sort(p)[::-1][int(rule["top_k"]) - 1]
    left = np.where(keep, p, 0) / p[keep].sum()
    likelier = np.array([left[left > x].sum() for x in left])
    return keep & (likelier < rule["top_p"]) if rule.get("top_p", 1) < 1 else keep


def reference(arrays: list[np.ndarray], rules: list[dict[str, float]]) -> tuple[np.ndarray, ...]:
    """log p, entropy and the gradients of sum(outer * log p) in hidden and head, by hand, float64."""
    hidden, head, targets, temperatures, outer = arrays
    logits = hidden @ head.T / temperatures[:, None]
    log_p, entropy, d_logits = np.zeros(len(targets)), np.zeros(len(targets)), np.zeros_like(logits)
    for i, (row, target, rule) in enumerate(zip(logits, targets, rules, strict=True)):
        support = kept(row, rule)
        support[target] = True
        p = np.where(support, np.exp(row - row.max()), 0)
        p /= p.sum()
        log_p[i], entropy[i] = np.log(p[target]), -(p[p > 0] * np.log(p[p > 0])).sum()
        surprise = np.log(p, out=np.zeros_like(p), where=p > 0)
        of_entropy = -p * (surprise + entropy[i])
        d_logits[i] = outer[i] * ((np.arange(len(row)) == target) - p) + outer[-1 - i] * of_entropy
    d_logits /= temperatures[:, None]
    return log_p, entropy, d_logits @ head, d_logits.T @ hidden


def instance(num: int, vocab: int, seed: int) -> tuple[list[np.ndarray], list[dict[str, float]]]:
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((num, 8)), rng.standard_normal((vocab, 8)), rng.integers(0, vocab, num)]
    arrays += [rng.choice([0.6, 1.0, 1.3], num), rng.standard_normal(num)]
    return arrays, [RULES[i % len(RULES)] for i in range(num)]


def ours(arrays: list[np.ndarray], rules: list[dict[str, float]], **options: Any) -> tuple[torch.Tensor, ...]:
    hidden, head, targets, temperatures, outer = (
        torch.from_numpy(x).float() if x.dtype == np.float64 else torch.from_numpy(x) for x in arrays
    )
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    logprobs, entropy = token_logprobs(
        hidden, head, targets, temperatures, truncation=stated(rules), with_entropy=True, **options
    )
    (outer * logprobs + outer.flip(0) * entropy).sum().backward()
    assert hidden.grad is not None and head.grad is not None
    return logprobs.detach(), entropy.detach(), hidden.grad, head.grad


def errors(num: int, vocab: int, seed: int, rules: list[dict[str, float]], **options: Any) -> list[float]:
    """Of one random instance: the greatest deviation of each claim, relative to the largest value."""
    arrays, _ = instance(num, vocab, seed)
    wanted, found = reference(arrays, rules), ours(arrays, rules, **options)
    return [float(np.abs(f.numpy() - w).max() / np.abs(w).max()) for f, w in zip(found, wanted, strict=True)]


def prove(trials: int) -> Iterable[Proof]:
    """Each rule alone, then all of them in one batch: in chunks, and with rows that are sorted whole."""
    kinds: dict[str, tuple[list[dict[str, float]], dict[str, Any]]] = {
        " ".join(f"{k} {v:g}" for k, v in rule.items()) or "whole vocabulary": ([rule], {}) for rule in RULES
    }
    kinds |= {"all, in chunks": (RULES, {"chunk_tokens": 7}), "all, sorted whole": (RULES, {"chunk_tokens": 16})}
    for subject, (rules, options) in kinds.items():
        listed = 4 if subject.endswith("sorted whole") else truncation.LISTED
        with patch.object(truncation, "LISTED", listed):
            rows = [
                errors(36, 61, seed, [rules[i % len(rules)] for i in range(36)], **options) for seed in range(trials)
            ]
        for claim, worst in zip(CLAIMS, np.max(rows, axis=0).tolist(), strict=True):
            yield Proof(subject, claim, trials, worst, BOUND)
