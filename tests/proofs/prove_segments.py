"""Distillation from a teacher with another tokenizer x property, on models small enough to enumerate.

Policy and teacher write texts of the letters a and b in tokens of their own, each next token with a probability that
depends on all of the text before (random, float64). Every rollout that the policy can sample is made into a sample,
read and scored by the product's code; the expectation of sum_t A_t d log p(t) over all of them is compared with
autograd's gradient of what it should be,

    - sum of states P(state) KL( p(segment | state) || q(segment | state) )

with segments found by definition (shortest texts that both vocabularies can write), and P(state), the policy's own
probability of being there, held fixed. Where all of the text is one segment, that is the gradient of the whole reverse
KL: the claim `whole`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
import torch

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.envs.samples import Sample
from prime_hpc.orchestrator.algorithms import Scorer
from prime_hpc.orchestrator.cross_tokenizer.reading import Reading, Turn
from prime_hpc.orchestrator.cross_tokenizer.segments import align
from prime_hpc.orchestrator.rollouts.episodes import to_episode
from tests.proofs import Proof
from tests.support.episodes import make_result

BOUND = 1e-5
"""Log-probabilities of samples are float32."""
PAIRS = ("aa", "ab", "ba", "bb")
TRIPLES = tuple(f"{letter}{pair}" for letter in "ab" for pair in PAIRS)
CASES: Mapping[str, tuple[Sequence[str], Sequence[str], int]] = {
    "the same tokens": (("a", "b"), ("a", "b"), 3),
    "larger ones of the teacher": (("a", "b"), PAIRS, 4),
    "smaller ones of the teacher": (PAIRS, ("a", "b"), 4),
    "of all lengths": (("a", "b"), ("a", "ba", "bba", "bbb"), 3),
    "one segment": (PAIRS, TRIPLES, 6),
}
"""Tokens of the policy, of the teacher, each of which begins no other, and letters that a text has at least."""


class Model:
    """Log-probabilities of the next token, for every text before it."""

    def __init__(self, tokens: Sequence[str], seed: int) -> None:
        self.tokens, self._seed = list(tokens), seed
        self.rows: dict[str, torch.Tensor] = {}

    def logprob(self, before: str, token: str) -> torch.Tensor:
        """0-dim, differentiable in `rows`."""
        if before not in self.rows:
            rng = np.random.default_rng([self._seed, len(before), *map(ord, before)])
            row = torch.tensor(2 * rng.standard_normal(len(self.tokens)))
            self.rows[before] = row.requires_grad_()
        return self.rows[before].log_softmax(0)[self.tokens.index(token)]

    def cut(self, text: str) -> list[str] | None:
        """The text's tokens; None where it ends within one."""
        found: list[str] = []
        while text:
            token = next((t for t in self.tokens if text.startswith(t)), None)
            if token is None:
                return None
            found.append(token)
            text = text[len(token) :]
        return found

    def of_text(self, before: str, text: str) -> torch.Tensor:
        """Log-probability of a text after another one."""
        total = torch.zeros((), dtype=torch.float64)
        for token in self.cut(text) or []:
            total, before = total + self.logprob(before, token), before + token
        return total


def segments_from(policy: Model, teacher: Model, limit: int = 8) -> Iterator[str]:
    """Every shortest text that both can write."""
    waiting = [""]
    while waiting:
        text = waiting.pop()
        for letter in "ab":
            longer = text + letter
            if policy.cut(longer) is not None and teacher.cut(longer) is not None:
                yield longer
            elif len(longer) < limit:
                waiting.append(longer)


def rollouts(policy: Model, teacher: Model, least: int) -> Iterator[list[str]]:
    """Every text of `least` letters or more that is cut where segments end, as the policy's tokens."""
    waiting: list[list[str]] = [[]]
    while waiting:
        tokens = waiting.pop()
        text = "".join(tokens)
        if len(text) >= least and teacher.cut(text) is not None:
            yield tokens
            continue
        waiting += [[*tokens, token] for token in policy.tokens]


