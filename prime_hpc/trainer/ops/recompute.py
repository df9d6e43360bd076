"""Activation checkpointing of a transformer block: what its backward pass needs is computed again, not kept.

- `full`: only the block's input is kept.
- `selective`: the results of matrix products and attention are kept as well; norms, rotations, activations and other
  element-wise work, cheap to compute and as large to keep, are done again.
- `offload`: the block's input waits in host memory between the two passes.

Nothing random runs in a block (no pass has dropout), so the state of the random number generators is not kept for it.
Around a compiled block (`model.compile`) its graphs are computed again whole: `selective` then keeps what is between
them, attention's results above all.

Applied to a block's `forward`, without a wrapper module, so that parameter names stay those of the checkpoint; inside
FSDP's hooks, so that the recomputation sees gathered parameters. Source of the technique: Chen et al. 2016, "Training
Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from prime_hpc.config.sections.common import ActivationCheckpointConfig

_KEPT = (
    ("aten", ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")),
    ("mkldnn", ("_linear_pointwise",)),
    (
        "aten",
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        ),
    ),
    ("torch_attn", ("_varlen_attn",)),
    ("flash_attn", ("_flash_attn_varlen_forward",)),
)
"""Operators whose results `selective` keeps: (library, names); those that this installation lacks do not matter."""


@functools.cache
def kept_operators() -> tuple[Any, ...]:
    """Return the overloads of `_KEPT` that exist here, and make their results themselves: what one writes into a given
    buffer, as compiled graphs do, would be overwritten when the graph uses the buffer again."""
    found: list[Any] = []
    for library, names in _KEPT:
        for name in names:
            packet = getattr(getattr(torch.ops, library), name, None)
            if packet is not None:
                overloads = [getattr(packet, overload) for overload in packet.overloads()]
                found += [overload for overload in overloads if not overload._schema.is_mutable]
    return tuple(found)


class HostCopy:
    """A tensor in host memory (pinned, copied beside the device's other work)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device, self._requires_grad = tensor.device, tensor.requires_grad
        source = tensor.detach()
        if tensor.device.type != "cuda":
            self._host, self._stream = source.cpu(), None
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream = _copy_stream(tensor.device)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            self._host.copy_(source, non_blocking=True)
        source.record_stream(self._stream)  # its memory is not used again before the copy is done

    def restore(self) -> torch.Tensor:
        """Put the tensor on its device again, a leaf that requires a gradient where the original did."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._host.to(self._device, non_blocking=True).requires_grad_(self._requires_grad)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def recompute(block: nn.Module, config: ActivationCheckpointConfig) -> None:
    """Make `block` keep less between its forward and backward pass; its results stay the same.

    Args:
        block: called with its hidden states first, positionally.
        config: what to keep, and where.
    """
    run = functools.partial(
        checkpoint,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=_keep_products if config.mode == "selective" else noop_context_fn,
    )
    original = block.forward
    block.forward = functools.partial(_offloaded, original, run) if config.offload else functools.partial(run, original)


def _keep_products() -> Any:
    return create_selective_checkpoint_contexts(list(kept_operators()))


def _offloaded(
    original: Callable[..., Any], run: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kw: Any
) -> Any:
    """Run the checkpointed block on `hidden`, which nobody holds on the device after the forward pass."""
    copy = HostCopy(hidden)
    first = [hidden]

    def block(*args: Any, **kw: Any) -> Any:
        # The first run's graph leads to `hidden`; the second one gives only what the backward pass saved.
        return original(first.pop() if first else copy.restore(), *args, **kw)

    del hidden
    return run(block, *args, **kw)
