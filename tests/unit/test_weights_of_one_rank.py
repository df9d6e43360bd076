"""A trainer of one rank on a GPU: its process group carries no CPU tensors, and nothing has to be carried."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from prime_hpc.trainer.weights.gathering import Gathering


@pytest.fixture
def group_of_a_gpu() -> Iterator[None]:
    """A group as NCCL makes it: it knows the device `cuda` alone."""
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_a_gpu")
def test_ranks_that_gather_nothing_exchange_nothing() -> None:
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.zeros(1))
    assert list(Gathering([], {"w": torch.zeros(2)}, {"w": [0]}).gather({"w": torch.zeros(2)})) == []
