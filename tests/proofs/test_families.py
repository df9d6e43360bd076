"""A few families of each kind through the whole path; all of them where time is no matter."""

from pathlib import Path

import pytest

from tests.proofs.prove_families import BOUND, judge, prove

SAMPLE = {
    "qwen3_moe": "exact_packed",
    "deepseek_v3": "exact_packed",
    "gpt_oss": "exact_packed",
    "afmoe": "exact_packed",  # passes its mask by name
    "llama4_text": "exact_packed",
    "qwen3_5_text": "exact_single",
    "nemotron_h": "exact_single",
    "falcon": "exact_single",
    "bert": "refused",
}


@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_is_as_the_table_says(family: str, tmp_path: Path) -> None:
    found = judge(family, tmp_path)
    assert found.verdict == SAMPLE[family], found
    assert found.worst < BOUND


@pytest.mark.exhaustive
def test_every_family_is_exact_or_refused() -> None:
    proofs = list(prove(1))
    assert len(proofs) > 150
    assert [p for p in proofs if not p.holds or p.verdict in ("wrong", "not_built")] == []
