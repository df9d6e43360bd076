"""Activation checkpointing of a transformer block: what its backward pass needs is computed again, not kept.

- `full`: only the block's input is kept.
- `selective`: the results of matrix products and attention are kept as well; norms, rotations, activations and other
  element-wise work, cheap to compute and as large to keep, are done again.
- `offload`: the block's input waits in host memory between the two passes; it leaves and comes back while other blocks
  are computed.

Nothing random runs in a block (no pass has dropout), so the state of the random number generators is not kept for it.
Around a compiled block (`model.compile`) its graphs are computed again whole: `selective` then keeps what is between
them, attention's results above all.

Applied to a block's `forward`, without a wrapper module, so that parameter names stay those of the checkpoint; inside
FSDP's hooks, so that the recomputation sees gathered parameters. Source of the technique: Chen et al. 2016, "Training
Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from prime_hpc.config.sections.common import ActivationCheckpointConfig
from prime_hpc.trainer.ops.host_copies import Copy, host_copies

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
    """A block's input in host memory between the forward and the backward pass.

    Blocks come back in the opposite order: `restore` of one begins to bring the one before it, whose copy then travels
    while this block is computed again and its gradients are.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._requires_grad = tensor.requires_grad
        self._copies = host_copies(tensor.device)
        self._leaving = self._copies.to_host(tensor.detach())
        self._coming: Copy | None = None
        self._is_back = False
        self._before = _newest.get(tensor.device)
        _newest[tensor.device] = weakref.ref(self)

    def bring(self) -> None:
        """Begin to bring it back, unless that has begun."""
        if self._coming is None and not self._is_back:
            self._coming = self._copies.to_device(self._leaving)

    def restore(self) -> torch.Tensor:
        """Put the tensor on its device again, a leaf that requires a gradient where the original did."""
        self.bring()
        assert self._coming is not None, "a block's input is wanted once"
        tensor = self._coming.for_device().detach()
        self._coming, self._is_back = None, True
        before = None if self._before is None else self._before()
        if before is not None:
            before.bring()
        return tensor.requires_grad_(self._requires_grad)


_newest: dict[torch.device, "weakref.ref[HostCopy]"] = {}
"""The last block that was offloaded; of an earlier micro-batch it is gone, or back."""


def recompute(block: nn.Module, config: ActivationCheckpointConfig) -> None:
    """Make `block` keep less between its forward and backward pass; its results stay the same.
    `block`: called with its hidden states first, positionally."""
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
    if not torch.is_grad_enabled():  # no backward pass will ask for it
        return original(hidden, *args, **kw)
    copy = HostCopy(hidden)
    first = [hidden]

    def block(*args: Any, **kw: Any) -> Any:
        # The first run's graph leads to `hidden`; the second one gives only what the backward pass saved.
        return original(first.pop() if first else copy.restore(), *args, **kw)

    del hidden
    return run(block, *args, **kw)
