"""The world of a rehearsal: everything that the train step meets outside of itself, pretended in one process.

    with pretended(tracker, fake, on_gpu=True, folder=folder, sees=False):
        base = load_base(experiment, CPU)
        ...

- the process group is torch's `fake` backend: this is its first rank, the others do not exist;
- weights are never read: sharded parameters get memory that is fake;
- what is compiled is divided into kept and recomputed as torch's compiler does, and no kernel is made of it;
- a value that the host reads from a fake tensor is 1, rows for experts are spread evenly;
- on a GPU that is not there: flash-attention's varlen kernel with the memory that it takes for itself, matrix products
  of its own libraries, host memory that is not the device's. Tensors say that they are the CPU's: without a CUDA build
  torch's autograd has no other device.
"""

import json
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from transformers.integrations import moe

from prime_hpc.config.shapes import shape_config
from prime_hpc.trainer import trainer
from prime_hpc.trainer.lora.slots import Adapters
from prime_hpc.trainer.model import load_policy, reference, score_head
from prime_hpc.trainer.model.conversions import WeightMap
from prime_hpc.trainer.ops import attention, cpu_matmul, fused_head, recompute
from prime_hpc.trainer.ops.host_copies import Copy, at_home
from prime_hpc.trainer.optim import offload
from prime_hpc.trainer.parallel import distribute, expert
from prime_hpc.trainer.rehearsal.images import pretend_images
from prime_hpc.trainer.rehearsal.tracker import HOST, MemoryTracker


def start_fake_process_group(world_size: int) -> None:
    """Join a process group of so many ranks as its first, alone."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)


def find_shape(name: str, folder: Path) -> Path:
    """Return a directory with the model's config.json: its own, the hub's cache, or the published shape written to
    `folder`. Raises ValueError: neither is there."""
    local = Path(name).expanduser()
    if (local / "config.json").is_file():
        return local
    cached = None if local.is_absolute() or name.startswith(".") else _cached_config(name)
    if cached is not None:
        return cached.parent
    config = shape_config(name)
    if config is None:
        raise ValueError(
            f"model.name = {name}: no directory with a config.json, not in the hub's cache, and not among the models "
            "whose shape is known (prime_hpc/config/shapes.py); a directory with nothing but its config.json is enough"
        )
    target = folder / name.replace("/", "--")
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def _cached_config(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no hub name at all
        return None
    return Path(found) if isinstance(found, str) else None


class NotCompiledError(RuntimeError):
    """A block that the compiler does not divide on fake tensors; names it."""


def shortened(error: Exception) -> str:
    """Return an error's class and the beginning of what it says, on one line."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 240, placeholder=" ...")


class _Unread(WeightMap):
    """Of a checkpoint that nobody has: nothing is read."""

    def base_names(self, modules: Iterable[str]) -> dict[str, str]:
        """Return the model's own."""
        return {module: module for module in modules}


