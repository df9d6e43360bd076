"""Two families of two kinds under every layout; all of them where time is no matter."""

import pytest

from tests.proofs.prove_family_layouts import judge, prove

EXACT = {"fsdp", "cp", "ep", "tp", "fsdp lora", "cp lora"}
SAMPLE = {"qwen3_moe": EXACT, "gpt2": {"fsdp", "cp"}}


def test_families_train_under_a_layout_or_are_refused_before_the_queue() -> None:
    proofs = judge(list(SAMPLE))
    assert [p for p in proofs if p.verdict not in ("exact", "refused") or not p.holds] == []
    exact = {p.subject for p in proofs if p.verdict == "exact"}
    assert exact == {f"{family} {layout}" for family, layouts in SAMPLE.items() for layout in layouts}
    assert all(p.reason for p in proofs if p.verdict == "refused")


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)  # a quarter of an hour, beside others an hour; each group of families has a limit of its own
def test_every_family_is_exact_or_refused_under_every_layout() -> None:
    proofs = list(prove(1))
    assert len(proofs) > 900
    assert [p for p in proofs if not p.holds or p.verdict == "wrong"] == []
