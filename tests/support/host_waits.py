"""Where Python reads a tensor's values: on a GPU each such place waits until all work launched before it is done."""

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALWAYS = {
    "_local_scalar_dense",
    "nonzero",
    "bincount",
    "masked_select",
    "_unique2",
    "unique_dim",
    "equal",
    "histogram",
}
"""Operators whose result is on the host, or whose result's shape depends on values."""
_METHODS = ("tolist", "cpu", "numpy")


class HostWaits(TorchDispatchMode):
    """Notes each operator that would wait, with the line of this project that called it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def note(self, what: str) -> None:
        """One place."""
        frames = [f for f in traceback.extract_stack() if "/prime_hpc/" in f.filename or "/transformers/" in f.filename]
        self.found.append(f"{what} at {frames[-1].filename}:{frames[-1].lineno}" if frames else what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _ALWAYS or _waits(name, func, args, kwargs or {}):
            self.note(name)
        return func(*args, **(kwargs or {}))


def _waits(name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return name == "repeat_interleave" and kwargs.get("output_size") is None


@contextmanager
def host_waits() -> Iterator[HostWaits]:
    """Count in this thread (operators, backward passes on CPU included) and in all (methods, `torch.tensor`)."""
    with ExitStack() as stack:
        waits = HostWaits()
        originals = {name: getattr(torch.Tensor, name) for name in _METHODS}
        for name, original in originals.items():

            def noted(self: Any, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
                waits.note(_name)
                return _original(self, *args, **kwargs)

            stack.enter_context(mock.patch.object(torch.Tensor, name, noted))
        make = torch.tensor

        def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
            waits.note("torch.tensor")  # a blocking copy, where its device is a GPU
            return make(*args, **kwargs)

        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        stack.enter_context(waits)
        yield waits
