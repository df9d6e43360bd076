"""A version's tensors in pinned host memory before the engines pause, so that inside the pause the GPU fetches them.

What lies in mapped files is pageable: each copy onto the GPU first goes through the driver's own small buffer, on the
engine's thread, at a few GB/s. Here a thread copies the tensors, in the order in which they will be loaded, into one
pinned buffer while requests go on; inside the pause they are copied from there without waiting for each. The buffer is
bounded and kept from version to version; tensors that do not fit are loaded from their files, as all are on a CPU.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch.utils._python_dispatch import TorchDispatchMode

MAX_BYTES = 8 << 30
"""For one worker."""
SHARE_OF_MEMORY = 4
"""All workers of a node together take at most such a part of what is available."""
_ALIGNMENT = 512
Allocate = Callable[[int], torch.Tensor]


def pinned_memory(size: int) -> torch.Tensor:
    """Return pinned bytes; rounded to no power of two, as torch's own allocator would."""
    return torch.empty(size, dtype=torch.uint8).pin_memory()


def most_bytes(num_workers: int) -> int:
    """Return how much one of a node's workers may pin now."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    available = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), 0)
    return min(MAX_BYTES, available // (SHARE_OF_MEMORY * num_workers))


class PinnedStage:
    """Of one worker. `begin`, `wait` and the copies come one after another."""

    def __init__(self, limit: int, allocate: Allocate = pinned_memory) -> None:
        """Args:
        limit: bytes.
        allocate: makes the buffer.
        """
        self._limit, self._allocate = limit, allocate
        self._buffer: torch.Tensor | None = None
        self._found: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None

    def begin(self, handles: Sequence[Any]) -> None:
        """Copy what fits, in a thread.

        Args:
            handles: open safetensors files, in the order in which they will be loaded.
        """
        self.wait()
        self._found = {}
        self._thread = threading.Thread(target=self._fill, args=(list(handles),), name="pin-weights", daemon=True)
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

    def _fill(self, handles: Sequence[Any]) -> None:
        found: dict[str, torch.Tensor] = {}
        try:
            begin = 0
            for name, tensor in _tensors(handles):
                if self._buffer is None:
                    total = sum(part.nbytes + _ALIGNMENT for _, part in _tensors(handles))
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


def _tensors(handles: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for handle in handles:
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            yield name, handle.get_tensor(name)


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
