"""Advantages against plain numpy, their edge cases, and the registry."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from prime_hpc.config.sections.orchestrator import AdvantageConfig
from prime_hpc.orchestrator.advantages import get_algorithm, score_group

REWARDS = arrays(np.float64, st.integers(2, 16), elements=st.floats(-10, 10, width=32))


def advantages(kind: str, rewards: list[float] | np.ndarray) -> np.ndarray:
    values = np.asarray(rewards, dtype=np.float64)
    return score_group(values, np.ones(len(values), np.int64), AdvantageConfig(type=kind))


@given(REWARDS)
def test_grpo_equals_its_formula(rewards: np.ndarray) -> None:
    if np.ptp(rewards) < 1e-6:
        return
    expected = (rewards - np.mean(rewards)) / (np.std(rewards) + 1e-6)
    np.testing.assert_allclose(advantages("grpo", rewards), expected, rtol=1e-12, atol=1e-12)


@given(REWARDS)
def test_grpo_without_std_equals_its_formula(rewards: np.ndarray) -> None:
    np.testing.assert_allclose(advantages("grpo_no_std", rewards), rewards - np.mean(rewards), atol=1e-8)


@given(REWARDS, st.floats(0.1, 10), st.floats(-5, 5))
def test_grpo_ignores_shift_and_scale_of_the_reward(rewards: np.ndarray, scale: float, shift: float) -> None:
    if np.ptp(rewards) < 0.1:
        return
    np.testing.assert_allclose(advantages("grpo", rewards), advantages("grpo", scale * rewards + shift), atol=2e-3)


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e-3, 1e6 + 0.1, -7.3])
def test_equal_rewards_give_exact_zeros(kind: str, value: float) -> None:
    assert not advantages(kind, [value] * 7).any()


def test_none_keeps_the_reward_and_copies_it() -> None:
    rewards = np.array([0.5, -1.0])
    result = advantages("none", rewards)
    assert result.tolist() == [0.5, -1.0]
    assert result is not rewards


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rewards_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        advantages("grpo", [0.0, bad])


def test_a_group_of_one_needs_no_baseline() -> None:
    assert get_algorithm("none").min_group == 1
    assert advantages("none", [2.0]).tolist() == [2.0]
    with pytest.raises(ValueError, match="at least 2"):
        advantages("grpo", [2.0])


def test_an_unknown_algorithm_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="grpo_no_std"):
        get_algorithm("grop")
