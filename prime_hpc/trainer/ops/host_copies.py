"""Copies between a device and host memory beside what the device computes, each way on a stream of its own.

    copies = host_copies(device)
    leaving = copies.to_host(tensor)          # queued behind what computes `tensor`; the host goes on
    coming = copies.to_device(leaving)        # queued behind `leaving`; the computation goes on
    coming.for_device()                       # what is queued from now on waits for it

On a CPU nothing is copied. Host memory is page-locked. What is kept for long has exactly the tensor's size (`room`,
see `runtime.page_locked`).
"""

import functools
from typing import Protocol

import torch

from prime_hpc.runtime.page_locked import page_locked


class Copy(Protocol):
    """One copy, under way or done."""

    def for_device(self) -> torch.Tensor:
        """Return the copy; what is queued on the current stream from now on waits for it, the host does not."""

    def on_host(self) -> torch.Tensor:
        """Return the copy when it is there: the host waits."""


class HostCopies(Protocol):
    """How tensors of one device leave it and come back."""

    def room(self, like: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
        """Return host memory for a tensor that goes to and fro for long: `old` where that will do, else new one."""

    def to_host(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> Copy:
        """Begin to copy a tensor of the device, into a `room` or, for once, where torch finds page-locked memory.

        The tensor may be let go of at once; what is queued later must not change it.
        """

    def to_device(self, leaving: Copy) -> Copy:
        """Begin to bring back what `to_host` took away, in new memory of the device."""


class NoCopies:
    """Of a CPU."""

    def room(self, like: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor."""
        return like

    def to_host(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> Copy:
        """Return the tensor."""
        return at_home(tensor)

    def to_device(self, leaving: Copy) -> Copy:
        """Return the tensor."""
        return leaving


class _Queued:
    """On a stream: done when the event has happened; without one it is done."""

    def __init__(self, tensor: torch.Tensor, event: "torch.cuda.Event | None") -> None:
        self.tensor, self.event = tensor, event

    def for_device(self) -> torch.Tensor:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)
        return self.tensor

    def on_host(self) -> torch.Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.tensor


class StreamCopies:
    """Of a GPU: one stream a direction, for each has copy engines and half of the bus of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._was_refused = False
        """True if host memory could not be page-locked: what is pageable then stays so."""

    def room(self, like: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
        """See `HostCopies`. State that was made on the device, or read from a checkpoint, has none yet."""
        is_here = old is not None and old.device.type == "cpu" and (old.shape, old.dtype) == (like.shape, like.dtype)
        if old is not None and (old.is_pinned() or (is_here and self._was_refused)):
            return old
        new = page_locked(like, self._device)
        self._was_refused |= new.numel() > 0 and not new.is_pinned()
        return old if old is not None and is_here and self._was_refused else new

    def to_host(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> Copy:
        """See `HostCopies`."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if into is None else into
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
            event = self._out.record_event()
        tensor.record_stream(self._out)  # its memory is not used again before the copy is done
        return _Queued(host, event)

    def to_device(self, leaving: Copy) -> Copy:
        """See `HostCopies`. The memory is the computation's: the copy waits until what used it before has gone by, and
        must be waited for (`for_device`) before it is let go of."""
        assert isinstance(leaving, _Queued)
        there = torch.empty_like(leaving.tensor, device=self._device)
        self._in.wait_stream(torch.cuda.current_stream(self._device))
        if leaving.event is not None:
            self._in.wait_event(leaving.event)
        with torch.cuda.stream(self._in):
            there.copy_(leaving.tensor, non_blocking=True)
            event = self._in.record_event()
        return _Queued(there, event)


def at_home(tensor: torch.Tensor) -> Copy:
    """Return host memory as a copy that is done, for `to_device`."""
    return _Queued(tensor, None)


@functools.cache
def host_copies(device: torch.device) -> HostCopies:
    """Return how tensors of a device leave it."""
    return StreamCopies(device) if device.type == "cuda" else NoCopies()
