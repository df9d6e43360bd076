"""A few families split over two ranks; all of them where time is no matter."""

import pytest

from tests.proofs.prove_tensor_parallel import judge, prove

SAMPLE = {"qwen3": "exact_split", "gpt_neox": "exact_split", "gemma2": "refused", "gpt2": "refused"}
SAMPLE |= {"llama4_text": "refused"}  # its plan is of modules that it has elsewhere: nothing was split


def test_a_family_is_split_as_the_table_says() -> None:
    proofs = judge(SAMPLE)
    assert {proof.subject: proof.verdict for proof in proofs} == SAMPLE
    assert [proof for proof in proofs if not proof.holds] == []


@pytest.mark.exhaustive
def test_every_family_is_split_exactly_or_refused() -> None:
    proofs = list(prove(1))
    assert len(proofs) > 100
    assert [p for p in proofs if not p.holds] == []
