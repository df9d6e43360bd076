"""A train step mixes no tensors of host memory with the device's, and sends none of them to other ranks: on a CPU both
would be the same, and nobody would notice."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.proofs.layout_world import LOSSES, Case, World
from tests.support.tiny_families import make_family
from tests.support.two_devices import two_devices

X = torch.arange(4.0)
ONES = np.ones(4, np.float32)
MIXED: dict[str, Callable[[], object]] = {
    "made without a device": lambda: X + torch.zeros(4),
    "of numpy": lambda: X * torch.from_numpy(ONES),
    "read": lambda: X * X.cpu(),
    "of what was made so": lambda: X + torch.arange(4).float(),
    "a number among tensors": lambda: torch.stack([X[0], torch.tensor(1.0)]),
    "a mask": lambda: torch.where(torch.ones(4, dtype=torch.bool), X, X),
    "sent": lambda: dist.all_reduce(torch.ones(3)),
}
TOGETHER: dict[str, Callable[[], object]] = {
    "a number": lambda: X + torch.tensor(1.0),
    "made there": lambda: X + torch.zeros(4, device=X.device),
    "made like it": lambda: X + X.new_ones(4),
    "moved": lambda: X * torch.from_numpy(ONES).to(X.device),
    "sent": lambda: dist.all_reduce(torch.ones(3, device=X.device)),
    "both of the host": lambda: torch.zeros(4) + torch.from_numpy(ONES),
}


@pytest.mark.parametrize(("mixes", "calls"), [(True, MIXED), (False, TOGETHER)])
def test_what_is_mixed_is_seen(mixes: bool, calls: dict[str, Callable[[], object]], group: None) -> None:
    for name, call in calls.items():
        with two_devices() as seen:
            call()
        assert bool(seen.found) == mixes, name


OTHERS = [
    Case("qwen3", {}, lora=True),
    Case("qwen3", {}, optim="muon"),
    Case("qwen3_moe", {}, ac="full", replay=True),
]


@pytest.mark.parametrize("case", [Case("qwen3", {}), *(pytest.param(c, marks=pytest.mark.exhaustive) for c in OTHERS)])
def test_a_train_step_mixes_nothing(case: Case, tmp_path: Path, group: None) -> None:
    make_family(tmp_path / "models" / case.family, case.family)
    world = World(case, tmp_path / "models", tmp_path / "run")
    for step in range(1, 1 + len(LOSSES)):
        with two_devices() as seen:
            world.step(step)
        assert not seen.found
