"""Muon and sign descent on sharded parameters over 2 and 4 gloo ranks equal the unsharded update."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from prime_hpc.config.sections.trainer import OptimConfig
from prime_hpc.trainer.optim import build_optimizer
from tests.support.ranks import spawn
from tests.support.sampled import sampled

pytestmark = pytest.mark.slow

SHAPES = [(5, 4), (4, 5), (5, 4), (5, 4), (8, 3), (1, 6), (3, 5, 4), (7,)]
"""Rows that ranks do not divide, more and fewer matrices of a shape than ranks, a stack of experts, a vector."""
STEPS = 3


class Bag(torch.nn.Module):
    """Parameters of `SHAPES`, plain or sharded."""

    def __init__(self, place: object = None) -> None:
        super().__init__()
        for i, shape in enumerate(SHAPES):
            tensor = torch.randn(shape, generator=torch.Generator().manual_seed(i))
            self.register_parameter(f"p{i}", torch.nn.Parameter(place(tensor) if callable(place) else tensor))


def updated(kind: str, place: object = None) -> list[torch.Tensor]:
    """Parameters after some updates with gradients that depend on nothing but the step."""
    bag = Bag(place)
    optimizer = build_optimizer(bag, OptimConfig(type=kind, lr=0.1, weight_decay=0.1, momentum=0.9))
    for step in range(STEPS):
        for i, parameter in enumerate(bag.parameters()):
            grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1000 * step + i))
            parameter.grad = place(grad) if callable(place) else grad
        optimizer.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in bag.parameters()]


def work(rank: int, world_size: int, store: str, hybrid: bool) -> None:
    """One rank: both optimizers, sharded by rows, against the plain ones."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    shape = (2, world_size // 2) if hybrid else (world_size,)
    mesh = init_device_mesh("cpu", shape)
    placements = [Replicate(), Shard(0)] if hybrid else [Shard(0)]
    for kind in ("muon", "signsgd", "adamw"):
        mine = updated(kind, lambda tensor: distribute_tensor(tensor, mesh, placements))
        for i, (a, b) in enumerate(zip(mine, updated(kind), strict=True)):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=partial("{} {}: {}".format, kind, SHAPES[i]))
    dist.destroy_process_group()


@pytest.mark.parametrize(("world_size", "hybrid"), sampled([(4, True), (4, False), (2, False)], 2))
def test_sharded_updates_equal_plain_ones(tmp_path: Path, world_size: int, hybrid: bool) -> None:
    spawn(work, (world_size, str(tmp_path / "store"), hybrid), world_size)
