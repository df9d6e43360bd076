"""Messages between the ranks of a data stream, over a group of its own, from the stream's thread.

Beside the training's collectives: a group of its own, so that neither waits for the other.
"""

import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


class Exchange:
    """Collectives of all ranks over gloo; of one rank alone: nothing. Every method is collective."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: longest wait for the slowest rank."""
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.rank, self.world_size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        self._group = None
        if not alone:
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's (small) value, everywhere."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def all_agree(self, yes: bool) -> bool:
        """Return whether every rank says yes."""
        if self._group is None:
            return yes
        flag = torch.tensor([int(yes)])
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group)
        return bool(flag.item())

    def swap(self, outgoing: Sequence[NDArray[np.uint8]], incoming: Sequence[int]) -> list[NDArray[np.uint8]]:
        """Send `outgoing[r]` to each rank r and receive `incoming[r]` bytes from it."""
        if self._group is None:
            return [outgoing[0]]
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        sent = torch.from_numpy(np.concatenate(list(outgoing)))
        dist.all_to_all_single(received, sent, list(incoming), [len(o) for o in outgoing], group=self._group)
        return np.split(received.numpy(), np.cumsum(incoming)[:-1])
