"""Micro-batches on the device before they are needed, so that the device never waits for numpy.

    with MicroBatches(batch, device, parallel, ...) as micros:
        for micro in micros: ...

On a GPU a thread makes micro-batch i + 1 while micro-batch i is computed: packed into one buffer of pinned host memory,
one copy on a stream of its own, for which the computation's stream (and never the host) waits. On a CPU there is
nothing to overlap: they are made when they are asked for.
"""

import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.image_inputs import ImageInputs
from prime_hpc.trainer.batching.micro_batches import MicroBatch, make_micro_batch
from prime_hpc.trainer.ops.transfer import map_tensors
from prime_hpc.trainer.parallel import Parallel


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    """Return the stream of the copies to a device; the same in every step. Torch has 32 in all, which it gives out in
    turn: a new one a step would soon be that of FSDP's collectives, and its allocator keeps memory for each.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class MicroBatches:
    """The micro-batches of one rank's batch, in order, each made ahead of its use."""

    def __init__(
        self,
        batch: RankBatch,
        device: torch.device,
        parallel: Parallel,
        *,
        share_prefixes: bool,
        single_rows: bool = False,
        pads: bool = True,
        image_inputs: ImageInputs | None = None,
        ahead: bool | None = None,
    ) -> None:
        """Args:
        batch: this rank's.
        device: of the micro-batches.
        parallel: the layout.
        share_prefixes, single_rows, pads, image_inputs: see `make_micro_batch`.
        ahead: make them in a thread; default: on a GPU.
        """
        self._batch, self._device, self._parallel = batch, device, parallel
        self._image_inputs = image_inputs
        self._options = {"share_prefixes": share_prefixes, "single_rows": single_rows, "pads": pads}
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
        return self._batch.num_micro_batches

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
        micro = make_micro_batch(
            self._batch,
            index,
            self._device,
            self._parallel,
            stream=self._stream,
            image_inputs=self._image_inputs,
            **self._options,
        )
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
