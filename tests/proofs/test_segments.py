"""A teacher with another tokenizer: the short form of `prove_segments`, and what it would notice."""

from typing import Any

import numpy as np
import pytest

from prime_hpc.orchestrator.cross_tokenizer import reading
from tests.proofs import prove_segments


def broken() -> set[str]:
    return {p.subject for p in prove_segments.prove(1) if not p.holds}


def test_the_expected_gradient_is_the_reverse_kls() -> None:
    assert broken() == set()


def test_shares_of_a_gap_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reading.segment_gaps

    def shares(policy: Any, teacher: Any, segments: Any, teacher_segments: Any) -> Any:
        return right(policy, teacher, segments, teacher_segments) / np.bincount(segments)

    monkeypatch.setattr(reading, "segment_gaps", shares)
    assert broken() == {"larger ones of the teacher", "of all lengths", "one segment"}
