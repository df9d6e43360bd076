"""How the rewards of one group become advantages: one small function per algorithm, found by its config name.

Called by `assemble`. To add an algorithm write one function, decorate it with `@register("name")` and allow the name in
`orchestrator.advantage.type`; nothing else has to change.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prime_hpc.config.sections.orchestrator import AdvantageConfig

FloatArray = NDArray[np.float64]
ScoreGroup = Callable[..., FloatArray]

SPREAD_TOLERANCE = 1e-9
"""Rewards that differ by less than this share of their size are equal: their difference is rounding, not signal."""


@dataclass(frozen=True)
class Algorithm:
    """A registered way to score a group, and the smallest group that it can score."""

    name: str
    score: ScoreGroup
    min_group: int


_REGISTRY: dict[str, Algorithm] = {}


def register(name: str, *, min_group: int = 2) -> Callable[[ScoreGroup], ScoreGroup]:
    """Make `score(rewards, *, num_tokens, config)` known as `name`; groups below `min_group` rollouts are unusable."""

    def decorate(score: ScoreGroup) -> ScoreGroup:
        assert name not in _REGISTRY, f"advantage {name} is registered twice"
        _REGISTRY[name] = Algorithm(name, score, min_group)
        return score

    return decorate


def get_algorithm(name: str) -> Algorithm:
    """The algorithm called `name`. Raises ValueError that lists the known names."""
    if name not in _REGISTRY:
        raise ValueError(f"orchestrator.advantage.type = {name!r} is unknown; known: {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


def score_group(rewards: FloatArray, num_tokens: NDArray[np.int64], config: AdvantageConfig) -> FloatArray:
    """Advantages float64[G] of one group.

    rewards float64[G], finite (a rollout whose reward is NaN or infinite is unusable and never gets here);
    num_tokens int64[G]: sampled tokens of each rollout, for algorithms that weigh by length.
    Raises ValueError when a reward is not finite or the group is too small for the algorithm.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    algorithm = get_algorithm(config.type)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    if len(rewards) < algorithm.min_group:
        raise ValueError(f"{config.type} needs at least {algorithm.min_group} rollouts in a group, got {len(rewards)}")
    advantages = np.asarray(algorithm.score(rewards, num_tokens=num_tokens, config=config), dtype=np.float64)
    assert advantages.shape == rewards.shape, f"{config.type} returned {advantages.shape} for {rewards.shape}"
    return advantages


def centered(rewards: FloatArray) -> FloatArray:
    """r - mean(r), exactly zero where all rewards are equal (a plain difference leaves rounding behind)."""
    spread = rewards.max() - rewards.min()
    if spread <= SPREAD_TOLERANCE * max(1.0, float(np.abs(rewards).max())):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


@register("grpo")
def grpo(rewards: FloatArray, *, num_tokens: NDArray[np.int64], config: AdvantageConfig) -> FloatArray:
    """GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3 and outcome supervision in section 4.1.2).

    A_i = (r_i - mean(r)) / (std(r) + eps), std over the group (population, ddof = 0). Equal rewards give zeros.
    """
    delta = centered(rewards)
    return delta / (float(np.sqrt(np.mean(delta**2))) + config.eps)


@register("grpo_no_std")
def grpo_no_std(rewards: FloatArray, *, num_tokens: NDArray[np.int64], config: AdvantageConfig) -> FloatArray:
    """Dr. GRPO (arXiv 2503.20783, section 3.2): A_i = r_i - mean(r).

    Without the division, questions whose rewards hardly differ do not get the weight of those that differ much.
    """
    return centered(rewards)


@register("none", min_group=1)
def none(rewards: FloatArray, *, num_tokens: NDArray[np.int64], config: AdvantageConfig) -> FloatArray:
    """REINFORCE without a baseline (Williams 1992): A_i = r_i. The only one that allows groups of one rollout."""
    return rewards.copy()
