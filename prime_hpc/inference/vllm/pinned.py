"""A version's tensors in pinned host memory before the engines pause, so that inside the pause the GPU fetches them.

What lies in mapped files is pageable: each copy onto the GPU first goes through the driver's own small buffer, on the
engine's thread, at a few GB/s. Here a thread copies the tensors, in the order in which they will be loaded, into one
pinned buffer while requests go on; inside the pause they are copied from there without waiting for each. The buffer is
bounded and kept from version to version; tensors that do not fit are loaded from their files, as all are on a CPU.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from loguru import logger
from torch.utils._python_dispatch import TorchDispatchMode

from prime_hpc.inference.tensor_file import TensorFile
from prime_hpc.inference.vllm.args import NUM_WORKERS
from prime_hpc.runtime.gpus import num_device_files
from prime_hpc.runtime.host_memory import available_bytes
from prime_hpc.runtime.page_locked import page_locked

MAX_BYTES = 8 << 30
"""For one worker."""
SHARE_OF_MEMORY = 4
"""All workers of a node together take at most such a part of what is available."""
_ALIGNMENT = 512
Allocate = Callable[[int], torch.Tensor]


def pinned_memory(device: torch.device) -> Allocate:
    """Return what makes pinned bytes for a device, in whatever thread: so many, not the next power of two.

    Raises (what is returned):
        MemoryError: they cannot be pinned.
    """

    def allocate(size: int) -> torch.Tensor:
        memory = page_locked(torch.empty(size, dtype=torch.uint8, device="meta"), device)
        if size and not memory.is_pinned():
            raise MemoryError(f"{size / 2**20:.0f} MiB cannot be pinned")
        return memory

    return allocate


def workers_of_node(num_own: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return how many workers of all servers this node may have.

    Args:
        num_own: of this server.
        environ: says how many all servers have, wherever they are (`args.build_env`); no node has more than GPUs.
    """
    return max(num_own, min(int(environ.get(NUM_WORKERS, "1")), num_device_files()))


def most_bytes(num_workers: int) -> int:
    """Return how much one of a node's workers may pin now."""
    return min(MAX_BYTES, available_bytes() // (SHARE_OF_MEMORY * num_workers))


class PinnedStage:
    """Of one worker. `begin`, `wait` and the copies come one after another."""

    def __init__(self, limit: int, allocate: Allocate) -> None:
        """`limit`: bytes."""
        self._limit, self._allocate = limit, allocate
        self._buffer: torch.Tensor | None = None
        self._found: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None

    def begin(self, files: Sequence[TensorFile]) -> None:
        """Copy what fits, in a thread. `files`: of a version, in the order in which they will be loaded."""
        self.wait()
        self._found = {}
        self._thread = threading.Thread(target=self._fill, args=(list(files),), name="pin-weights", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True if nothing is being copied."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when nothing is being copied."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return a tensor that is here."""
        return self._found.get(name)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor, or the one that it is a part of, is here."""
        buffer = self._buffer
        return buffer is not None and tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()

    def _fill(self, files: Sequence[TensorFile]) -> None:
        found: dict[str, torch.Tensor] = {}
        try:
            begin = 0
            for name, tensor in _tensors(files):
                if self._buffer is None:
                    total = sum(part.nbytes + _ALIGNMENT for _, part in _tensors(files))
                    self._buffer = self._allocate(min(total, self._limit))
                end = begin + tensor.nbytes
                if end > len(self._buffer):
                    break
                room = self._buffer[begin:end].view(tensor.dtype).view(tensor.shape)
                room.copy_(tensor)
                found[name] = room
                begin = end + -end % _ALIGNMENT
        except Exception as error:  # noqa: BLE001 - what is not here is loaded from its file, which says what is wrong
            logger.warning(f"not all of the version comes into pinned memory: {type(error).__name__}: {error}")
        self._found = found


def _tensors(files: Sequence[TensorFile]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        for name in file.names:
            yield name, file.get_tensor(name)


class CopyWithoutWaiting(TorchDispatchMode):
    """Makes the copies of what a stage holds return at once. The device must have done them before the stage begins
    anew."""

    def __init__(self, stage: PinnedStage) -> None:
        super().__init__()
        self._stage = stage
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy as asked, but do not wait."""
        is_copy = func is torch.ops.aten.copy_.default
        if is_copy and isinstance(args[1], torch.Tensor) and self._stage.holds(args[1]):
            self.num_copies += 1
            return func(args[0], args[1], True)
        return func(*args, **(kwargs or {}))
