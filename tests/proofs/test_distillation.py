"""The divergence to a teacher: the short form of `prove_distillation`, and what it would notice."""

import pytest
import torch

from prime_hpc.trainer.objectives import distillation
from tests.proofs import prove_distillation


def broken() -> set[str]:
    return {p.claim for p in prove_distillation.prove(3) if not p.holds}


def test_value_and_gradient_are_those_of_the_whole_vocabulary() -> None:
    assert broken() == set()


def test_a_rest_that_is_left_out_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(logprobs: torch.Tensor, named: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.nn.functional.pad(logprobs, (0, 1)), logprobs.exp().sum(1)

    monkeypatch.setattr(distillation, "_with_rest", without)
    assert {"value", "gradient", "never negative"} <= broken()
