"""Objectives against the reference and under relayout, on batches that hypothesis draws (ragged, also empty ones)."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prime_hpc.config.named_code import OBJECTIVES
from tests.proofs.objective_cases import Case, cases, ours, pack, random_batch
from tests.proofs.prove_objectives import PROPERTIES
from tests.proofs.reference import token_losses

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=7)
CASES = cases()


def test_every_objective_is_proved() -> None:
    assert {case.config.type for case in CASES} == set(OBJECTIVES)


@pytest.mark.parametrize("claim", PROPERTIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(lengths=LENGTHS, seed=st.integers(0, 2**20))
def test_claim_holds(case: Case, claim: str, lengths: list[int], seed: int) -> None:
    check, bound = PROPERTIES[claim]
    assert check(case, seed, lengths) < bound


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_proofs_see_both_sides_of_every_clip(case: Case) -> None:
    """A clip that is never reached, or always, would prove nothing about it."""
    sums: dict[str, float] = {}
    count = 0
    for seed in range(30):
        batch, theta = random_batch(case, seed)
        _, _, found = ours(case, [pack(batch, [list(range(len(batch)))])], batch, theta)
        count += sum(len(s.targets()) for s in batch)
        sums = {k: sums.get(k, 0.0) + v for k, v in found.items()}
    clips = (
        case.config.type not in ("reinforce", "nll", "sapo", "vespo")
        and case.config.correction is None
        and case.config.second_moment is None  # a clip that is never reached, by the paper
        and case.setting.objective != "sft"
    )
    if clips:
        assert 0.01 < sums["clipped"] / count < 0.99
        assert sums["clipped"] == sums["clipped_high"] + sums["clipped_low"]
    if case.config.correction is not None:
        assert 0.05 < sums["corrected"] / count < 0.95
    if case.config.covariance is not None:
        assert 0.05 < sums["high_covariance"] / count < 0.5
    if case.config.second_moment is not None:
        assert 0.02 < sums["second_moment_masked"] / count < 0.5
    if case.config.off_policy_mask is not None:
        assert 0.02 < sums["off_policy_masked"] / count < 0.5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_batch_without_targets_has_loss_and_gradient_zero(case: Case) -> None:
    batch, theta = random_batch(case, 0, [4, 1, 3])
    masked = [type(s)(**{**s.__dict__, "trained": np.zeros_like(s.trained)}) for s in batch]
    for ranks in ([pack(masked, [[0, 1, 2]])], [pack([], [[]]), pack(masked, [[0], [2], []])]):
        value, grad, _ = ours(case, ranks, masked, theta)
        assert value == 0 and not grad.any()
    assert list(token_losses(case.setting, masked, theta, theta)) == []
