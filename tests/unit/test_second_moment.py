"""Tokens that `trainer.loss.second_moment` leaves out: the bound against a plain search, alone and over ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.second_moment import second_moment_bound
from tests.support.ranks import spawn

MOMENTS = st.lists(st.one_of(st.floats(0, 400, width=32), st.sampled_from([0.0, 1e-30, 0.04, 400.0])), max_size=30)


@pytest.fixture(scope="module")
def alone() -> Any:
    """This process is the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def searched(moments: np.ndarray, limit: float) -> float:
    """The bound by trying each moment."""
    exact = moments.astype(np.float64)
    fit = [m for m in moments if exact[moments <= m].sum() <= limit * (moments <= m).sum()]
    return float(max(fit, default=-1))


@given(moments=MOMENTS, limit=st.floats(1e-6, 500))
def test_the_bound_is_that_of_a_search(alone: None, moments: list[float], limit: float) -> None:
    found = np.array(moments, np.float32)
    bound = float(second_moment_bound(torch.from_numpy(found), limit, counts=True))
    assert ((found <= bound) == (found <= searched(found, limit))).all()


def test_a_rank_that_holds_anothers_part_counts_nothing(alone: None) -> None:
    moments = torch.tensor([9.0, 9.0])
    assert float(second_moment_bound(moments, 0.04, counts=False)) >= 9, "nobody has a token"
    assert float(second_moment_bound(moments, 0.04, counts=True)) == pytest.approx(9, abs=1e-5)
    assert float(second_moment_bound(moments, 0.04, counts=True)) < 9
    assert float(second_moment_bound(torch.tensor([float("nan"), 0.01]), 0.04, counts=True)) >= 0.01


def _part(rank: int, size: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    whole = torch.from_numpy(np.random.default_rng(0).exponential(0.1, 100).astype(np.float32))
    mine = whole[[slice(0, 0), slice(0, 63), slice(63, 100)][rank]]
    bound = float(second_moment_bound(mine, 0.04, counts=True))
    assert bound >= 0 and ((whole <= bound).numpy() == (whole.numpy() <= searched(whole.numpy(), 0.04))).all()
    dist.destroy_process_group()


def test_ranks_find_one_bound_together(tmp_path: Path) -> None:
    spawn(_part, (3, str(tmp_path)), 3)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"second_moment": 0}, "greater than 0"),
        ({"type": "nll", "second_moment": 0.04}, "leave second_moment out"),
        ({"type": "m2po"}, "it is ppo_clip with trainer.loss.second_moment"),
    ],
)
def test_wrong_settings_are_refused(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LossConfig.model_validate(tree)
