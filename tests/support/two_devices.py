"""Host memory told apart from the device's on a machine where both are the CPU's: what a GPU would refuse to mix.

Tensors that are made without a device, or of numpy arrays, are the host's until they are moved, everything else is the
device's. What is looked at: calls of torch from Python, in backward passes of our own too.
"""

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from prime_hpc.trainer.batching import micro_batches
from prime_hpc.trainer.ops import attention
from prime_hpc.trainer.ops.transfer import map_tensors

_MOVES = {torch.Tensor.to, torch.Tensor.copy_}
_READS = {torch.Tensor.cpu, torch.Tensor.numpy}
_TAKES_HOST_INDICES = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_JOINS = {torch.cat, torch.stack}
"""Of which a GPU takes not even a single number of the host's."""
_REDUCTIONS = ("all_reduce", "reduce_scatter_single", "broadcast")
_COLLECTIVES = (*_REDUCTIONS, "all_gather", "all_gather_single", "all_to_all_single")


class TwoDevices(TorchFunctionMode):
    """Notes what mixes the two, with the line of this project that did."""

    def __init__(self) -> None:
        super().__init__()
        self._host: Any = WeakIdKeyDictionary()
        self.found: list[str] = []

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether it would lie in host memory."""
        return tensor in self._host

    def on_device(self, value: Any) -> Any:
        """Its tensors are the device's from now on."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            self._host.pop(tensor, None)
            return tensor

        return map_tensors(value, moved)

    def note(self, what: str) -> None:
        """One place."""
        frames = [f for f in traceback.extract_stack() if "/prime_hpc/" in f.filename or "/transformers/" in f.filename]
        self.found.append(f"{what} at {frames[-1].filename}:{frames[-1].lineno}" if frames else what)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result = func(*args, **kwargs)
        if func in _READS:
            result = result.view_as(result) if isinstance(result, torch.Tensor) else result
            return self._mark(result, host=True)
        if func in _MOVES:
            return self.on_device(result) if func is torch.Tensor.to else result
        if not given:
            return self._mark(result, host=kwargs.get("device") is None)
        hosts = [self.is_host(tensor) for tensor in given]
        if any(hosts) and not all(hosts) and func not in _TAKES_HOST_INDICES:
            far = [tensor for tensor, host in zip(given, hosts, strict=True) if host]
            if func in _JOINS or any(tensor.dim() for tensor in far):
                self.note(getattr(func, "__name__", str(func)))
        return self._mark(result, host=all(hosts))

    def _mark(self, result: Any, *, host: bool) -> Any:
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and host:
                self._host[tensor] = True
        return result


@contextmanager
def two_devices() -> Iterator[TwoDevices]:
    """Tell the two apart in what is computed, and sent to other ranks, inside."""
    with ExitStack() as stack:
        seen = TwoDevices()
        for module in (micro_batches, attention):
            move = module.to_device
            stack.enter_context(
                mock.patch.object(module, "to_device", lambda *args, _move=move: seen.on_device(_move(*args)))
            )
        make = torch.from_numpy
        stack.enter_context(mock.patch.object(torch, "from_numpy", lambda array: seen._mark(make(array), host=True)))
        for name in _COLLECTIVES:
            original = getattr(dist, name)

            def checked(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
                if any(isinstance(t, torch.Tensor) and seen.is_host(t) for t in tree_leaves((args, kwargs))):
                    seen.note(_name)
                return _original(*args, **kwargs)

            stack.enter_context(mock.patch.object(dist, name, checked))
        stack.enter_context(seen)
        yield seen
