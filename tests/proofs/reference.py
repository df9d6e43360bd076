"""Objectives in float64 numpy, one sequence and one token at a time, written from the papers. Imports none of ours.

A policy is the vector of its log-probabilities `theta` of every token of the batch; `frozen` is the same vector where
a formula stops the gradient. Finite differences move `theta` and keep `frozen`, so they give the gradient that the
papers mean.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, exp, inf, log

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Sequence:
    """One sequence of a batch; arrays over its tokens, the prompt included."""

    index: NDArray[np.int64]
    """Places of its tokens in `theta`."""
    trained: NDArray[np.bool_]
    """Loss mask."""
    mu: Vector
    """The sampling policy's log-probabilities."""
    advantages: Vector
    reference: Vector
    """The reference model's log-probabilities."""
    rollout: int = -1
    """Of which rollout it is a piece; -1: it is one itself."""

    def targets(self) -> list[int]:
        """Trained tokens but the first, which nothing predicts."""
        return [t for t in range(1, len(self.index)) if self.trained[t]]


@dataclass(frozen=True)
class Setting:
    """An objective with its parameters, in the papers' letters where they have some."""

    objective: str
    delta: float = 8.0
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    divergence: str = "tv"
    normalize: str = "token"
    constant: int = 1
    kl: tuple[str, str, float] | None = None
    """(reference | behaviour, k1 | k2 | k3, coefficient)"""
    gamma_pos: tuple[float, float] = (2.0, 3.0)
    gamma_neg: tuple[float, float] = (3.0, 2.0)
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    off_policy: float | None = None
    """DeepSeek-V3.2's delta."""
    correction: tuple[str, str, float, float] | None = None
    """(truncate | mask, token | sequence | geometric, low, high)"""
    geometric: tuple[float, float] | None = None
    """Beside a correction: sequences outside are left out."""
    reject: tuple[str, str, float] | None = None
    """Beside a correction (k2 | k3, mean | sum | max, limit): sequences above are left out."""
    unbiased: bool = False
    """The KL term is weighed by pi / mu."""
    covariance: tuple[str, float, float, float, float] | None = None
    """(clip | kl, share, low, high, beta); a clip's share is 1, so that nothing is drawn."""
    second_moment: float | None = None
    """M2PO's tau."""


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(x, high))


def surrogate(ratio: float, advantage: float, s: Setting) -> float:
    """PPO's clipped objective of one token (to be maximised), with the dual clip where it is set."""
    gain = min(ratio * advantage, clip(ratio, 1 - s.low, 1 + s.high) * advantage)
    return max(gain, s.dual * advantage) if s.dual is not None and advantage < 0 else gain


def bernoulli_kl(p: float, q: float) -> float:
    return p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))


def token_gains(s: Setting, seq: Sequence, theta: Vector, frozen: Vector) -> dict[int, float]:
    """What each target adds to the objective to be maximised, before any normalisation."""
    gains = {}
    targets = seq.targets()
    for t in targets:
        log_pi, log_pi_0, advantage = theta[seq.index[t]], frozen[seq.index[t]], seq.advantages[t]
        # With an importance correction the ratio is to the trainer's own policy before the update.
        log_old = log_pi_0 if s.correction is not None else seq.mu[t]
        ratio = exp(log_pi - log_old)
        if s.objective in ("sft", "nll"):
            gains[t] = log_pi
        elif s.objective == "reinforce":
            gains[t] = advantage * log_pi
        elif s.objective == "aipo":
            gains[t] = min(exp(log_pi_0 - log_old), s.delta) * advantage * log_pi
        elif s.objective in ("ppo_clip", "grpo", "dr_grpo"):
            gains[t] = surrogate(ratio, advantage, s)
        elif s.objective == "cispo":
            gains[t] = clip(exp(log_pi_0 - log_old), 1 - s.low, 1 + s.high) * advantage * log_pi
        elif s.objective == "dppo":
            pi, mu = exp(log_pi), exp(log_old)
            distance = bernoulli_kl(mu, pi) if s.divergence == "kl" else abs(pi - mu)
            leaves = (advantage > 0 and ratio > 1 and distance > s.high) or (
                advantage < 0 and ratio < 1 and distance > s.low
            )
            gains[t] = 0.0 if leaves else ratio * advantage
        elif s.objective == "ipo":
            moved = exp(log_pi) - exp(log_old)
            gains[t] = 0.0 if moved > s.high or moved < -s.low else ratio * advantage
        elif s.objective == "sapo":
            tau = s.tau_pos if advantage > 0 else s.tau_neg
            gains[t] = 4 / tau / (1 + exp(-tau * (ratio - 1))) * advantage
        elif s.objective == "vespo":
            w = exp(sum(frozen[seq.index[u]] - _old(s, seq, frozen, u) for u in targets))
            c1, c2 = s.gamma_pos if advantage > 0 else s.gamma_neg
            gains[t] = w**c1 * exp(c2 * (1 - w)) * advantage * log_pi
        elif s.objective == "gmpo":
            logs = [theta[seq.index[u]] - _old(s, seq, frozen, u) for u in targets]
            kept = [min(x, s.high) if advantage > 0 else max(x, -s.low) for x in logs]
            gains[t] = exp(sum(kept) / len(kept)) * advantage
        elif s.objective == "gspo":
            log_s = sum(theta[seq.index[u]] - _old(s, seq, frozen, u) for u in targets) / len(targets)
            gains[t] = surrogate(exp(log_s), advantage, s)
        elif s.objective == "gspo_token":
            log_s = sum(frozen[seq.index[u]] - _old(s, seq, frozen, u) for u in targets) / len(targets)
            gains[t] = surrogate(exp(log_s) * exp(log_pi - log_pi_0), advantage, s)
        else:
            raise AssertionError(s.objective)
    return gains


