"""Proximal policy optimisation in float64, from the papers and plain torch: several updates by one batch. Imports none
of ours but the reference of generalized advantage estimation.

Each sequence is computed by itself, nothing is packed, and every update goes over the sequences of its mini-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.proofs.reference_algorithms import gae


@dataclass(frozen=True)
class Sample:
    """A sequence of tokens with what is known of those that train, in order."""

    ids: torch.Tensor
    """int64[L]"""
    at: torch.Tensor
    """int64[n], places of the trained tokens."""
    mu: torch.Tensor
    """float64[n], their log-probabilities when they were sampled."""
    gains: torch.Tensor
    """float64[n], advantages; with a critic rewards."""
    mini_batch: int


@dataclass(frozen=True)
class Ppo:
    """The hyperparameters."""

    epochs: int
    clip: float
    lr: float
    max_norm: float
    truncate: float | None = None
    """Greatest importance weight of a decoupled ratio; None: the ratio is to mu."""
    normalized: str = ""
    """What the importance weights' mean is over, by which they are divided: every `token`, or every `sequence`, which
    then has one weight, the product of its tokens'; empty: they are not."""
    kl_loss: float = 0.0
    """Weight of k3 to the reference in the loss."""
    kl_rewards: float = 0.0
    """Weight of k1 to the reference in the rewards."""
    gamma: float = 1.0
    lam: float = 1.0
    critic_lr: float = 0.0
    value_clip: float = float("inf")


def logprobs_of(model: Any, sample: Sample) -> torch.Tensor:
    """float64[n]"""
    logits = model(sample.ids[None]).logits[0].log_softmax(-1)
    return logits[sample.at - 1, sample.ids[sample.at]]


def values_of(critic: Any, sample: Sample) -> torch.Tensor:
    """float64[n], the critic's values of what comes before each trained token."""
    states = critic.model(sample.ids[None]).last_hidden_state[0]
    return (states @ critic.score.weight[0])[sample.at - 1]


def train(
    ppo: Ppo, policy: Any, samples: Sequence[Sample], reference: Any = None, critic: Any = None
) -> tuple[list[float], float]:
    """Update both models. Returns the policy's loss in every update, and the share of clipped tokens in all of them."""
    with torch.no_grad():
        old = [logprobs_of(policy, s) for s in samples]
        frozen = [logprobs_of(reference, s) for s in samples] if reference is not None else old
    gains, returns, before = [s.gains for s in samples], list[torch.Tensor](), list[torch.Tensor]()
    if critic is not None:
        gains, returns, before = _estimates(ppo, critic, samples, frozen)
    models = [(policy, _optimizer(policy, ppo.lr))]
    models += [] if critic is None else [(critic, _optimizer(critic, ppo.critic_lr))]
    weights = _weights(ppo, samples, old)
    losses, clipped, count = list[float](), 0, 0
    for _ in range(ppo.epochs):
        for number in sorted({s.mini_batch for s in samples}):
            own = [i for i, s in enumerate(samples) if s.mini_batch == number]
            targets, (total, error) = sum(len(samples[i].at) for i in own), torch.zeros(2).double()
            for i in own:
                now, anchor = logprobs_of(policy, samples[i]), samples[i].mu if ppo.truncate is None else old[i]
                ratio, gain = (now - anchor).exp(), gains[i]
                bounded = ratio.clamp(1 - ppo.clip, 1 + ppo.clip)
                clipped += int((bounded * gain < ratio * gain).sum())
                term = -torch.minimum(ratio * gain, bounded * gain)
                term = term * weights[i]
                apart = frozen[i] - now
                total = total + (term + ppo.kl_loss * (apart.exp() - 1 - apart)).sum() / targets
                if critic is not None:
                    values = values_of(critic, samples[i])
                    near = before[i] + (values - before[i]).clamp(-ppo.value_clip, ppo.value_clip)
                    worse = torch.maximum((values - returns[i]) ** 2, (near - returns[i]) ** 2)
                    error = error + worse.sum() / targets / 2
            count += targets
            losses.append(float(total.detach()))
            total.backward()
            if critic is not None:
                error.backward()
            for model, optimizer in models:
                torch.nn.utils.clip_grad_norm_(model.parameters(), ppo.max_norm)
                optimizer.step()
                optimizer.zero_grad()
    return losses, clipped / count


def _weights(ppo: Ppo, samples: Sequence[Sample], old: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Importance weights of the tokens of each sample."""
    if ppo.truncate is None:
        return [torch.ones_like(s.mu) for s in samples]
    ratios = [(before - s.mu).exp() for before, s in zip(old, samples, strict=True)]
    if ppo.normalized == "sequence":
        ratios = [torch.full_like(r, float(r.prod())) for r in ratios]
    weights = [r.clamp(max=ppo.truncate) for r in ratios]
    if not ppo.normalized:
        return weights
    mean = float(torch.cat(weights).mean() if ppo.normalized == "token" else sum(w[0] for w in weights) / len(weights))
    return [w / mean for w in weights]


def _optimizer(model: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)


@torch.no_grad()
def _estimates(
    ppo: Ppo, critic: Any, samples: Sequence[Sample], frozen: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Advantages, whitened over all tokens, returns, and values, of each sample."""
    advantages, returns, values = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for sample, other in zip(samples, frozen, strict=True):
        rewards = sample.gains - ppo.kl_rewards * (sample.mu - other)
        values.append(values_of(critic, sample))
        both = gae(values[-1].tolist(), rewards.tolist(), ppo.gamma, ppo.lam, 1.0, None)
        advantages.append(torch.tensor(both[0], dtype=torch.float64))
        returns.append(torch.tensor(both[1], dtype=torch.float64))
    every = torch.cat(advantages)
    mean, deviation = every.mean(), every.var(correction=0).sqrt()
    return [(each - mean) / deviation for each in advantages], returns, values
