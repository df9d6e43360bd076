"""A step's loss over all of its rollouts, on a few drawn steps; counting only what trains is noticed."""

from dataclasses import replace

import pytest

from tests.proofs.objective_cases import Case
from tests.proofs.prove_denominators import BOUND, CASES, CLAIMS, value_error


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_claim_holds(case: Case, claim: str) -> None:
    assert max(CLAIMS[claim](case, seed) for seed in range(4)) < BOUND


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_counting_only_what_trains_is_noticed(case: Case) -> None:
    of_the_batch = replace(case, config=case.config.model_copy(update={"denominators": "trained"}))
    assert max(value_error(of_the_batch, seed) for seed in range(8)) > 1e-3
