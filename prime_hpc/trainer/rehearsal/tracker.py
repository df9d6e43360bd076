"""Device memory by kind, from the tensors that a process makes: real ones, or those of torch's FakeTensorMode.

    tracker = MemoryTracker()
    with tracker, tracker.kind("optimizer"): ...
    tracker.peak.by_kind

Counts storages, as the caching allocator does: what views share counts once, until the last of them has gone. What a
kernel takes for itself is not seen by any tensor: `workspace` adds it while its operator runs.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("weights", "gathered", "gradients", "optimizer", "activations", "head", "other")
"""`gathered`: whole parameters in the compute type, while FSDP has them together. `head`: logits, and matrices of the
output head's shape."""
HOST = "host"
"""Kind of what is not on the device: not counted."""


@dataclass
class Peak:
    """The moment of most memory."""

    total: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    """Bytes."""
    phase: str = ""


class MemoryTracker(TorchDispatchMode):
    """Counts what operators inside its context allocate, until it is freed."""

    def __init__(
        self,
        *,
        vocab_sizes: tuple[int, ...] = (),
        granule: int = 1,
        workspace: Callable[[Any, tuple[Any, ...]], int] | None = None,
    ) -> None:
        """Args:
        vocab_sizes: a matrix with so many rows or columns is the output head's.
        granule: sizes are rounded up to a multiple of this many bytes.
        workspace: bytes that an operator with these arguments takes while it runs.
        """
        super().__init__()
        self.peak = Peak()
        self.phase = ""
        self._totals: Counter[str] = Counter()
        self._known: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._kinds = ["other"]
        self.vocab_sizes, self._granule, self._workspace = vocab_sizes, granule, workspace
        self._resize, self._depth = torch.UntypedStorage.resize_, 0

    def __enter__(self) -> "MemoryTracker":
        # FSDP frees and fills the parameters that it gathers by resizing: no operator does it
        tracker, resize = self, self._resize

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            tracker._resized(storage)
            return result

        if not self._depth:
            torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign,assignment]
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._depth -= 1
        if not self._depth:
            torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    @contextmanager
    def kind(self, name: str) -> Iterator[None]:
        """Count what is allocated inside as of this kind."""
        self._kinds.append(name)
        try:
            yield
        finally:
            self._kinds.pop()

    def is_kind(self, tensor: Any, name: str) -> None:
        """Count the tensor's storage as of this kind from now on."""
        for storage in _storages(tensor):
            known = self._known.get(id(storage))
            if known is not None and known[0]() is storage and known[2] != name:
                self._forget(id(storage))
                self._count(storage, name)

    @property
    def live(self) -> dict[str, int]:
        """Bytes now, by kind."""
        return {kind: self._totals[kind] for kind in KINDS}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled below it; asking torch at every operator takes as long as all the rest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it calls operators on its local tensors: those are counted
        if self._workspace is not None and (extra := self._workspace(func, args)):
            self._reach(extra)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not _has_no_memory(tensor):
                for storage in _storages(tensor):
                    if id(storage) not in self._known or self._known[id(storage)][0]() is not storage:
                        self._count(storage, self._kind_of(tensor))
        return out

    def _kind_of(self, tensor: torch.Tensor) -> str:
        kind = self._kinds[-1]
        is_head = tensor.ndim == 2 and (tensor.shape[0] in self.vocab_sizes or tensor.shape[1] in self.vocab_sizes)
        return "head" if kind == "activations" and is_head else kind

    def _count(self, storage: Any, kind: str) -> None:
        key = id(storage)
        size = -(-storage.nbytes() // self._granule) * self._granule
        reference = weakref.ref(storage, lambda _: self._forget(key, reference))
        self._known[key] = (reference, size, kind)
        self._totals[kind] += size
        self._reach()

    def _forget(self, key: int, reference: Any = None) -> None:
        known = self._known.get(key)
        if known is not None and (reference is None or known[0] is reference):
            del self._known[key]
            self._totals[known[2]] -= known[1]

    def _resized(self, storage: Any) -> None:
        known = self._known.get(id(storage))
        if known is not None and known[0]() is storage:
            self._forget(id(storage))
            self._count(storage, known[2])

    def _reach(self, extra: int = 0) -> None:
        total = sum(size for kind, size in self._totals.items() if kind != HOST) + extra
        if total > self.peak.total:
            self.peak = Peak(total, self.live | {"activations": self._totals["activations"] + extra}, self.phase)


class CompilingMemoryTracker(MemoryTracker):
    """The same around code that torch compiles: the code's operators count, not those of tracing it."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let Dynamo compile beneath it, as beneath FakeTensorMode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if TracingContext.try_get() is not None:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Models are built of tensors on torch's `meta` device, which is not what fake ones say that they are on."""
    return not isinstance(tensor, FakeTensor) and tensor.is_meta


def _storages(tensor: Any) -> list[Any]:
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    try:
        return [tensor.untyped_storage()]
    except (NotImplementedError, RuntimeError):  # sparse, or without any
        return []
