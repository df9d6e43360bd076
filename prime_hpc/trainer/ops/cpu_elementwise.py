"""Normalisation, rotary embeddings and gated activations of float32 blocks on a CPU, in fewer passes over memory.

A Hugging Face block writes them as chains of small operators, each of which reads and writes the whole activation; in
the backward pass each gets one more. On a CPU, where passes cost as much as the arithmetic of a matrix product, that
was a fifth of a small model's step. Here each is one operator with a backward pass of its own: RMSNorm (Zhang and
Sennrich 2019, arXiv 1910.07467) and SwiGLU (Shazeer 2020, arXiv 2002.05202) with the same result, rotary embedding (Su
et al. 2021, arXiv 2104.09864) within a rounding. A layer is replaced if it computes what these do, seen by trying it,
and left as it is otherwise.
"""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import activations

_ROTARY = "apply_rotary_pos_emb"
_EPS_NAMES = ("variance_epsilon", "eps")
_TRIAL_ROWS = 5


class _RMSNorm(torch.autograd.Function):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        factor = torch.linalg.vecdot(rows, rows).div_(rows.shape[1]).add_(eps).rsqrt_()
        ctx.save_for_backward(rows, weight, factor)
        return torch.mul(rows, factor[:, None]).mul_(weight).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        rows, weight, factor = ctx.saved_tensors
        flat = grad.reshape(rows.shape)
        product = flat * rows
        grad_weight = torch.mv(product.T, factor) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        share = torch.mv(product, weight).mul_(factor**3).div_(-rows.shape[1])
        grad_x = torch.mul(flat, weight).mul_(factor[:, None]).addcmul_(rows, share[:, None])
        return grad_x.view(grad.shape), grad_weight, None


class _Rotate(torch.autograd.Function):
    """`x * cos + rotate_half(x) * sin` over the last dimension: its halves are the pairs that turn together."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        half = grad.shape[-1] // 2
        out = grad * cos
        out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return out, None, None


class _GatedSilu(torch.autograd.Function):
    """`silu(gate) * up`."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        act = torch.nn.functional.silu(gate)
        ctx.save_for_backward(gate, up, act)
        return act * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up, act = ctx.saved_tensors
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, grad * act


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of float32 `[..., D]` with a weight of `[D]`."""
    return _RMSNorm.apply(x, weight, eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of float32 `[..., D]`; `cos` and `sin` broadcast to it, and no gradient goes into them."""
    return _Rotate.apply(x, cos, sin)


def gated_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's product of two float32 projections of one shape."""
    return _GatedSilu.apply(gate, up)


def use_elementwise(model: nn.Module) -> tuple[int, int, int]:
    """Let a model's layers compute with `rms_norm`, `rotate` and `gated_silu` where they do the same; returns how many
    norms, attentions and feed-forward layers do. Parameters may be without memory."""
    norms = attentions = gated = 0
    for module in model.modules():
        if "forward" in vars(module):  # somebody else's already
            continue
        if "RMSNorm" in type(module).__name__ and (eps := _eps_of(module)) is not None:
            module.forward = functools.partial(_norm_forward, module, eps)
            norms += 1
        elif (function := _rotary_of(module)) is not None:
            module.forward = _with_global(module, _ROTARY, _faster(function))
            attentions += 1
        elif _is_gated(module):
            module.forward = functools.partial(_gated_forward, module)
            gated += 1
    return norms, attentions, gated


def _serves(*tensors: torch.Tensor) -> bool:
    """Return whether the operators here take these tensors."""
    if torch.compiler.is_compiling():
        return False
    return all(t.dtype == torch.float32 and t.device.type == "cpu" and not isinstance(t, DTensor) for t in tensors)


