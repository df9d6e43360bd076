"""Between host memory and the device: micro-batches there in one copy that nobody waits for, a few integers back."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_ALIGNMENT = 64
"""Bytes: where a tensor begins in the common buffer."""

T = TypeVar("T")


def map_tensors(value: T, change: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Return a dataclass with `change` applied to its tensors, also to those of dataclasses in its fields."""
    if isinstance(value, torch.Tensor):
        return change(value)  # type: ignore[return-value]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    changed = {name: map_tensors(old, change) for name, old in fields.items()}
    return dataclasses.replace(value, **{name: new for name, new in changed.items() if new is not fields[name]})


def pack(tensors: list[torch.Tensor], *, pin: bool) -> tuple[torch.Tensor, list[int]]:
    """uint8 `[bytes]` with all tensors one behind the other (pinned with `pin`), and where each begins."""
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
    for start, tensor in zip(starts, tensors, strict=True):
        buffer[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
    return buffer, starts


def unpack(buffer: torch.Tensor, starts: list[int], like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the buffer, with the shapes and dtypes of `like`."""
    parts = (buffer[start : start + t.nbytes] for start, t in zip(starts, like, strict=True))
    return [part.view(t.dtype).view(t.shape) for part, t in zip(parts, like, strict=True)]


def to_device(value: T, device: torch.device, stream: Any = None) -> T:
    """Return a dataclass with its host tensors on `device`: one pinned buffer, one asynchronous copy.

    Args:
        device: where they go; on a CPU nothing is copied.
        stream: the CUDA stream of the copy; None: the current one.
    """
    if device.type == "cpu":
        return value
    host: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        host.append(tensor)
        return tensor

    map_tensors(value, collect)
    buffer, starts = pack(host, pin=device.type == "cuda")
    with torch.cuda.stream(stream):  # nothing for None
        # The pinned buffer goes back to torch's host allocator, which keeps it until this copy is done.
        there = iter(unpack(buffer.to(device, non_blocking=True), starts, host))
    return map_tensors(value, lambda _: next(there))


class HostRead:
    """A small int64 matrix on its way to the host; the device goes on with what is launched before `rows`."""

    def __init__(self, matrix: torch.Tensor) -> None:
        self._event = None
        if matrix.device.type != "cuda":
            self._host = matrix
            return
        self._host = torch.empty(matrix.shape, dtype=matrix.dtype, pin_memory=True)
        self._host.copy_(matrix, non_blocking=True)
        self._event = torch.cuda.current_stream(matrix.device).record_event()

    def rows(self) -> list[list[int]]:
        """Return the matrix's rows; waits for its copy, and for nothing that was launched after it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
