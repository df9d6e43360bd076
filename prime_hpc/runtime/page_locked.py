"""Page-locked host memory of exactly the size that is asked for, for copies from and to GPUs that nobody waits for.

torch's own allocator, which keeps and uses again what it once locked, takes the next power of two: up to twice as much.
Here pages are mapped and then registered with CUDA. Imports torch late: this room is for login nodes too.
"""

import contextlib
import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

if TYPE_CHECKING:
    import torch

_RUNTIME = "libcudart.so"
_said: set[int] = set()
"""Codes of refusals that were warned of: one of many tensors is enough."""


def page_locked(like: "torch.Tensor", device: "torch.device | None" = None) -> "torch.Tensor":
    """Return new host memory of a tensor's shape and dtype, registered with CUDA until it is let go of.

    Where it cannot be registered it is pageable: copies are then slower, and as right.

    Args:
        like: may be on the device `meta`.
        device: a GPU that this process uses anyway; None: the thread's current one (of a new thread the node's first).
    """
    import torch

    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    memory = Pages(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.lock(device)
    return torch.frombuffer(memory, dtype=like.dtype, count=like.numel()).view(like.shape)


class Pages(mmap.mmap):
    """Memory of the host that is registered with CUDA, once it is locked, for as long as anything uses it.

    The registration goes first: to CUDA an address that it knows means the pages that lay there, and what is mapped at
    the same place later would be copied from and to them, in silence.
    """

    _registered: "tuple[Any, int] | None" = None

    def lock(self, device: "torch.device | None" = None) -> bool:
        """Register all of it; False, with a warning, where CUDA refuses. `device`: as of `page_locked`."""
        import torch

        address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        if _register(address, len(self), device):
            self._registered = torch.cuda.cudart(), address
        return self._registered is not None

    def __del__(self) -> None:
        """Before it is unmapped; not when the process ends, for CUDA may have gone before."""
        if self._registered is not None and not sys.is_finalizing():
            cudart, address = self._registered
            cudart.cudaHostUnregister(address)


def _register(address: int, nbytes: int, device: "torch.device | None" = None) -> bool:
    import torch

    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device) if device is not None else contextlib.nullcontext():
        code = int(cudart.cudaHostRegister(address, nbytes, 0))
        if code:
            _clear_error()
    if code:
        say = logger.debug if code in _said else logger.warning
        _said.add(code)
        say(f"{nbytes / 2**20:.0f} MiB of host memory could not be page-locked (CUDA error {code}): copies are slower")
    return not code


def _clear_error() -> None:
    """Take back the error that CUDA keeps for this thread: the next kernel's launch would raise it as its own."""
    import torch

    libraries = _loaded(_RUNTIME)
    for library in libraries:
        library.cudaGetLastError()
    if not libraries:  # linked into another library: a launch of no consequence takes the error
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")


def _loaded(name: str) -> list[Any]:
    """Return the shared libraries of this process whose file's name begins so; none is loaded for that."""
    found = []
    fields = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    for path in sorted({row[5] for row in fields if len(row) == 6 and Path(row[5]).name.startswith(name)}):
        with contextlib.suppress(OSError):  # its file has been replaced
            found.append(ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
    return found
