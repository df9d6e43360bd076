"""Advantages and penalties against the reference on drawn groups, and the tool that prints the proofs."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_hpc.config.named_code import ALGORITHMS
from tests.proofs import Proof
from tests.proofs.prove_algorithms import BOUND, CLAIMS, EXACT, OTHERS, REFERENCES

SEEDS = st.integers(0, 2**30)
ROOT = Path(__file__).resolve().parents[2]


def test_every_algorithm_is_proved() -> None:
    own = {"remax", "rae", "gae", "gdpo", "opd", "opsd", "sdpo", "hierarchical_grpo", "optimal_token_baseline"}
    own.add("grpo_shuffled")  # tests/unit/test_algorithms.py
    assert {*REFERENCES, *own} == set(ALGORITHMS)


@pytest.mark.parametrize(("claim", "kind"), [(c, k) for c, (_, kinds) in CLAIMS.items() for k in kinds])
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_claim_holds(claim: str, kind: str, seed: int) -> None:
    assert CLAIMS[claim][0](kind, np.random.default_rng(seed)) < (EXACT if claim == "equal" else BOUND)


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS)
def test_value_equals_the_reference(name: str, seed: int) -> None:
    assert OTHERS[name](np.random.default_rng(seed)) < BOUND


def test_a_proof_of_nothing_or_of_nan_does_not_hold() -> None:
    assert Proof("a", "value", 3, 1e-9, 1e-6).holds
    assert not Proof("a", "value", 3, 1e-5, 1e-6).holds
    assert not Proof("a", "value", 0, 0.0, 1e-6).holds
    assert not Proof("a", "value", 3, math.nan, 1e-6).holds


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "proofs"), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.exhaustive
def test_the_tool_prints_one_line_a_subject() -> None:
    result = run_tool("algorithms", "--trials", "2", "--json")
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout.splitlines()[-1])["algorithms"]
    assert all(row["holds"] and row["count"] == 2 for row in rows)
    assert "opo" in result.stdout and "0 failed" in result.stdout
    assert run_tool("no-such-proof").returncode == 2
