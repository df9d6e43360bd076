"""Scores of an evaluation and their uncertainty. numpy alone.

Sources:
    intervals   percentile bootstrap: Efron and Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13
    paired test sign-flip permutation test: Fisher 1935, "The Design of Experiments", section 21; p with the observed
                arrangement counted: Phipson and Smyth 2010, "Permutation P-values Should Never Be Zero"

Tasks are what is drawn at random (a benchmark's tasks stand for all such tasks); the rollouts of one task are not
independent, so intervals and tests resample tasks, never rollouts.
"""

from collections.abc import Callable, Sequence

import numpy as np

CHUNK = 1 << 22
"""Random numbers held at once."""
EXACT_UP_TO = 14
"""Pairs up to which the permutation test goes through all sign patterns."""


def _resampled_means(values: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    means = np.empty(num_resamples)
    rows = max(1, CHUNK // len(values))
    for start in range(0, num_resamples, rows):
        count = min(rows, num_resamples - start)
        means[start : start + count] = values[rng.integers(0, len(values), (count, len(values)))].mean(axis=1)
    return means


def bootstrap_interval(
    values: Sequence[float] | np.ndarray, *, confidence: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over tasks.

    Args:
        values: one a task.
        confidence: 0.95 gives the 2.5th and the 97.5th percentile.

    Raises:
        ValueError: no task.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("no task, so no interval")
    if array.size == 1 or np.all(array == array[0]):
        return float(array[0]), float(array[0])
    tail = (1 - confidence) / 2
    low, high = np.quantile(_resampled_means(array, num_resamples, seed), [tail, 1 - tail])
    return float(low), float(high)


def sign_flip_test(
    differences: Sequence[float] | np.ndarray, *, num_permutations: int = 10_000, seed: int = 0
) -> float:
    """Two-sided p of "the mean difference is 0, each pair's sign is arbitrary".

    Up to `EXACT_UP_TO` pairs that differ all sign patterns are counted, else random ones and the observed one.

    Args:
        differences: one a task.

    Raises:
        ValueError: no pair.
    """
    array = np.asarray(differences, dtype=np.float64)
    if array.size == 0:
        raise ValueError("no pair, so no test")
    array = array[array != 0]  # they stay 0 under every pattern
    if array.size == 0:
        return 1.0
    least = abs(array.sum()) - 1e-12 * np.abs(array).sum()  # equal sums must not differ by rounding
    if array.size <= EXACT_UP_TO:
        signs = 1 - 2 * ((np.arange(2**array.size)[:, None] >> np.arange(array.size)) & 1)
        return float(np.mean(np.abs(signs @ array) >= least))
    rng = np.random.default_rng(seed)
    rows, as_far = max(1, CHUNK // array.size), 0
    for start in range(0, num_permutations, rows):
        count = min(rows, num_permutations - start)
        signs = rng.integers(0, 2, (count, array.size)) * 2 - 1
        as_far += int(np.sum(np.abs(signs @ array) >= least))
    return (as_far + 1) / (num_permutations + 1)


def estimate(
    values: Sequence[float], interval: Callable[[np.ndarray], tuple[float, float]]
) -> dict[str, float | list[float]]:
    """Mean and interval as plain numbers."""
    array = np.asarray(values, dtype=np.float64)
    low, high = interval(array)
    return {"value": float(array.mean()), "interval": [low, high]}
