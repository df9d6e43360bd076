"""Advantages for the best of k rollouts: pass@k, where rewards are 0 and 1, is what is trained, not the mean reward.

With k = `orchestrator.advantage.pass_k`, over the subsets I of k of the group's n rollouts, R_I = max_{j in I} r_j:

**pass_at_k** (pass@k training, arXiv 2508.10751, its analytical form): every subset is one answer with the reward R_I,
which GRPO compares with the others; a rollout has the mean of its subsets' advantages.

    A_i = (mean_{I with i} R_I - mean_I R_I) / (std_I R_I + eps)

With rewards of 0 and 1 these are the paper's: mean_I R_I = 1 - C(n_bad, k) / C(n, k), std^2 = mean (1 - mean). Other
rewards have no formula there; the sums over subsets are the same.

**pkpo** (arXiv 2505.15201, its leave-one-out-minus-one estimate): what a rollout adds to the subsets that it is in.

    A_i = k mean_{I with i} (R_I - R_{I without i})

The mean over the n rollouts of A_i grad log pi_i is an unbiased gradient of E[max of k rollouts], whatever the rewards
(the paper's sum over rollouts has 1/n in A_i). With k = n (arXiv 2503.19595) the best rollout alone has an advantage, n
times its distance to the second best: verl's `grpo_passk`, but for n and its division by the standard deviation.

Neither walks through subsets: of ordered rewards, C(a, b) of them have their best at a given place.

Edge cases: equal rewards give exact zeros, and so does a group in which every subset holds one of the best, with
`pass_at_k`. Where rollouts have failed, k is at most as many as are left, with `pass_at_k` one fewer. `pkpo` is never
negative: nobody is made less likely but for the others' sake. Where episodes have several agents the group is one
role's traces (`base.score_by_role`).
"""

from math import comb

import numpy as np

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import SPREAD_TOLERANCE, FloatArray, RewardGroup


def pass_at_k(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    order, values = _ordered(group.rewards)
    n = len(values)
    k = min(config.pass_k, n - 1)
    num_all = comb(n, k)
    best = np.array([comb(j, k - 1) / num_all for j in range(n)])  # share of the subsets whose best is the j-th
    mean = best @ values
    num_own = comb(n - 1, k - 1)
    own = np.array([comb(p, k - 1) / num_own for p in range(n)])
    above = np.array([comb(j - 1, k - 2) / num_own if j and k > 1 else 0.0 for j in range(n)])
    tail = np.append(np.cumsum((above * values)[::-1])[::-1][1:], 0.0)
    advantages = (own * values + tail - mean) / (float(np.sqrt(best @ (values - mean) ** 2)) + config.eps)
    return _in_their_order(advantages, order)


def pkpo(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    order, values = _ordered(group.rewards)
    n = len(values)
    k = min(config.pass_k, n)
    num_own = comb(n - 1, k - 1)
    second = np.array([comb(j, k - 2) / num_own for j in range(n)])
    gaps = np.maximum(np.subtract.outer(values, values), 0.0)
    return _in_their_order(k * (gaps @ second), order)


def _ordered(rewards: FloatArray) -> tuple[np.ndarray, FloatArray]:
    """Return indices in rising order, and the rewards in it less the best one; what differs by rounding is equal."""
    order = np.argsort(rewards, kind="stable")
    gaps = np.diff(rewards[order])
    gaps[gaps <= SPREAD_TOLERANCE * max(1.0, float(np.abs(rewards).max()))] = 0.0
    return order, -np.append(np.cumsum(gaps[::-1])[::-1], 0.0)


def _in_their_order(values: FloatArray, order: np.ndarray) -> FloatArray:
    found = np.empty_like(values)
    found[order] = values
    return found
