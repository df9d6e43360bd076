"""Matrix products of the transformer blocks in 8-bit floating point (`model.fp8`).

Forward pass and the gradient to the input run in float8 e4m3 with one scale a row, computed from the row as it is
(Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433, per-tensor there; a row's own scale loses
less to outliers). Both multiply by one float8 weight: the scales of its rows stand along the sum of the second product,
where they go over to the gradient before that is converted. So a weight is converted once for the two, and the gradient
is that of the function that was computed. The gradient to the weight stays in the compute dtype: it sums over tokens
and is what training is most sensitive to. Parameters, their gradients and the optimizer know nothing of it. The output
head and routers stay in the compute dtype: log-probabilities are compared to the engine's.

Runs on GPUs of compute capability 8.9 and above (Ada, Hopper, Blackwell); on CPU it is emulated, for tests.
"""

from typing import Any

import torch
from torch import nn

from prime_hpc.runtime.failures import NodeError

DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(DTYPE).max
_MULTIPLE = 16
"""The kernels take dimensions that are multiples of this."""
MIN_CAPABILITY = (8, 9)


def quantize_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 `[rows, columns]` and float32 scales `[rows, 1]` of a matrix; values are float8 times scale."""
    scale = tensor.abs().amax(dim=1, keepdim=True).float().clamp_min(1e-12) / _LARGEST
    return (tensor.float() / scale).clamp(-_LARGEST, _LARGEST).to(DTYPE), scale


def forward_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `x @ weight.T` in float8: x `[m, k]`, weight `[n, k]`, result `[m, n]` in the dtype of `x`."""
    (left, left_scale), (right, right_scale) = quantize_rows(x), quantize_rows(weight)
    return torch._scaled_mm(
        left, right.t(), scale_a=left_scale, scale_b=right_scale.t(), out_dtype=x.dtype, use_fast_accum=True
    )


def backward_product(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute `grad @ weight` in float8 of the forward product's weight: grad `[m, n]`, weight `[n, k]`, result
    `[m, k]` in the dtype of `grad`."""
    right, right_scale = quantize_rows(weight)
    left, left_scale = quantize_rows(grad.float() * right_scale.t())
    ones = torch.ones((1, right.shape[1]), dtype=torch.float32, device=right.device)
    columns = right.t().contiguous().t()  # the kernel wants its second factor by columns
    return torch._scaled_mm(left, columns, scale_a=left_scale, scale_b=ones, out_dtype=grad.dtype)


class _Linear(torch.autograd.Function):
    """`x @ w.T`, the products as the file's docstring says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        flat = x.reshape(-1, x.shape[-1])
        return forward_product(flat, weight).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = backward_product(flat, weight).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = flat.t() @ x.reshape(-1, x.shape[-1])
        return grad_x, grad_weight


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear` with float8 products.
    `weight`: `[out_features, in_features]`, both multiples of 16."""
    out = _Linear.apply(x, weight)
    return out if bias is None else out + bias


def check_device(device: torch.device) -> None:
    """Refuse a GPU that has no float8 products. Raises ValueError: its compute capability is below 8.9."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise NodeError(f"model.fp8 needs a GPU of compute capability 8.9 or above; {name} has none: leave it out")


def use_fp8(block: nn.Module) -> int:
    """Make the linear layers of a transformer block multiply in float8; returns how many.

    Left as they are: layers whose sizes the kernels do not take, and routers (they decide, and are small).
    """
    torch.compiler.allow_in_graph(_Linear)  # Dynamo takes it whole; the compiler then fuses what it consists of
    count = 0
    for name, module in block.named_modules():
        if type(module) is not nn.Linear or name.rpartition(".")[2] in ("gate", "router"):
            continue
        if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
            continue
        module.__class__ = Float8Linear  # parameters and their names stay
        count += 1
    return count


class Float8Linear(nn.Linear):
    """A linear layer that multiplies in float8."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in]` -> `[..., out]`."""
        return fp8_linear(input, self.weight, self.bias)
