"""A rank's copy of its state in host memory or on a node-local disk, from which a save is written in the background."""

import contextlib
import math
import mmap
import os
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from prime_hpc.runtime.host_memory import HEADROOM, available_bytes
from prime_hpc.runtime.page_locked import Pages
from prime_hpc.store.errors import NoRoom, StoreError
from prime_hpc.store.io.disk import disk_errors
from prime_hpc.store.io.files import make_dir

_ALIGNMENT = 64


class HostStage:
    """Room for one copy of named tensors."""

    def __init__(
        self,
        parts: Mapping[str, torch.Tensor],
        directory: Path | None,
        ranks_per_node: int,
        wanted_by: str = "ckpt.save_async",
        instead: str = "name a node-local directory with ckpt.staging_dir, or leave save_async out",
    ) -> None:
        """Args:
            parts: tensors of the names, dtypes and shapes to make room for; their values do not matter.
            directory: where the room is a file that nobody else sees; None: host memory.
            ranks_per_node: how many processes of this node take as much.
            wanted_by, instead: the key that asks for it, and what to do where there is no room.
        Raises StoreError: too little memory, or the directory is full or not writable; says what to do."""
        offsets, size = {}, 0
        for name, part in parts.items():
            offsets[name] = size
            size += math.ceil(part.nbytes / _ALIGNMENT) * _ALIGNMENT
        self.size = size
        """Bytes."""
        self._memory = (
            _anonymous(size, ranks_per_node, wanted_by, instead) if directory is None else _file_backed(size, directory)
        )
        self._pinned = False
        self._touched = threading.Event()
        self.tensors = {name: self._tensor(part, offsets[name]) for name, part in parts.items()}
        """The copies, each with a storage of exactly its size: torch.save would write the whole of a larger one."""

    def _tensor(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)

    def touch(self) -> None:
        """Make the memory real: later copies meet no page fault. Seconds for many GiB: a thread may do it."""
        try:
            np.frombuffer(self._memory, np.uint8).fill(0)
            self._pinned = isinstance(self._memory, Pages) and torch.cuda.is_initialized() and self._memory.lock()
        finally:
            self._touched.set()

    @torch.no_grad()
    def copy(self, parts: Mapping[str, torch.Tensor], after: "torch.cuda.Event | None" = None) -> None:
        """Copy the values; returns when they are here. Waits for `touch`, which somebody must have begun.
        `after`: on CUDA, what has to be done before the values are right; compute goes on beside the copy."""
        self._touched.wait()
        devices = {t.device for t in parts.values() if t.device.type == "cuda"}
        if not devices:
            for name, part in parts.items():
                self.tensors[name].copy_(part)
            return
        (device,) = devices
        stream = torch.cuda.Stream(device)
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            for name, part in parts.items():
                self.tensors[name].copy_(part, non_blocking=self._pinned)
        stream.synchronize()

    @torch.no_grad()
    def put(self, name: str, values: torch.Tensor) -> "torch.cuda.Event | None":
        """Queue one copy behind what the device does now: whatever is queued later may change the values.
        Returns on CUDA an event: when it has happened, the copy is here; None: it is here."""
        self._touched.wait()
        self.tensors[name].copy_(values, non_blocking=self._pinned)
        return torch.cuda.current_stream(values.device).record_event() if values.is_cuda else None


def _anonymous(size: int, ranks_per_node: int, wanted_by: str, instead: str) -> Pages:
    available = available_bytes()
    if size * ranks_per_node > available * HEADROOM:
        raise StoreError(
            f"{wanted_by} needs {size * ranks_per_node / 2**30:.1f} GiB of host memory on this node, "
            f"{available / 2**30:.1f} GiB are free: {instead}"
        )
    memory = Pages(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # huge pages: a five-hundredth of the page faults
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _file_backed(size: int, directory: Path) -> mmap.mmap:
    make_dir(directory)
    try:
        # gone even when this process is killed
        with disk_errors(directory), tempfile.TemporaryFile(dir=directory) as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk now, not a SIGBUS later
            else:
                file.truncate(1)
            return mmap.mmap(file.fileno(), max(size, 1), flags=mmap.MAP_SHARED)
    except NoRoom as error:  # this node's disk is too small: no room to wait for, or to make by deleting checkpoints
        raise StoreError(str(error)) from error