def _old(s: Setting, seq: Sequence, frozen: Vector, t: int) -> float:
    return frozen[seq.index[t]] if s.correction is not None else seq.mu[t]


def correction_weight(s: Setting, seq: Sequence, frozen: Vector, t: int) -> float:
    """min(c, high), or c inside [low, high] and 0 outside; 0 for a sequence that is left out."""
    if s.correction is None:
        return 1.0
    kind, level, low, high = s.correction
    if s.geometric is not None and not s.geometric[0] <= exp(-drift(seq, frozen)) <= s.geometric[1]:
        return 0.0
    if s.reject is not None and divergence(s, seq, frozen) > s.reject[2]:
        return 0.0
    logs = {u: frozen[seq.index[u]] - seq.mu[u] for u in seq.targets()}
    if level == "token":
        c = exp(logs[t])
    elif level == "sequence":
        c = exp(sum(logs.values()))
    else:
        c = exp(sum(logs.values()) / len(logs))
    return min(c, high) if kind == "truncate" else c if low <= c <= high else 0.0


def divergence(s: Setting, seq: Sequence, frozen: Vector) -> float:
    """What `Setting.reject` holds against its limit."""
    assert s.reject is not None
    estimator, over, _ = s.reject
    logs = [frozen[seq.index[u]] - seq.mu[u] for u in seq.targets()]
    values = [x**2 / 2 if estimator == "k2" else exp(x) - 1 - x for x in logs]
    return {"mean": sum(values) / len(values), "sum": sum(values), "max": max(values)}[over]


def covariances(batch: list[Sequence]) -> dict[int, float]:
    """(log mu - its mean) (A - its mean) of every target by its place, both means over the batch."""
    mu = {int(seq.index[t]): float(seq.mu[t]) for seq in batch for t in seq.targets()}
    advantages = {int(seq.index[t]): float(seq.advantages[t]) for seq in batch for t in seq.targets()}
    means = [sum(x.values()) / max(len(x), 1) for x in (mu, advantages)]
    return {place: (mu[place] - means[0]) * (advantages[place] - means[1]) for place in mu}


def of_high_covariance(s: Setting, batch: list[Sequence]) -> set[int]:
    """Places of the targets that Clip-Cov cuts (all within its bounds), or KL-Cov penalises."""
    if s.covariance is None:
        return set()
    kind, share, low, high, _ = s.covariance
    found = covariances(batch)
    if kind == "clip":
        return {place for place, x in found.items() if low <= x <= high}
    ranked = sorted(found.values(), reverse=True)[: max(1, ceil(round(share * len(found), 6)))]
    return {place for place, x in found.items() if x > 1e-9 and x >= ranked[-1] - 1e-9}  # equal ones together


