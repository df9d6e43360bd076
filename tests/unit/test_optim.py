"""Learning-rate schedules at their corners, and which parameters decay."""

import itertools

import pytest
import torch

from prime_hpc.config.sections.trainer import OptimConfig, SchedulerConfig
from prime_hpc.trainer.optim import build_optimizer, learning_rate_factor, set_learning_rate


def factors(max_steps: int, **config: object) -> list[float]:
    schedule = SchedulerConfig.model_validate(config)
    return [learning_rate_factor(schedule, n, max_steps) for n in range(1, max_steps + 1)]


def test_constant_with_warmup() -> None:
    assert factors(6, type="constant", warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_at_the_minimum() -> None:
    assert factors(6, type="linear", warmup_steps=2, min_lr_ratio=0.2) == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])
    assert factors(4, type="linear", decay_steps=2) == pytest.approx([0.5, 0.0, 0.0, 0.0])


def test_cosine_is_half_way_in_the_middle_and_never_rises_after_warmup() -> None:
    values = factors(12, type="cosine", warmup_steps=2)
    assert values[6] == pytest.approx(0.5) and values[-1] == pytest.approx(0.0, abs=1e-12)
    assert all(a >= b for a, b in itertools.pairwise(values[1:]))


def test_wsd_is_constant_then_linear() -> None:
    assert factors(10, type="wsd", warmup_steps=2, decay_steps=4) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0]
    )
    assert factors(20, type="wsd")[17:] == pytest.approx([1.0, 0.5, 0.0])


def test_schedule_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="warmup_steps"):
        factors(10, type="wsd", warmup_steps=8, decay_steps=4)


def test_norms_do_not_decay_and_zero_rate_changes_nothing() -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = build_optimizer([matrix, vector], OptimConfig(lr=0.1, weight_decay=0.5))
    matrix.grad, vector.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95)) and torch.equal(vector, torch.ones(2))
    set_learning_rate(optimizer, 0.0)
    before = matrix.detach().clone()
    matrix.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(matrix, before)
