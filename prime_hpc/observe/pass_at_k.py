"""pass@k: the chance that one of k tries at a task is good (Chen et al. 2021, "Evaluating Large Language Models Trained
on Code", arXiv:2107.03374, equation 1)."""

import math
from collections.abc import Sequence

_ROUNDING = 1e-9
"""A reward of 0.1 + 0.2 has passed 0.3."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples, drawn without replacement from those of a task, is correct.

    Unbiased for 1 - (1 - p)^k: 1 - C(n - c, k) / C(n, k), as the product 1 - prod_{i = n-c+1}^{n} (1 - k / i).

    Args:
        num_samples: n, of one task.
        num_correct: c of them.
        k: at most n.

    Raises:
        ValueError: k is not in 1..n, or c is not in 0..n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples of a task, there are {num_samples}")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"{num_correct} of {num_samples} samples cannot be correct")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def task_pass(rewards: Sequence[float], k: int, threshold: float) -> float:
    """pass@k of one task whose rollouts got these rewards; those from `threshold` on have passed."""
    return pass_at_k(len(rewards), sum(reward >= threshold - _ROUNDING for reward in rewards), k)


def powers_of_two(num_rollouts: int) -> list[int]:
    """Return the k of pass@k for so many rollouts of a task, where none are stated: 1, 2, 4, ..."""
    return [2**i for i in range(num_rollouts.bit_length())]
