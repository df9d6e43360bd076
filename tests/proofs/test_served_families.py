"""A family whose engine was wrong; all of them where time is no matter."""

from pathlib import Path

import pytest

from tests.proofs.prove_served_families import BOUND, judge, prove
from tests.proofs.served_engines import engines

SAMPLE = ("gpt_oss",)  # its code loads experts past vLLM's reloads


@pytest.mark.slow
@pytest.mark.timeout(900)  # two minutes of CPU, beside five others on two cores
def test_engines_sample_what_the_trainer_trains(tmp_path: Path) -> None:
    with engines() as served:
        for family in SAMPLE:
            found = judge(family, tmp_path / family, served)
            assert found.verdict == "served" and found.worst < BOUND, found


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)  # an engine a family: a quarter of an hour, beside others an hour; each has a limit
def test_every_family_is_served_right_or_not_at_all() -> None:
    proofs = list(prove(1))
    assert len(proofs) > 150
    assert [p for p in proofs if not p.holds or p.verdict == "wrong"] == []
    assert sum(p.verdict == "served" for p in proofs) > 70