def _norm_forward(module: Any, eps: float, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if args or kwargs or not _serves(x, module.weight):
        return type(module).forward(module, x, *args, **kwargs)
    return rms_norm(x, module.weight, eps)


def _gated_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    if not _serves(x):
        return type(module).forward(module, x)
    gate, up = module.gate_proj(x), module.up_proj(x)
    return module.down_proj(gated_silu(gate, up) if _serves(gate, up) else module.act_fn(gate) * up)


def _is_gated(module: Any) -> bool:
    """Return whether a layer computes `down_proj(silu(gate_proj(x)) * up_proj(x))`, and nothing else."""
    names = [name for name, _ in module.named_children()]
    if sorted(names) != ["act_fn", "down_proj", "gate_proj", "up_proj"]:
        return False
    if list(module.named_parameters(recurse=False)) or type(module.act_fn) not in (nn.SiLU, activations.SiLUActivation):
        return False
    if any(type(layer) is not nn.Linear for layer in (module.gate_proj, module.up_proj, module.down_proj)):
        return False
    stand_in = copy.copy(module)
    stand_in._modules = {"act_fn": module.act_fn}
    made = torch.Generator().manual_seed(0)
    for name, (inputs, outputs) in {"gate_proj": (8, 12), "up_proj": (8, 12), "down_proj": (12, 8)}.items():
        layer = stand_in._modules[name] = nn.Linear(inputs, outputs, bias=False, device="meta")
        layer.weight = nn.Parameter(torch.randn(outputs, inputs, generator=made))
    x = torch.randn(_TRIAL_ROWS, 8, generator=made)
    with torch.no_grad():
        try:
            found = stand_in(x)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        return _is_close(found, stand_in.down_proj(gated_silu(stand_in.gate_proj(x), stand_in.up_proj(x))))


def _eps_of(module: nn.Module) -> float | None:
    """Return the constant of a layer that computes `rms_norm`; None: it computes something else."""
    weights = dict(module.named_parameters())
    eps = next((value for name in _EPS_NAMES if isinstance(value := getattr(module, name, None), float)), None)
    if eps is None or list(weights) != ["weight"] or weights["weight"].ndim != 1 or list(module.buffers()):
        return None
    made = torch.Generator().manual_seed(0)
    width = weights["weight"].shape[0]
    x, weight = torch.randn(_TRIAL_ROWS, width, generator=made), torch.rand(width, generator=made) + 0.5
    x *= 3 * eps**0.5  # so small that the constant counts
    try:
        with torch.no_grad():
            found = torch.func.functional_call(module, {"weight": weight}, (x,))
            same = _is_close(found, rms_norm(x, weight, eps))
    except (TypeError, ValueError, RuntimeError, AttributeError):  # another signature
        return None
    return eps if same else None


@functools.cache
def _is_rotary(function: Callable[..., Any]) -> bool:
    """Return whether a function turns queries and keys as `rotate` does."""
    made = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, _TRIAL_ROWS, 8, generator=made) for heads in (4, 2))
    cos, sin = (torch.randn(1, _TRIAL_ROWS, 8, generator=made) for _ in range(2))
    try:
        with torch.no_grad():
            found = function(q, k, cos, sin)
            wanted = [rotate(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k)]
            return len(found) == 2 and all(_is_close(a, b) for a, b in zip(found, wanted, strict=True))
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False


def _is_close(found: Any, wanted: torch.Tensor) -> bool:
    if not isinstance(found, torch.Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    return torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


@functools.cache
def _faster(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the same arguments and result, through `rotate` where that serves."""

    @functools.wraps(function)
    def apply(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = cos.shape[-1] == q.shape[-1] == k.shape[-1] and not (cos.requires_grad or sin.requires_grad)
        if kwargs or not whole or not _serves(q, k, cos, sin):
            return function(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim, **kwargs)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return apply


def _rotary_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function by which a layer's own forward pass turns queries and keys, if it does as `rotate` does."""
    own: Any = type(module).forward
    if not isinstance(own, types.FunctionType) or _ROTARY not in own.__code__.co_names:
        return None
    function = own.__globals__.get(_ROTARY)
    return function if callable(function) and _is_rotary(function) else None


def _with_global(module: nn.Module, name: str, value: Any) -> Callable[..., Any]:
    """Return a module's forward method in which a global name stands for something else, there alone."""
    own: Any = type(module).forward
    names = {**own.__globals__, name: value}
    changed = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    changed.__kwdefaults__ = own.__kwdefaults__
    return types.MethodType(functools.update_wrapper(changed, own), module)
