"""Optimizers against the reference on drawn models."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.proofs.prove_optimizers import BOUND, CONFIGS, value_error


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**20))
def test_updates_equal_the_reference(name: str, seed: int) -> None:
    assert value_error(name, seed) < BOUND