def advantages(policy: Model, teacher: Model, tokens: Sequence[str]) -> list[float]:
    """The product's word on every token of a rollout."""
    text, count = "".join(tokens), len(tokens)
    theirs = teacher.cut(text) or []
    starts = ["".join(tokens[:i]) for i in range(count)]
    own = [policy.logprob(before, token).item() for before, token in zip(starts, tokens, strict=True)]
    said = [teacher.logprob("".join(theirs[:i]), token).item() for i, token in enumerate(theirs)]
    sample = Sample(
        token_ids=np.arange(count + 1, dtype=np.int32),
        loss_mask=np.arange(count + 1) > 0,
        logprobs=np.array([0, *own], np.float32),
        versions=np.array([-1, *[0] * count], np.int32),
        num_turns=1,
        reward=0.0,
    )
    lengths = [np.array([len(token) for token in each], np.int64) for each in (tokens, theirs)]
    segments, teacher_segments, ends = align(*lengths)
    turn = Turn(1 + np.arange(count), segments, np.full(len(ends), True), 0, 1, teacher_segments)
    scores, gaps = Reading([[]], [turn]).scores_of(sample, [np.array([0, *said], np.float32)])
    taught = Sample(**{**vars(sample), "teacher_gaps": gaps})
    episode = to_episode(make_result(samples=[taught]), 99)
    scorer = Scorer(AdvantageConfig(type="opd", max_gap=1e9), max_tokens=99)
    found = scorer.score([episode], references=[[scores]]).tokens
    assert found is not None
    return [float(value) for value in found[0][0][1:]]


def gradients(name: str, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Of the policy's rows: the expectation over all rollouts, and the definition's."""
    own, others, least = CASES[name]
    policy, teacher = Model(own, 2 * seed), Model(others, 2 * seed + 1)
    surrogate = torch.zeros((), dtype=torch.float64)
    for tokens in rollouts(policy, teacher, least):
        weight = policy.of_text("", "".join(tokens)).exp().item()
        for i, advantage in enumerate(advantages(policy, teacher, tokens)):
            surrogate = surrogate + weight * advantage * policy.logprob("".join(tokens[:i]), tokens[i])
    found = _gradient(policy, surrogate)

    @cache
    def objective(state: str) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for segment in segments_from(policy, teacher):
            log_p, log_q = policy.of_text(state, segment), teacher.of_text(state, segment).detach()
            total = total - log_p.exp() * (log_p - log_q)
            if len(state + segment) < least:
                total = total + log_p.exp().item() * objective(state + segment)
        return total

    return found, _gradient(policy, objective(""))


def _gradient(policy: Model, value: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = policy.rows
    found = torch.autograd.grad(value, list(rows.values()), allow_unused=True)
    return {name: g for name, g in zip(rows, found, strict=True) if g is not None}


def error(name: str, seed: int) -> float:
    """Greatest relative error of the gradient."""
    found, wanted = gradients(name, seed)
    assert found.keys() == wanted.keys(), "other texts are reached"
    size = max(float(g.abs().max()) for g in wanted.values())
    return max(float((found[key] - wanted[key]).abs().max()) for key in wanted) / size


def whole_error(seed: int) -> float:
    """The same against the gradient of the whole reverse KL, texts as they are, where they are one segment."""
    own, others, least = CASES["one segment"]
    found, _ = gradients("one segment", seed)
    policy, teacher = Model(own, 2 * seed), Model(others, 2 * seed + 1)
    total = torch.zeros((), dtype=torch.float64)
    for tokens in rollouts(policy, teacher, least):
        text = "".join(tokens)
        log_p = policy.of_text("", text)
        total = total - log_p.exp() * (log_p - teacher.of_text("", text).detach())
    wanted = _gradient(policy, total)
    size = max(float(g.abs().max()) for g in wanted.values())
    return max(float((found[key] - wanted[key]).abs().max()) for key in wanted) / size


def prove(trials: int) -> Iterable[Proof]:
    """Every pair of vocabularies, `trials` random pairs of models each."""
    for name in CASES:
        yield Proof(name, "gradient", trials, float(np.max([error(name, seed) for seed in range(trials)])), BOUND)
    yield Proof("one segment", "whole", trials, float(np.max([whole_error(seed) for seed in range(trials)])), BOUND)
