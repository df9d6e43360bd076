"""Advantages and penalties one rollout at a time, in plain Python, written from the papers. Imports none of ours."""

from collections.abc import Sequence
from itertools import combinations
from math import exp, sqrt


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def grpo(r: Sequence[float], lengths: Sequence[int], eps: float = 1e-6) -> list[float]:
    """(r_i - mean) / (std + eps), the population's std."""
    m = mean(r)
    std = sqrt(mean([(x - m) ** 2 for x in r]))
    return [(x - m) / (std + eps) for x in r]


def gdpo(scores: Sequence[Sequence[float]], weights: Sequence[float], eps: float = 1e-6) -> list[float]:
    """sum_k w_k (s_ik - mean(s_k)) / (std(s_k) + eps); `scores`: of each function, of all rollouts."""
    columns = [grpo(column, [], eps) for column in scores]
    return [sum(w * column[i] for w, column in zip(weights, columns, strict=True)) for i in range(len(scores[0]))]


def dr_grpo(r: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """r_i - mean."""
    return [x - mean(r) for x in r]


def rloo(r: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """r_i - mean of the others."""
    return [x - mean([y for j, y in enumerate(r) if j != i]) for i, x in enumerate(r)]


def opo(r: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """r_i - sum l r / sum l."""
    baseline = sum(n * x for n, x in zip(lengths, r, strict=True)) / sum(lengths)
    return [x - baseline for x in r]


def max_rl(r: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """(r_i - mean) / mean; nothing where nobody succeeds."""
    m = mean(r)
    return [(x - m) / m if m > 0 else 0.0 for x in r]


def pass_at_k(r: Sequence[float], lengths: Sequence[int], k: int = 4, eps: float = 1e-6) -> list[float]:
    """Each rollout's mean over all the subsets of k that it is in, of (best - mean) / (std + eps) over all subsets."""
    subsets = list(combinations(range(len(r)), min(k, len(r) - 1)))
    scores = grpo([max(r[j] for j in subset) for subset in subsets], [], eps)
    return [mean([a for a, subset in zip(scores, subsets, strict=True) if i in subset]) for i in range(len(r))]


def pkpo(r: Sequence[float], lengths: Sequence[int], k: int = 4) -> list[float]:
    """k times the mean over the subsets of k that a rollout is in, of their best less their best without it."""
    k = min(k, len(r))
    found = []
    for i, own in enumerate(r):
        bests = [max(r[j] for j in rest) for rest in combinations([j for j in range(len(r)) if j != i], k - 1)]
        found.append(k * mean([max(own, best) - best for best in bests]))
    return found


def reinforce(r: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """r_i."""
    return list(r)


def sft(r: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """1, whatever the reward."""
    return [1.0 for _ in r]


def distillation(
    r: Sequence[float],
    policy: Sequence[Sequence[float]],
    teacher: Sequence[Sequence[float]],
    weight: float,
    bound: float,
) -> list[list[float]]:
    """w (r_i - mean) + log p_teacher - log p_policy, the latter within [-bound, bound], for the sampled tokens."""
    return [
        [weight * (x - mean(r)) + max(-bound, min(q - p, bound)) for p, q in zip(ps, qs, strict=True)]
        for x, ps, qs in zip(r, policy, teacher, strict=True)
    ]


def optimal_token_baseline(r: Sequence[float], policy: Sequence[Sequence[float]]) -> list[list[float]]:
    """r_i - sum_j r_j W_jt / sum_j W_jt over rollouts of t tokens or more, W_jt the sum of 1 - pi up to the t-th."""
    found = []
    for i, own in enumerate(policy):
        row = []
        for t in range(len(own)):
            reach = [j for j in range(len(r)) if len(policy[j]) > t]
            w = {j: sum(1 - exp(x) for x in policy[j][: t + 1]) for j in reach}
            row.append(r[i] - sum(r[j] * w[j] for j in reach) / sum(w.values()))
        found.append(row)
    return found


def hierarchical(episodes: Sequence[Sequence[tuple[str, float]]], solvers: set[str]) -> list[list[float]]:
    """Of each trace (agent, reward): a solver's against its own episode, a proposer's against all episodes."""
    found = []
    for episode in episodes:
        row = []
        for agent, reward in episode:
            level = [episode] if agent in solvers else episodes
            row.append(reward - mean([x for e in level for a, x in e if a == agent]))
        found.append(row)
    return found


def rae(
    games: Sequence[Sequence[tuple[str, float]]], game: str, b: dict[tuple[str, str], float], decay: float
) -> list[list[float]]:
    """SPIRAL's eq. 4 and 5 for each (role, R) in turn: b_Gp <- decay b_Gp + (1 - decay) R, A = R - b_Gp; changes b."""
    found = []
    for seats in games:
        row = []
        for role, reward in seats:
            b[game, role] = decay * b.get((game, role), 0.0) + (1 - decay) * reward
            row.append(reward - b[game, role])
        found.append(row)
    return found


def length_penalty(r: Sequence[float], counts: Sequence[tuple[float, Sequence[int]]], by_success: bool) -> list[float]:
    """Scale x sum over kinds of weight x count / the group's greatest count."""
    scale = max(0.0, mean(r)) if by_success else 1.0
    return [scale * sum(w * c[i] / max(1, max(c)) for w, c in counts) for i in range(len(r))]


def repetition(runs: Sequence[Sequence[int]], n: int) -> float:
    """1 - distinct n-grams / n-grams."""
    grams = [tuple(run[i : i + n]) for run in runs for i in range(len(run) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def soft_overlong(length: int, limit: int, cache: int) -> float:
    """DAPO's eq. 13 with its sign turned: what is taken off."""
    if length <= limit - cache:
        return 0.0
    return (length - (limit - cache)) / cache if length <= limit else 1.0


def gae(
    values: Sequence[float], rewards: Sequence[float], gamma: float, lam: float, critic_lam: float, alpha: float | None
) -> tuple[list[float], list[float]]:
    """Schulman et al.'s eq. 16 of one sequence, from its end: its tokens' advantages, and the returns V_t + A'_t, A' of
    `critic_lam`; with `alpha` VAPO's lambda, 1 - 1 / (alpha n)."""
    n = len(values)
    if alpha is not None:
        lam = max(0.0, 1 - 1 / (alpha * n))
    advantages, returns = [0.0] * n, [0.0] * n
    of_policy = of_critic = follows = 0.0
    for t in reversed(range(n)):
        delta = rewards[t] + gamma * follows - values[t]
        of_policy = delta + gamma * lam * of_policy
        of_critic = delta + gamma * critic_lam * of_critic
        advantages[t], returns[t], follows = of_policy, values[t] + of_critic, values[t]
    return advantages, returns