def second_moments(batch: list[Sequence], frozen: Vector) -> dict[int, float]:
    """(log pi - log mu)^2 of every target by its place, the farthest first."""
    found = {int(s.index[t]): float(frozen[s.index[t]] - s.mu[t]) ** 2 for s in batch for t in s.targets()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def of_far(s: Setting, batch: list[Sequence], frozen: Vector) -> set[int]:
    """Places of the targets that M2PO takes out one by one until the mean of the others is within tau."""
    left = {} if s.second_moment is None else second_moments(batch, frozen)
    out: set[int] = set()
    while left and s.second_moment is not None and sum(left.values()) / len(left) > s.second_moment:
        place = next(iter(left))
        out.add(place)
        del left[place]
    return out


def drift(seq: Sequence, frozen: Vector) -> float:
    """Mean of log(mu / pi) over the sequence's targets."""
    logs = [seq.mu[u] - frozen[seq.index[u]] for u in seq.targets()]
    return sum(logs) / len(logs)


def kl_of_token(s: Setting, seq: Sequence, theta: Vector, frozen: Vector, t: int) -> float:
    """Schulman's estimators of KL(pi || other)."""
    assert s.kl is not None
    which, estimator, _ = s.kl
    log_other = seq.mu[t] if which == "behaviour" else seq.reference[t]
    log_r = log_other - theta[seq.index[t]]
    log_pi = frozen if estimator == "k2" else theta  # k2's gradient is under pi what k1's and k3's are of their mean
    weight = exp(log_pi[seq.index[t]] - seq.mu[t]) if s.unbiased else 1.0
    return weight * {"k1": -log_r, "k2": log_r**2 / 2, "k3": exp(log_r) - 1 - log_r}[estimator]


def token_losses(s: Setting, batch: list[Sequence], theta: Vector, frozen: Vector) -> Iterator[float]:
    """Every target's share of the loss; they sum to the loss."""
    lengths: dict[object, int] = {}  # |o_i|, of whole rollouts
    keys = [seq.rollout if seq.rollout >= 0 else ("alone", i) for i, seq in enumerate(batch)]
    for key, seq in zip(keys, batch, strict=True):
        lengths[key] = lengths.get(key, 0) + len(seq.targets())
    num_targets, num_sequences = sum(lengths.values()), sum(1 for n in lengths.values() if n)
    chosen, far = of_high_covariance(s, batch), of_far(s, batch, frozen)
    for key, seq in zip(keys, batch, strict=True):
        count = lengths[key]
        gains = token_gains(s, seq, theta, frozen)
        for t in seq.targets():
            value = -correction_weight(s, seq, frozen, t) * gains[t]
            if s.off_policy is not None and seq.advantages[t] < 0 and drift(seq, frozen) > s.off_policy:
                value = 0.0
            if int(seq.index[t]) in far:
                value = 0.0
            if s.covariance is not None and int(place := seq.index[t]) in chosen:
                penalty = s.covariance[4] * abs(theta[place] - seq.mu[t])
                value = 0.0 if s.covariance[0] == "clip" else value + penalty
            if s.kl is not None:
                value += s.kl[2] * kl_of_token(s, seq, theta, frozen, t)
            yield (
                value
                / {
                    "token": num_targets,
                    "sequence": count * num_sequences,
                    "batch": num_sequences * s.constant,
                }[s.normalize]
            )


def loss(s: Setting, batch: list[Sequence], theta: Vector, frozen: Vector) -> float:
    return float(sum(token_losses(s, batch, theta, frozen)))


def size(s: Setting, batch: list[Sequence], theta: Vector) -> float:
    """Sum of the terms' absolute values: the scale against which a sum's error is relative."""
    return float(sum(abs(x) for x in token_losses(s, batch, theta, theta)))


def echo(batch: list[Sequence], weights: Vector, theta: Vector) -> float:
    """-1/M sum_t w_t log pi(t) over the M tokens with a weight that something predicts."""
    heard = [t for seq in batch for t in seq.index[1:] if weights[t] > 0]
    return -sum(weights[t] * theta[t] for t in heard) / max(len(heard), 1)


def gradient(s: Setting, batch: list[Sequence], theta: Vector, h: float = 1e-5) -> Vector:
    """Central differences of the loss in every log-probability."""
    return central_differences(lambda moved: loss(s, batch, moved, theta), theta, h)


def central_differences(function: Callable[[Vector], float], at: Vector, h: float) -> Vector:
    found = np.zeros_like(at)
    for i in range(len(at)):
        up, down = at.copy(), at.copy()
        up[i] += h
        down[i] -= h
        found[i] = (function(up) - function(down)) / (2 * h)
    return found


def kink_distance(s: Setting, batch: list[Sequence], theta: Vector) -> float:
    """How far, in log-probability, the nearest target is from a place where its loss has a kink or a jump."""
    nearest = inf
    if s.second_moment is not None and (moments := [*second_moments(batch, theta).values()]):
        means = [sum(moments[i:]) / len(moments[i:]) for i in range(len(moments))]
        nearest = min(abs(mean - s.second_moment) for mean in means)
    for seq in batch:
        targets = seq.targets()
        if not targets:
            continue
        logs = [theta[seq.index[t]] - _old(s, seq, theta, t) for t in targets]
        if s.objective in ("gspo", "gspo_token"):
            logs = [sum(logs) / len(logs)]
        edges = [x for x in (1 - s.low, 1 + s.high, s.dual, s.delta) if x is not None and x > 0]
        nearest = min([nearest, *(abs(x - log(edge)) for x in logs for edge in edges)])
        if s.objective == "gmpo":
            nearest = min([nearest, *(abs(x - edge) for x in logs for edge in (-s.low, s.high))])
        if s.geometric is not None:
            nearest = min([nearest, *(abs(drift(seq, theta) + log(edge)) for edge in s.geometric)])
        if s.reject is not None:
            nearest = min(nearest, abs(divergence(s, seq, theta) - s.reject[2]))
        if s.covariance is not None:
            nearest = min([nearest, *map(abs, logs)])
        if s.off_policy is not None:
            nearest = min(nearest, abs(drift(seq, theta) - s.off_policy))
        if s.objective in ("dppo", "ipo"):
            for t in targets:
                pi, mu = exp(theta[seq.index[t]]), exp(seq.mu[t])
                distance = bernoulli_kl(mu, pi) if s.divergence == "kl" else abs(pi - mu)
                nearest = min(nearest, abs(distance - s.low), abs(distance - s.high), abs(pi - mu))
    return nearest
