"""float32 matrix products on CPUs whose vector units MKL does not use.

torch multiplies float32 matrices with MKL, which keeps to AVX2 on other makers' processors: on an AMD EPYC with AVX-512
oneDNN, which torch brings as well, takes less than half the time. Same precision (IEEE float32), another order of
summation. Everywhere else, and for every other dtype, `linear` and `product` are torch's own.
"""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_CPUINFO = Path("/proc/cpuinfo")
_BLOCK_ROWS = 256
"""Fewer rows at a time are not worth rearranging the other operand for."""


@functools.cache
def onednn_is_faster() -> bool:
    """Return whether this machine's float32 products are faster through oneDNN: AVX-512, and not Intel's."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return False
    try:
        text = _CPUINFO.read_text()
    except OSError:
        return False
    return "GenuineIntel" not in text and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _takes(*tensors: torch.Tensor) -> bool:
    if torch.compiler.is_compiling() or not onednn_is_faster():
        return False
    return all(t.dtype == torch.float32 and t.device.type == "cpu" and t.ndim >= 2 and t.numel() for t in tensors)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute `a @ b` of two matrices, whatever their strides; not differentiable where oneDNN takes it.

    Of the result's strides nothing is promised.
    """
    if not _takes(a, b):
        return a @ b
    if a.shape[0] > b.shape[1] and a.shape[1] > a.shape[0]:
        # A weight's gradient: a long sum. oneDNN rearranges its second operand, so that is to be the larger one.
        return _onednn(b.T, a).T
    return _onednn(a, b.T)


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`out[:] = a @ b`, with no more than an eighth of `out` in memory besides it (oneDNN writes into its own)."""
    if not _takes(a, b):
        torch.mm(a, b, out=out)
        return
    rows = max(_BLOCK_ROWS, -(-a.shape[0] // 8))
    for first in range(0, a.shape[0], rows):
        out[first : first + rows].copy_(product(a[first : first + rows], b))


def _onednn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")


class _Linear(torch.autograd.Function):
    """`x @ weight.T`, `[rows, in] -> [rows, out]`.

    The result is contiguous, and no view of anything: models look at it as heads or as complex numbers, and add to it
    in place.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = _onednn(grad, weight.T) if ctx.needs_input_grad[0] else None
        grad_weight = product(grad.T, x).contiguous() if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`."""
    if not _takes(x, weight):
        return F.linear(x, weight, bias)
    out = _Linear.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def use_products(block: nn.Module) -> int:
    """Make a transformer block's plain linear layers multiply with `linear`, where that is faster; returns how many."""
    if not onednn_is_faster():
        return 0
    layers = [m for m in block.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    for layer in layers:
        layer.forward = functools.partial(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def _forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, layer.weight, layer.bias)
