"""Algorithm x claim: advantages and penalties against the reference, and what a baseline must not change.

`value`: against the reference. `order`: the same rollouts in another order. `shift`: a constant added to all rewards.
`roles`: games of two seats, each against its own.
`equal`: equal rewards give exact zeros. `mean`: advantages, weighed as the baseline weighs rewards, sum to 0.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from prime_hpc.config.sections.advantage import (
    AdvantageConfig,
    LengthPenaltyConfig,
    RepetitionPenaltyConfig,
    SoftOverlongConfig,
)
from prime_hpc.config.sections.trainer import CriticConfig
from prime_hpc.envs.samples import Sample
from prime_hpc.orchestrator.algorithms import Scorer, Scores
from prime_hpc.orchestrator.algorithms.penalties import length_penalty, repetition_penalty, soft_overlong_penalty
from prime_hpc.orchestrator.rollouts.episodes import Episode, to_episode
from prime_hpc.trainer.critic.gae import estimate
from tests.proofs import Proof
from tests.proofs import reference_algorithms as reference
from tests.support.episodes import make_result

BOUND = 1e-9
"""Float64 against float64; only cancellation between rewards costs digits."""
SINGLE = 1e3
"""Advantages of tokens are float32 on the wire: their error counts a thousandth, so that `BOUND` allows 1e-6."""
EXACT = 1e-300
"""Nothing but 0 is below it."""

REFERENCES: dict[str, Callable[..., list[float]]] = {
    "grpo": reference.grpo,
    "dr_grpo": reference.dr_grpo,
    "grpo_no_std": reference.dr_grpo,
    "rloo": reference.rloo,
    "opo": reference.opo,
    "max_rl": reference.max_rl,
    "pass_at_k": reference.pass_at_k,
    "pkpo": reference.pkpo,
    "reinforce": reference.reinforce,
    "none": reference.reinforce,
    "sft": reference.sft,
}
CENTERED = ("grpo", "dr_grpo", "grpo_no_std", "rloo", "opo", "max_rl", "pass_at_k")
COMPARING = (*CENTERED, "pkpo")


def episode(reward: float, runs: list[int], rng: np.random.Generator, truncated: bool = False) -> Episode:
    """A rollout of several turns: for each a prompt of 1 to 5 tokens, then the given number of sampled ones."""
    mask: list[bool] = []
    for n in runs:
        mask += [False] * int(rng.integers(1, 6)) + [True] * n
    flags = np.array(mask)
    sample = Sample(
        token_ids=rng.integers(0, 4, len(mask)).astype(np.int32),
        loss_mask=flags,
        logprobs=np.where(flags, -1.0, 0.0).astype(np.float32),
        versions=np.where(flags, 0, -1).astype(np.int32),
        num_turns=len(runs),
        reward=reward,
        truncated=truncated,
    )
    result = make_result(samples=[sample], reward=reward)
    return to_episode(type(result)(**{**result.__dict__, "truncated": truncated}), 10_000)


def random_group(rng: np.random.Generator, *, positive: bool = False) -> list[Episode]:
    """2 to 12 rollouts; rewards binary or real, never all equal."""
    size = int(rng.integers(2, 13))
    while True:
        rewards = rng.integers(0, 2, size).astype(float) if rng.random() < 0.5 else rng.normal(0, 3, size)
        rewards = np.abs(rewards) if positive else rewards
        if np.ptp(rewards) > 1e-3:
            break
    turns = [rng.integers(1, 20, int(rng.integers(1, 4))).tolist() for _ in range(size)]
    return [episode(float(r), t, rng) for r, t in zip(rewards, turns, strict=True)]


def with_rewards(episodes: list[Episode], rewards: np.ndarray) -> list[Episode]:
    """The same rollouts with other rewards."""
    found = []
    for e, r in zip(episodes, rewards.tolist(), strict=True):
        samples = [replace(s, reward=r) for s in e.result.samples]
        found.append(to_episode(replace(e.result, reward=r, samples=samples), 10_000))
    return found


def advantages(kind: str, episodes: list[Episode]) -> np.ndarray:
    """Ours."""
    return Scorer(AdvantageConfig(type=kind), max_tokens=100).score(episodes).advantages


def _parts(episodes: list[Episode]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([e.result.reward for e in episodes]), np.array([e.num_sampled_tokens for e in episodes])


def _error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()))


def value_error(kind: str, rng: np.random.Generator) -> float:
    """Against the reference."""
    group = random_group(rng, positive=kind == "max_rl")
    rewards, lengths = _parts(group)
    return _error(advantages(kind, group), np.array(REFERENCES[kind](rewards.tolist(), lengths.tolist())))


def order_error(kind: str, rng: np.random.Generator) -> float:
    """Rollouts in another order get the same advantages."""
    group = random_group(rng, positive=kind == "max_rl")
    order = rng.permutation(len(group))
    return _error(advantages(kind, [group[i] for i in order]), advantages(kind, group)[order])


def shift_error(kind: str, rng: np.random.Generator) -> float:
    """A constant on all rewards changes nothing."""
    group = random_group(rng)
    rewards, _ = _parts(group)
    return _error(advantages(kind, with_rewards(group, rewards + rng.normal(0, 5))), advantages(kind, group))


def equal_error(kind: str, rng: np.random.Generator) -> float:
    """Equal rewards give exact zeros."""
    group = random_group(rng)
    same = with_rewards(group, np.full(len(group), rng.choice([0.0, 1.0, 0.1, -7.3, 1e6 + 0.1])))
    return float(np.abs(advantages(kind, same)).max())


def mean_error(kind: str, rng: np.random.Generator) -> float:
    """The baseline is a mean: advantages sum to 0 under its weights."""
    group = random_group(rng, positive=kind == "max_rl")
    found, (_, lengths) = advantages(kind, group), _parts(group)
    weights = lengths / lengths.sum() if kind == "opo" else np.full(len(group), 1 / len(group))
    return abs(float(found @ weights)) / max(1.0, float(np.abs(found).max()))


def seats(rng: np.random.Generator, roles: tuple[str, ...], *, zero_sum: bool) -> tuple[list[Episode], list[list]]:
    """2 to 8 games with a trace a role (the second role's in two branches), and each one's (role, reward, tokens)."""
    group, rows = [], []
    for _ in range(int(rng.integers(2, 9))):
        won = float(rng.choice([-1.0, 1.0]))
        row: list = []
        samples: list[Sample] = []
        for number, role in enumerate(roles):
            reward = won * (1 - 2 * (number % 2)) if zero_sum else float(rng.normal(0, 3))
            branches = [
                episode(reward, [int(rng.integers(1, 9))], rng).result.samples[0] for _ in range(1 + number % 2)
            ]
            samples += [replace(s, agent=role, trace=number) for s in branches]
            row.append((role, reward, sum(s.num_loss_tokens for s in branches)))
        mean = float(np.mean([reward for _, reward, _ in row]))
        group.append(to_episode(make_result(samples=samples, reward=mean), 10_000))
        rows.append(row)
    return group, rows


def traces_error(group: list[Episode], scores: Scores, wanted: list[list[float]]) -> float:
    """Of every trace's tokens, and of the episodes' means."""
    assert scores.tokens is not None
    worst = 0.0
    for e, by_sample, by_trace, mean in zip(group, scores.tokens, wanted, scores.advantages, strict=True):
        worst = max(worst, _error(np.array([mean]), np.array([np.mean(by_trace)])))
        for sample, found in zip(e.result.samples, by_sample, strict=True):
            expected = np.where(sample.loss_mask, by_trace[sample.trace], 0.0)
            worst = max(worst, _error(found, expected) / SINGLE)
    return worst


def roles_error(kind: str, rng: np.random.Generator) -> float:
    """Games of two seats: every trace against its own role's, and a zero-sum game has a signal unless one seat won."""
    group, rows = seats(rng, ("first", "second"), zero_sum=kind != "max_rl" and bool(rng.integers(2)))
    columns = []
    for seat in range(2):
        rewards, lengths = [row[seat][1] for row in rows], [row[seat][2] for row in rows]
        equal = max(rewards) == min(rewards) and kind in COMPARING
        columns.append([0.0] * len(rows) if equal else REFERENCES[kind](rewards, lengths))
    scores = Scorer(AdvantageConfig(type=kind), max_tokens=100).score(group)
    return traces_error(group, scores, [list(pair) for pair in zip(*columns, strict=True)])


def remax_error(rng: np.random.Generator) -> float:
    """One or two roles, each trace less the greedy rollout's mean over its role; now and then a penalty on all."""
    roles = ("first", "second") if rng.integers(2) else ("alone",)
    group, rows = seats(rng, roles, zero_sum=bool(rng.integers(2)))
    greedy, others = seats(rng, roles, zero_sum=False)
    penalty = float(rng.integers(2))
    group, greedy = ([replace(e, result=replace(e.result, truncated=True)) for e in each] for each in (group, greedy))
    config = AdvantageConfig(type="remax", overlong="penalize", overlong_penalty=penalty)
    scores = Scorer(config, max_tokens=9).score(group, greedy=greedy[0])
    wanted = [[row[seat][1] - others[0][seat][1] for seat in range(len(roles))] for row in rows]
    if len(roles) == 1:
        return _error(scores.advantages, np.array(wanted)[:, 0])
    return traces_error(group, scores, wanted)


def rae_error(rng: np.random.Generator) -> float:
    """Several groups of two environments in turn, one or two roles, zero-sum or not, a saved state half-way."""
    config = AdvantageConfig(type="rae", decay=0.9)
    scorer, baselines, worst = Scorer(config, max_tokens=9), dict[tuple[str, str], float](), 0.0
    for step in range(6):
        if step == 3:
            state, scorer = json.loads(json.dumps(scorer.state_dict())), Scorer(config, max_tokens=9)
            scorer.load_state_dict(state)
        env = "ab"[int(rng.integers(2))]
        roles = ("first", "second") if rng.integers(2) else ("alone",)
        group, rows = seats(rng, roles, zero_sum=bool(rng.integers(2)))
        wanted = reference.rae([[(role, r) for role, r, _ in row] for row in rows], env, baselines, 0.9)
        scores = scorer.score(group, env=env)
        if len(roles) == 1:
            worst = max(worst, _error(scores.advantages, np.array(wanted)[:, 0]))
        else:
            worst = max(worst, traces_error(group, scores, wanted))
    return worst


def gae_error(rng: np.random.Generator) -> float:
    """The rewards of tokens, of one or two roles, and what random values make of such rewards."""
    roles = ("first", "second") if rng.integers(2) else ("alone",)
    group, rows = seats(rng, roles, zero_sum=bool(rng.integers(2)))
    tokens, worst = Scorer(AdvantageConfig(type="gae"), max_tokens=9).score(group).tokens, 0.0
    assert tokens is not None
    for e, by_sample, row in zip(group, tokens, rows, strict=True):
        for sample, found in zip(e.result.samples, by_sample, strict=True):
            expected = [0.0] * (sample.num_loss_tokens - 1) + [row[sample.trace][1]]
            worst = max(worst, _error(found[sample.loss_mask], np.array(expected)) / SINGLE)
            worst = max(worst, float(np.abs(found[~sample.loss_mask]).sum()))
    gamma, lam, critic_lam = rng.choice([0.0, 0.5, 0.95, 1.0], 3).tolist()
    alpha = float(rng.choice([0.05, 2.0])) if rng.integers(2) else None
    gamma = gamma or 0.99
    config = CriticConfig(gamma=gamma, lam=lam, critic_lam=critic_lam, length_adaptive_alpha=alpha)
    lengths = rng.integers(1, 70, 5)
    sequence = np.repeat(np.cumsum(rng.integers(1, 3, 5)), lengths)  # of some between them no token trains
    values, rewards = rng.standard_normal((2, len(sequence)))
    estimates = estimate(config, *map(torch.from_numpy, (values, rewards, sequence)))
    ends = np.cumsum(lengths)[:-1]
    parts = zip(np.split(values, ends), np.split(rewards, ends), strict=True)
    wanted = [reference.gae(v.tolist(), r.tolist(), gamma, lam, critic_lam, alpha) for v, r in parts]
    for mine, theirs in zip((estimates.advantages, estimates.returns), zip(*wanted, strict=True), strict=True):
        worst = max(worst, _error(mine.numpy(), np.concatenate(theirs)))
    return worst


def gdpo_error(rng: np.random.Generator) -> float:
    """One to three functions of any scale, weights of either sign, some rollouts without one; now and then a penalty,
    and two seats, each with functions of its own scores."""
    size, count, num_seats = int(rng.integers(2, 9)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    weights = rng.choice([-2.0, 0.1, 1.0, 30.0], count)
    scores = rng.normal(0, 10 ** rng.uniform(-2, 3, (num_seats, count, 1)), (num_seats, count, size))
    scores[rng.random(scores.shape) < 0.2] = 0.0
    penalize = bool(rng.integers(2))
    group = []
    for i in range(size):
        samples = []
        for seat in range(num_seats):
            given = {f"f{k}": [s, float(weights[k])] for k, s in enumerate(scores[seat, :, i].tolist()) if s}
            [sample] = episode(float(weights @ scores[seat, :, i]), [3], rng).result.samples
            samples.append(replace(sample, rewards=given, agent=f"seat {seat}", trace=seat))
        result = make_result(samples=samples, reward=float(np.mean([s.reward for s in samples])))
        group.append(to_episode(replace(result, truncated=penalize and i % 2 == 0), 10_000))
    penalties = [-0.3 * (penalize and i % 2 == 0) for i in range(size)]
    config = AdvantageConfig(type="gdpo", overlong="penalize", overlong_penalty=0.3)
    found = Scorer(config, max_tokens=9).score(group)
    wanted = [reference.gdpo([*seat.tolist(), penalties], [*weights.tolist(), 1.0]) for seat in scores]
    if num_seats == 1:
        return _error(found.advantages, np.array(wanted[0]))
    return traces_error(group, found, [list(pair) for pair in zip(*wanted, strict=True)])


def distillation_error(kind: str, rng: np.random.Generator) -> float:
    """Token by token, rewards mixed in, the bound reached by some; the other tokens get 0."""
    group = random_group(rng)
    weight, bound = float(rng.choice([0.0, 0.7])), float(rng.choice([1.0, 20.0]))
    scores = [[rng.normal(-1, 2, s.num_tokens).astype(np.float32) for s in e.result.samples] for e in group]
    config = AdvantageConfig(type=kind, reward_weight=weight, max_gap=bound)
    found = Scorer(config, max_tokens=100).score(group, references=scores).tokens
    assert found is not None
    masks = [e.result.samples[0].loss_mask for e in group]
    if any(f[0][~m].any() for f, m in zip(found, masks, strict=True)):
        return float("inf")
    wanted = reference.distillation(
        _parts(group)[0].tolist(),
        [e.result.samples[0].logprobs[m].tolist() for e, m in zip(group, masks, strict=True)],
        [s[0][m].tolist() for s, m in zip(scores, masks, strict=True)],
        weight,
        bound,
    )
    return max(_error(f[0][m], np.array(w)) for f, m, w in zip(found, masks, wanted, strict=True)) / SINGLE


def optimal_token_error(rng: np.random.Generator) -> float:
    """Rollouts of one to three pieces, each with a prompt of its own; two roles now and then."""
    num_seats = int(rng.integers(1, 3))
    rows: list[list[tuple[float, list[np.ndarray]]]] = []
    group = []
    for _ in range(int(rng.integers(2, 7))):
        row, samples = [], []
        for seat in range(num_seats):
            reward, pieces = float(rng.normal(0, 3)), []
            for _ in range(int(rng.integers(1, 4))):
                [sample] = episode(reward, rng.integers(1, 9, 2).tolist(), rng).result.samples
                logs = np.where(sample.loss_mask, np.log(rng.uniform(0.01, 0.99, sample.num_tokens)), 0)
                samples.append(replace(sample, logprobs=logs.astype(np.float32), agent=f"seat {seat}", trace=seat))
                pieces.append(samples[-1].logprobs[sample.loss_mask].astype(np.float64))
            row.append((reward, pieces))
        rows.append(row)
        group.append(to_episode(make_result(samples=samples, reward=float(np.mean([r for r, _ in row]))), 10_000))
    found = Scorer(AdvantageConfig(type="optimal_token_baseline"), max_tokens=99).score(group)
    assert found.tokens is not None
    worst = 0.0
    for seat in range(num_seats):
        policy = [np.concatenate(row[seat][1]).tolist() for row in rows]
        wanted = reference.optimal_token_baseline([row[seat][0] for row in rows], policy)
        for e, by_sample, right in zip(group, found.tokens, wanted, strict=True):
            own = [(s, a) for s, a in zip(e.result.samples, by_sample, strict=True) if s.trace == seat]
            if any(a[~s.loss_mask].any() for s, a in own):
                return float("inf")
            worst = max(worst, _error(np.concatenate([a[s.loss_mask] for s, a in own]), np.array(right)) / SINGLE)
    return worst


def hierarchical_error(rng: np.random.Generator) -> float:
    """A proposer and 2 to 4 solvers an episode; now and then a judge who acts once, and a solver of two branches."""
    rows: list[list[tuple[str, float]]] = []
    group = []
    judged = bool(rng.integers(2))
    for _ in range(int(rng.integers(2, 6))):
        agents = ["proposer", *["solver"] * int(rng.integers(2, 5)), *["judge"] * judged]
        row = [(agent, float(rng.normal(0, 3))) for agent in agents]
        samples = []
        for number, (agent, reward) in enumerate(row):
            for _ in range(2 if agent == "solver" and number == 1 else 1):
                [sample] = episode(reward, [int(rng.integers(1, 5))], rng).result.samples
                samples.append(replace(sample, agent=agent, trace=number))
        rows.append(row)
        group.append(to_episode(make_result(samples=samples, reward=float(np.mean([r for _, r in row]))), 10_000))
    stated = ["solver"] if rng.integers(2) else []
    scores = Scorer(AdvantageConfig(type="hierarchical_grpo", within=stated), max_tokens=9).score(group)
    return traces_error(group, scores, reference.hierarchical(rows, {"solver"}))


def length_error(rng: np.random.Generator) -> float:
    """The length penalty."""
    group, by_success = random_group(rng), bool(rng.integers(2))
    config = LengthPenaltyConfig(output=0.3, input=0.2, turns=0.1, by_success=by_success)
    rewards, sampled = _parts(group)
    inputs = [e.num_prompt_tokens for e in group]
    turns = [sum(s.num_turns for s in e.result.samples) for e in group]
    wanted = reference.length_penalty(
        rewards.tolist(), [(0.3, sampled.tolist()), (0.2, inputs), (0.1, turns)], by_success
    )
    return _error(length_penalty(config, rewards, group), np.array(wanted))


def repetition_error(rng: np.random.Generator) -> float:
    """The repetition penalty."""
    group, n = random_group(rng), int(rng.integers(1, 5))
    wanted = []
    for e in group:
        [sample] = e.result.samples
        runs: list[list[int]] = [[]]
        for token, trained in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True):
            if trained:
                runs[-1].append(token)
            else:
                runs.append([])
        wanted.append(0.5 * reference.repetition(runs, n))
    return _error(repetition_penalty(RepetitionPenaltyConfig(ngram=n, coef=0.5), group), np.array(wanted))


def overlong_error(rng: np.random.Generator) -> float:
    """DAPO's soft overlong punishment, of the longest turn or of the whole episode."""
    limit = int(rng.integers(2, 40))
    cache, per = int(rng.integers(1, limit)), str(rng.choice(["turn", "episode"]))
    turns = [rng.integers(1, 60, int(rng.integers(1, 4))).tolist() for _ in range(8)]
    config = SoftOverlongConfig(per=per, max_tokens=limit, buffer=cache, coef=1.0)
    wanted = [max(reference.soft_overlong(n, limit, cache) for n in (t if per == "turn" else [sum(t)])) for t in turns]
    return _error(soft_overlong_penalty(config, [episode(0.0, t, rng) for t in turns], 999), np.array(wanted))


CLAIMS: dict[str, tuple[Callable[[str, np.random.Generator], float], tuple[str, ...]]] = {
    "value": (value_error, tuple(REFERENCES)),
    "order": (order_error, tuple(REFERENCES)),
    "shift": (shift_error, tuple(k for k in COMPARING if k != "max_rl")),
    "roles": (roles_error, tuple(k for k in REFERENCES if k != "sft")),
    "equal": (equal_error, COMPARING),
    "mean": (mean_error, CENTERED),
}
OTHERS: dict[str, Callable[[np.random.Generator], float]] = {
    "remax": remax_error,
    "rae": rae_error,
    "gae": gae_error,
    "gdpo": gdpo_error,
    "opd": partial(distillation_error, "opd"),
    "opsd": partial(distillation_error, "opsd"),
    "sdpo": partial(distillation_error, "sdpo"),
    "optimal_token_baseline": optimal_token_error,
    "hierarchical_grpo": hierarchical_error,
    "length penalty": length_error,
    "repetition penalty": repetition_error,
    "soft overlong": overlong_error,
}


def prove(trials: int) -> Iterable[Proof]:
    """Every algorithm against every claim that it makes, `trials` random groups each."""
    for claim, (check, kinds) in CLAIMS.items():
        for kind in kinds:
            errors = [check(kind, np.random.default_rng(seed)) for seed in range(trials)]
            yield Proof(kind, claim, trials, float(np.max(errors)), EXACT if claim == "equal" else BOUND)
    for name, other in OTHERS.items():
        errors = [other(np.random.default_rng(seed)) for seed in range(trials)]
        yield Proof(name, "value", trials, float(np.max(errors)), BOUND)
