"""Scores and intervals against references that share no code with them: plain counting and exact distributions."""

import json
from collections.abc import Sequence
from itertools import combinations, product
from math import comb
from pathlib import Path

import numpy as np
import pytest

from prime_hpc.config import ConfigError
from prime_hpc.evals.compare import Side, compare, lines, read_side
from prime_hpc.evals.episodes import results_file
from prime_hpc.evals.statistics import bootstrap_interval, sign_flip_test
from prime_hpc.observe.pass_at_k import pass_at_k


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_counts_the_subsets_with_a_correct_sample(n: int) -> None:
    for c in range(n + 1):
        correct = np.arange(n) < c
        for k in range(1, n + 1):
            subsets = [correct[list(chosen)].any() for chosen in combinations(range(n), k)]
            assert pass_at_k(n, c, k) == pytest.approx(np.mean(subsets), abs=1e-12), (n, c, k)


def test_pass_at_k_of_many_samples_is_the_binomial_ratio() -> None:
    for n, c, k in [(200, 13, 100), (1000, 1, 10), (200, 200, 1), (200, 0, 200), (50, 49, 2)]:
        assert pass_at_k(n, c, k) == pytest.approx(1 - comb(n - c, k) / comb(n, k), abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    """Its mean over all outcomes of n draws, each with probability p, is 1 - (1 - p)^k."""
    n, k, p = 6, 3, 0.3
    mean = sum(comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 1, 3), (4, 5, 1), (4, 1, 0), (3, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def binomial_quantile(n: int, p: float, q: float) -> int:
    """The least number of successes with cumulative probability of at least q."""
    total = 0.0
    for successes in range(n + 1):
        total += comb(n, successes) * p**successes * (1 - p) ** (n - successes)
        if total >= q:
            return successes
    return n


@pytest.mark.parametrize(("n", "ones", "confidence"), [(40, 12, 0.95), (100, 50, 0.9), (25, 3, 0.99)])
def test_the_interval_of_zeros_and_ones_is_the_binomials(n: int, ones: int, confidence: float) -> None:
    """A resample of n tasks of which a share p is 1 has a binomial number of ones: the interval's ends are known."""
    values = [1.0] * ones + [0.0] * (n - ones)
    low, high = bootstrap_interval(values, confidence=confidence, num_resamples=40_000, seed=3)
    tail = (1 - confidence) / 2
    assert abs(low * n - binomial_quantile(n, ones / n, tail)) <= 1
    assert abs(high * n - binomial_quantile(n, ones / n, 1 - tail)) <= 1


def test_the_interval_against_a_loop_of_its_own() -> None:
    values = np.random.default_rng(5).beta(0.5, 0.8, 60)
    random = np.random.RandomState(11)
    means = [np.mean([values[random.randint(60)] for _ in range(60)]) for _ in range(4000)]
    expected = np.percentile(means, [2.5, 97.5])
    assert np.allclose(bootstrap_interval(values, num_resamples=20_000), expected, atol=0.01)


def test_intervals_are_reproducible_and_degenerate_where_nothing_varies() -> None:
    values = [0.1, 0.9, 0.4]
    assert bootstrap_interval(values, seed=1) == bootstrap_interval(values, seed=1)
    assert bootstrap_interval([0.5] * 9) == (0.5, 0.5) and bootstrap_interval([0.25]) == (0.25, 0.25)
    with pytest.raises(ValueError):
        bootstrap_interval([])


def test_sign_flips_of_few_pairs_are_counted_all() -> None:
    differences = [0.3, -0.1, 0.2, 0.0, 0.4, 0.05]
    observed = abs(sum(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in product((1, -1), repeat=6)]
    expected = np.mean([total >= observed - 1e-12 for total in sums])
    assert sign_flip_test(differences) == pytest.approx(expected)
    assert sign_flip_test([0.0, 0.0]) == 1.0 and sign_flip_test([1.0] * 10) == pytest.approx(2 / 2**10)
    with pytest.raises(ValueError):
        sign_flip_test([])


def test_sign_flips_of_many_pairs_are_the_binomials() -> None:
    """Differences of one size: the test is the sign test, whose p is a sum of binomial terms."""
    n, up = 60, 38
    expected = 2 * sum(comb(n, i) for i in range(up, n + 1)) / 2**n
    p = sign_flip_test([0.5] * up + [-0.5] * (n - up), num_permutations=100_000, seed=2)
    assert p == pytest.approx(expected, abs=0.004)
    assert sign_flip_test([1.0] * 100, num_permutations=999) == pytest.approx(1 / 1000)


def test_differences_that_cancel_are_no_evidence() -> None:
    """0.1 + 0.1 + 0.1 - 0.3 is not 0 in floating point, in one order of additions more than in another."""
    assert sign_flip_test([0.1, 0.1, 0.1, -0.3]) == 1.0


def side(run_dir: Path, rewards: Sequence[Sequence[float]]) -> Side:
    """An evaluation whose tasks got these rewards."""
    results_file(run_dir).parent.mkdir(parents=True)
    with results_file(run_dir).open("w") as file:
        for task, values in enumerate(rewards):
            for rollout, reward in enumerate(values):
                state = "completed" if np.isfinite(reward) else "failed"
                row = {"step": 0, "env": "e", "task": task, "rollout": rollout, "state": state, "reward": reward}
                file.write(json.dumps(row) + "\n")
    return read_side(str(run_dir))


def test_the_same_rewards_in_another_order_are_no_difference(tmp_path: Path) -> None:
    """Their means differ in the last bit, on all tasks to the same side: p was 0.008."""
    one, other = [0.1, 0.2, 0.3], [0.3, 0.2, 0.1]
    assert np.mean(one) != np.mean(other)
    row = compare(side(tmp_path / "a", [one] * 8), side(tmp_path / "b", [other] * 8))["environments"]["e"]
    assert (row["p"], row["num_better"], row["num_worse"], row["interval"]) == (1.0, 0, 0, [0.0, 0.0])


def test_a_comparison_says_that_one_of_both_has_played_less_of_some_tasks(tmp_path: Path) -> None:
    whole, half = side(tmp_path / "a", [[1.0, 0.0]] * 4), side(tmp_path / "b", [[1.0, 0.0]] * 2 + [[1.0]] * 2)
    assert "fewer scored rollouts" not in "\n".join(lines(compare(whole, whole)))
    assert "e: 2 tasks of B have fewer scored rollouts than its others" in "\n".join(lines(compare(whole, half)))


def test_an_evaluation_that_has_failed_is_not_taken_for_one_of_other_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all episodes of step 0 have failed"):
        side(tmp_path / "a", [[float("nan")]] * 4)
