"""Micro-batches on the device before they are needed, so that the device never waits for numpy.

    with MicroBatches(make, batch.num_micro_batches, device) as micros:
        for micro in micros: ...

On a GPU a thread makes micro-batch i + 1 while micro-batch i is computed: packed into one buffer of pinned host memory,
one copy on a stream of its own, for which the computation's stream (and never the host) waits. On a CPU there is
nothing to overlap: they are made when they are asked for.
"""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from prime_hpc.trainer.batching.micro_batches import MicroBatch
from prime_hpc.trainer.ops.transfer import map_tensors


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    """Return the stream of the copies to a device; the same in every step. Torch has 32 in all, which it gives out in
    turn: a new one a step would soon be that of FSDP's collectives, and its allocator keeps memory for each."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class MicroBatches:
    """The micro-batches of one rank's batch, in order, each made ahead of its use."""

    def __init__(
        self, make: Callable[..., MicroBatch], count: int, device: torch.device, *, ahead: bool | None = None
    ) -> None:
        """Args:
        make: `make(i, stream=...)` returns a micro-batch, see `make_micro_batch`.
        ahead: make them in a thread; default: on a GPU.
        """
        self._make_one, self._count, self._device = make, count, device
        self._ahead = device.type == "cuda" if ahead is None else ahead
        self._pool: ThreadPoolExecutor | None = None
        self._stream = _copy_stream(device)

    def __enter__(self) -> "MicroBatches":
        if self._ahead:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="micro-batches")
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[MicroBatch]:
        if self._pool is None:
            for i in range(len(self)):
                yield self._arrived(*self._make(i))
            return
        coming: Future[tuple[MicroBatch, Any]] = self._pool.submit(self._make, 0)
        for i in range(len(self)):
            made = coming.result()
            if i + 1 < len(self):
                coming = self._pool.submit(self._make, i + 1)
            yield self._arrived(*made)

    def _make(self, index: int) -> tuple[MicroBatch, Any]:
        """Return the micro-batch, and the event after its copy to the device."""
        if self._stream is not None:
            torch.cuda.set_device(self._device)  # a new thread's current device is the first one
        micro = self._make_one(index, stream=self._stream)
        return micro, None if self._stream is None else self._stream.record_event()

    def _arrived(self, micro: MicroBatch, event: Any) -> MicroBatch:
        """Let what the caller launches from now on wait for the copy."""
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)

            def used(tensor: torch.Tensor) -> torch.Tensor:
                tensor.record_stream(current)  # its memory came from the copy's stream
                return tensor

            map_tensors(micro, used)
        return micro