def flash_workspace(operator: Any, args: tuple[Any, ...]) -> int:
    """Bytes that flash-attention's backward pass takes for itself.

    The query's gradient in float32 and a row sum for each of its heads, both with room for 128 tokens more a sequence;
    with fewer key-value heads also the keys' and values' gradients for every query head (`mha_varlen_bwd` of
    flash-attention 2).
    """
    if str(operator) != "torch_attn._varlen_attn_backward.default":
        return 0
    query, key, starts = args[1], args[2], args[6]
    tokens, heads, width = query.shape
    padded = tokens + 128 * (starts.shape[0] - 1)
    size = padded * heads * (-(-width // 32) * 32 + 1) * 4
    if key.shape[1] != heads:
        size += 2 * key.shape[0] * heads * width * key.element_size()
    return int(size)


def gloo_workspace(operator: Any, args: tuple[Any, ...]) -> int:
    """Bytes that torch's gloo takes for itself in a collective: all that it gathers once more, and a copy of what it
    adds up before it scatters that (`AsyncAllgatherWork` and `_reduce_scatter_base` of its ProcessGroupGloo)."""
    if str(operator) == "c10d._allgather_base_.default":
        return int(args[0].nbytes)
    return int(args[1].nbytes) if str(operator) == "c10d._reduce_scatter_base_.default" else 0


@contextmanager
def pretended(
    tracker: MemoryTracker, fake: FakeTensorMode, *, on_gpu: bool, folder: Path, sees: bool
) -> Iterator[None]:
    """See above.

    Args:
        tracker: told what is of which kind.
        fake: entered by the caller, too, around the train step.
        on_gpu: pretend a GPU; else this machine's CPU kernels.
        folder: where published shapes are written.
    """
    with ExitStack() as stack:

        def change(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(patch.object(owner, name, value))

        for module in (trainer, reference):
            change(module, "resolve_source", lambda name, *_: find_shape(name, folder))
        change(trainer, "peak_flops", lambda *_: 1.0)
        for name in ("load_reference", "load_critic"):
            change(trainer, name, _real(getattr(trainer, name)))
        change(load_policy, "_stored_weights", lambda _: {})
        change(load_policy, "map_weights", lambda *_: _Unread({}, {}))
        change(load_policy, "_load_shards", _inside(fake, tracker, load_policy._load_shards))
        change(score_head, "begin", lambda *_: None)
        change(score_head, "stated", lambda *_, **__: {})  # there may be no tokenizer
        change(load_policy, "Adapters", _inside(fake, tracker, Adapters))
        change(distribute, "compiled", _partitioned)
        if sees:
            pretend_images(change, tracker, on_gpu=on_gpu)
        change(load_policy, "self_test", lambda *_, **__: None)  # it judges values, and there are none
        # the operator's fake knows bfloat16 alone; what stands in for it makes tensors of the same sizes
        change(moe, "_can_use_grouped_mm", lambda _input, weight, _offsets: weight.dtype == torch.bfloat16)
        _spread_rows(change)
        _read_ones(change)
        _tell_kinds(tracker, change)
        if on_gpu:
            _on_gpu(tracker, change)
        yield


def _partitioned(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Divide a block's graph as torch's compiler does into what it keeps and what it computes again, and run the parts
    without kernels of their own. Of one size: fake tensors have no symbols for others."""
    block = type(getattr(forward, "__self__", None)).__name__  # as yet without FSDP's prefix
    parts = torch.compile(forward, backend="aot_eager_decomp_partition", dynamic=False)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return parts(*args, **kwargs)
        except TorchDynamoException as error:
            message = f"{block} cannot be compiled on tensors without values ({shortened(error)})"
            raise NotCompiledError(message) from error

    return run


def _inside(fake: FakeTensorMode, tracker: MemoryTracker, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that gives parameters their memory."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with fake, tracker, tracker.kind("weights"):
            return function(*args, **kwargs)

    return run


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    """Modules are built of real (meta) tensors, also where the caller is in fake mode."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


def _spread_rows(change: Callable[..., None]) -> None:
    """Every expert gets the same number of rows (those of the first rank what does not divide)."""
    dispatch, rows = expert._dispatch, [0]

    def counted(
        module: Any, ep: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        rows[0] = chosen.numel()
        return dispatch(module, ep, hidden, chosen, weights)

    class HostRead:
        def __init__(self, matrix: torch.Tensor) -> None:
            self._shape = matrix.shape

        def rows(self) -> list[list[int]]:
            num, ranks = self._shape
            return [[rows[0] // ranks + (rows[0] % ranks if rank == 0 else 0) for rank in range(ranks)]] * num

    change(expert, "_dispatch", counted)
    change(expert, "HostRead", HostRead)


def _read_ones(change: Callable[..., None]) -> None:
    """Replace what the host reads from the device by ones: counts and metrics, which change no size."""
    types = {torch.float64: np.float64, torch.float32: np.float32, torch.int64: np.int64, torch.int32: np.int32}

    def numpy(self: FakeTensor, **_: Any) -> Any:
        return np.ones(tuple(self.shape), types.get(self.dtype, np.float32))

    change(FakeTensor, "numpy", numpy)
    change(FakeTensor, "tolist", lambda self: numpy(self).tolist())
    change(FakeTensor, "item", lambda self: numpy(self).item())


def _tell_kinds(tracker: MemoryTracker, change: Callable[..., None]) -> None:
    """Tell what FSDP and the adapters allocate, by what it is for."""

    def of(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with tracker.kind(kind):
                return function(*args, **kwargs)

        return run

    for name in ("unshard", "wait_for_unshard"):
        change(FSDPParamGroup, name, of("gathered", getattr(FSDPParamGroup, name)))
    change(FSDPParamGroup, "post_backward", of("gradients", FSDPParamGroup.post_backward))
    # DTensor works out an operator's result on tensors of the whole shape, which nobody holds
    name = "_propagate_tensor_meta_non_cached"
    change(ShardingPropagator, name, of(HOST, getattr(ShardingPropagator, name)))
    change(Adapters, "_gather", of("gathered", Adapters._gather))
    change(Adapters, "_reduce", of("gradients", Adapters._reduce))
    init = FSDPParam.init_unsharded_param

    def init_unsharded_param(self: FSDPParam) -> None:
        is_new = not hasattr(self, "_unsharded_param")
        init(self)
        if is_new and self._unsharded_param.requires_grad:
            self._unsharded_param.register_post_accumulate_grad_hook(lambda p: tracker.is_kind(p.grad, "gradients"))

    change(FSDPParam, "init_unsharded_param", init_unsharded_param)


def _on_gpu(tracker: MemoryTracker, change: Callable[..., None]) -> None:
    def select_kernel(choice: str, _device: str, dtype: torch.dtype) -> Any:
        half = dtype in (torch.bfloat16, torch.float16)
        return attention.torch_varlen_attention if half and choice != "sdpa" else attention.padded_attention

    change(attention, "select_kernel", select_kernel)
    change(cpu_matmul, "onednn_is_faster", lambda: False)
    change(
        fused_head, "is_served", lambda hidden, weight: hidden.dtype == weight.dtype and hidden.dtype in fused_head.HALF
    )
    change(fused_head, "row_statistics", lambda logits, *_: torch.empty((3, len(logits)), device=logits.device))
    change(fused_head, "make_gradient", lambda *_: None)
    change(distribute, "use_elementwise", lambda _: (0, 0, 0))
    change(load_policy, "check_device", lambda _: None)

    copies = _PretendedCopies(tracker)
    change(recompute, "host_copies", lambda _: copies)
    change(offload, "host_copies", lambda _: copies)


class _PretendedCopies:
    """Copies to host memory that is not counted, and back."""

    def __init__(self, tracker: MemoryTracker) -> None:
        self._tracker = tracker

    def room(self, like: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
        return self.to_host(like).on_host() if old is None else old

    def to_host(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> Copy:
        with self._tracker.kind(HOST):
            return at_home(torch.empty_like(tensor) if into is None else into)

    def to_device(self, leaving: Copy) -> Copy:
        return at_home(torch.empty_like(leaving.on_host()))
