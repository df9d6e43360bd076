"""Optimizer state in host memory: on the device only while its part of the update runs.

`keep_in_host_memory(optimizer)` makes `optimizer.step` go through the parameters bucket by bucket: state to the device,
update, state back. What a rank holds on the device is then parameters, gradients and two buckets' state, instead of
Adam's 8 bytes a parameter more. While one bucket is updated the next one comes and the one before leaves:

    to the device  | [2]       [3]       [4] ...
    update         |     [1]       [2]       ...
    to the host    |         [1]       [2]   ...

so that a step takes about as long as the state needs one way over the bus, not both.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from prime_hpc.trainer.ops.host_copies import Copy, HostCopies, at_home, host_copies

BUCKET_BYTES = 128 << 20
"""State that is on the device at a time, twice; a single larger parameter is a bucket of its own."""

_Place = tuple[int, str]
"""Index of a parameter in its bucket, name of its state."""


def keep_in_host_memory(
    optimizer: torch.optim.Optimizer, *, bucket_bytes: int = BUCKET_BYTES, copies: HostCopies | None = None
) -> None:
    """Change `optimizer.step` as said above; the update's numbers stay the same.

    Args:
        optimizer: updates each parameter on its own, given its gradient and its state.
        copies: how a tensor moves; default: as its device does.
    """
    step = optimizer.step

    def step_by_buckets(closure: Any = None) -> None:
        assert closure is None, "the trainer's optimizers take no closure"
        groups = optimizer.param_groups
        everything = [group["params"] for group in groups]
        buckets = [(i, bucket) for i, all_ in enumerate(everything) for bucket in _buckets(all_, bucket_bytes)]
        visits = [_Visit(optimizer, bucket, copies) for _, bucket in buckets]
        try:
            for at, (index, bucket) in enumerate(buckets):
                visits[at].come()
                if at:
                    visits[at - 1].wait()  # or the host would run ahead and have all of the state there at once
                if at + 1 < len(visits):
                    visits[at + 1].begin()
                for i, group in enumerate(groups):
                    group["params"] = bucket if i == index else []
                step()
                visits[at].leave()
            if visits:
                visits[-1].wait()  # who reads the state from now on reads host memory
        finally:
            for group, parameters in zip(groups, everything, strict=True):
                group["params"] = parameters

    optimizer.step = step_by_buckets  # type: ignore[method-assign,assignment]


def _buckets(parameters: list[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Consecutive parameters whose two moments in float32 stay within about `limit` bytes a rank together.

    The same on every rank, also where shards are uneven: an optimizer may communicate while it updates.
    """
    bucket: list[torch.Tensor] = []
    size = 0
    for parameter in parameters:
        ranks = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
        need = 8 * -(-parameter.numel() // ranks)
        if bucket and size + need > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += need
    if bucket:
        yield bucket


class _Visit:
    """One bucket's state on the device: `begin`, `come`, the update, `leave`, `wait`."""

    def __init__(self, optimizer: torch.optim.Optimizer, bucket: list[torch.Tensor], copies: HostCopies | None) -> None:
        self._optimizer, self._bucket = optimizer, bucket
        self._copies = copies or host_copies(bucket[0].device)
        self._homes: dict[_Place, torch.Tensor] = {}
        self._coming: dict[_Place, Copy] | None = None
        self._leaving: list[Copy] = []

    def begin(self) -> None:
        """Have the state copied to the device; what is computed goes on."""
        self._homes = dict(self._state())
        self._coming = {place: self._copies.to_device(at_home(home)) for place, home in self._homes.items()}

    def come(self) -> None:
        """Put it in its place; what is computed from now on waits for it."""
        if self._coming is None:
            self.begin()
        for place, copy in (self._coming or {}).items():
            self._put(place, copy.for_device())

    def leave(self) -> None:
        """Have what the update made copied back into the memory that it came from, and put that in its place."""
        for place, tensor in list(self._state()):
            room = self._copies.room(tensor, self._homes.get(place))
            self._leaving.append(self._copies.to_host(tensor, room))
            self._put(place, room)
        self._coming = None

    def wait(self) -> None:
        """Wait until all of it is there: only then is the device's memory free."""
        for copy in self._leaving:
            copy.on_host()

    def _state(self) -> Iterator[tuple[_Place, torch.Tensor]]:
        """Yield the state tensors of these parameters (scalars such as the step count stay where they are)."""
        for index, parameter in enumerate(self._bucket):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, DTensor):
                    yield (index, key), value._local_tensor
                elif isinstance(value, torch.Tensor) and value.dim():
                    yield (index, key), value

    def _put(self, place: _Place, tensor: torch.Tensor) -> None:
        index, key = place
        state = self._optimizer.state[self._bucket[index]]
        if isinstance(state[key], DTensor):
            state[key]._local_tensor = tensor  # as FSDP2's own CPU offload does
        else:
            state[key] = tensor
