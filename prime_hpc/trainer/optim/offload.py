"""Optimizer state in host memory: on the device only while its part of the update runs.

`keep_in_host_memory(optimizer)` makes `optimizer.step` go through the parameters bucket by bucket: state to the device,
update, state back. What a rank holds on the device is then parameters, gradients and one bucket's state, instead of
Adam's 8 bytes a parameter more.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 256 << 20
"""State that is on the device at a time; a single larger parameter is a bucket of its own."""


def keep_in_host_memory(
    optimizer: torch.optim.Optimizer,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    to_host: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None,
    to_device: Callable[[torch.Tensor, torch.device], torch.Tensor] | None = None,
) -> None:
    """Change `optimizer.step` as said above; the update's numbers stay the same.

    Args:
        optimizer: updates each parameter on its own, given its gradient and its state.
        bucket_bytes: see `BUCKET_BYTES`.
        to_host, to_device: how a tensor moves (tests watch them); to the host into the memory that it came from, or
            None where it was made on the device.
    """
    step = optimizer.step
    # What is on the device, and the host memory that it came from: to pin new memory costs more than the copy.
    homes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    host, device = to_host or _to_host, to_device or _to_device

    def out(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        there = device(tensor, parameter.device)
        homes[id(there)] = (there, tensor)
        return there

    def back(tensor: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        held = homes.get(id(tensor))
        return host(tensor, None if held is None else held[1])

    def step_by_buckets(closure: Any = None) -> None:
        assert closure is None, "the trainer's optimizers take no closure"
        groups = optimizer.param_groups
        everything = [group["params"] for group in groups]
        try:
            for index, parameters in enumerate(everything):
                for bucket in _buckets(parameters, bucket_bytes):
                    for i, group in enumerate(groups):
                        group["params"] = bucket if i == index else []
                    _move(optimizer, bucket, out)
                    step()
                    _move(optimizer, bucket, back)
                    homes.clear()
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


def _move(
    optimizer: torch.optim.Optimizer,
    bucket: list[torch.Tensor],
    move: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Move the state tensors of these parameters (scalars such as the step count stay where they are)."""
    for parameter in bucket:
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, DTensor):
                value._local_tensor = move(value._local_tensor, parameter)  # as FSDP2's own CPU offload does
            elif isinstance(value, torch.Tensor) and value.dim():
                state[key] = move(value, parameter)


def _to_host(tensor: torch.Tensor, home: torch.Tensor | None) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor
    host = home
    if host is None or not host.is_pinned():  # made on the device, or read from a checkpoint
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)  # waits: the next reader is this process's Python, not the stream


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device, non_blocking=True)
