"""Log-probabilities of the trained tokens on a GPU, without logits in float32.

The LM head's product stays in its half-precision type, as the engines' does. Two Triton kernels go over it: one reads a
row once for its log-sum, entropy and target (an online softmax, arXiv 1805.02867), the other turns it into its
gradient where it lies. Everything between is float32, in registers. Beside `logprobs.py`, which is the same in torch's
own operators, a chunk has half the memory and less than a third of its traffic.

A device on which the kernels do not compile, or compute something else, is told so once and goes on without.
"""

from functools import cache
from typing import Any

import torch
from loguru import logger

try:
    import triton
    import triton.language as tl
except ImportError:  # no CUDA build: never reached on a GPU
    triton = None

BLOCK = 4096
"""Columns that a program goes over at once."""
TOLERANCE = 1e-4
"""Nats, and share of the greatest gradient beside half-precision rounding, by which the first try may be off."""
HALF = (torch.bfloat16, torch.float16)

if triton is not None:

    @triton.jit
    def _row_kernel(logits, column, scale, log_sums, entropy, logprobs, width, stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        row = tl.program_id(0).to(tl.int64)
        first, factor = logits + row * stride, tl.load(scale + row)
        top, total, moment = -float("inf"), 0.0, 0.0  # moment: the sum of e (l - top), for the entropy
        for start in range(0, width, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = place < width
            value = tl.load(first + place, mask=inside, other=-float("inf")).to(tl.float32) * factor
            value = tl.where(inside, value, -float("inf"))
            new_top = tl.maximum(top, tl.max(value, axis=0))
            step = tl.where(total > 0, top - new_top, 0.0)
            kept = tl.where(total > 0, tl.exp(step), 0.0)
            exps = tl.exp(value - new_top)
            moment = kept * (moment + total * step) + tl.sum(tl.where(inside, exps * (value - new_top), 0.0), axis=0)
            total = kept * total + tl.sum(exps, axis=0)
            top = new_top
        log_sum = top + tl.log(total)
        at_target = tl.load(first + tl.load(column + row)).to(tl.float32) * factor
        tl.store(log_sums + row, log_sum)
        tl.store(entropy + row, tl.log(total) - moment / total)
        tl.store(logprobs + row, at_target - log_sum)

    @triton.jit
    def _gradient_kernel(  # type: ignore[no-untyped-def]
        logits, column, scale, log_sums, rows, entropy, entropy_rows, width, stride, BLOCK: tl.constexpr,
        OF_ENTROPY: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = place < width
        at = logits + row * stride + place
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale + row)
        logprob = value - tl.load(log_sums + row)
        share = tl.exp(logprob)
        hit = (place == tl.load(column + row)).to(tl.float32)
        delta = (hit - share) * tl.load(rows + row)
        if OF_ENTROPY:
            delta -= share * (logprob + tl.load(entropy + row)) * tl.load(entropy_rows + row)
        tl.store(at, delta.to(logits.dtype.element_ty), mask=inside)


def row_statistics(
    logits: torch.Tensor, column: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probability of the target, log-sum and entropy of each row of `logits` times `scale`.

    Args:
        logits: half precision `[n, V]`, rows contiguous.
        column: int64 `[n]` of each target.
        scale: float32 `[n]`.

    Returns:
        Three float32 `[n]`.
    """
    logprobs, log_sums, entropy = torch.empty((3, len(logits)), dtype=torch.float32, device=logits.device)
    if len(logits):
        sizes = logits.shape[1], logits.stride(0)
        _row_kernel[(len(logits),)](logits, column, scale, log_sums, entropy, logprobs, *sizes, BLOCK=BLOCK)
    return logprobs, log_sums, entropy


def make_gradient(
    logits: torch.Tensor,
    column: torch.Tensor,
    scale: torch.Tensor,
    log_sums: torch.Tensor,
    rows: torch.Tensor,
    entropy: torch.Tensor,
    entropy_rows: torch.Tensor | None = None,
) -> None:
    """Turn logits `[n, V]` in place into rows * (1 at the target - p) - entropy_rows * p (log p + entropy), p their
    softmax; float32 `[n]` each of the others."""
    if len(logits):
        grid, of_entropy = (len(logits), triton.cdiv(logits.shape[1], BLOCK)), entropy_rows is not None
        sizes, more = (logits.shape[1], logits.stride(0)), entropy_rows if of_entropy else rows
        _gradient_kernel[grid](
            logits, column, scale, log_sums, rows, entropy, more, *sizes, BLOCK=BLOCK, OF_ENTROPY=of_entropy
        )


def add_listed(
    delta: torch.Tensor,
    tokens: torch.Tensor,
    at_tokens: torch.Tensor,
    of_all: torch.Tensor,
) -> None:
    """Put the gradient at the target and at further tokens into `delta`, `[n, V]`, in place.

    It is computed in float32 and rounded once, as the kernel's is: near its teacher's probability a token's is a small
    difference of two, of which half precision would leave nothing.

    Args:
        tokens: int64 `[n, m]`, the target, then the others; one may be the target, or the target stand for none.
        at_tokens: float32 `[n, m]`, the gradient that reaches each one's own logit.
        of_all: float32 `[n, m]`, the gradient that reaches it as it does those of all tokens.
    """
    exact, same = at_tokens + of_all, tokens[:, 1:] == tokens[:, :1]
    exact[:, 0] += torch.where(same, at_tokens[:, 1:], 0).sum(dim=1)
    delta.scatter_(1, tokens[:, 1:], exact[:, 1:].to(delta.dtype))
    delta.scatter_(1, tokens[:, :1], exact[:, :1].to(delta.dtype))  # the last word where one of them is the target


class FusedTokenLogprobs(torch.autograd.Function):
    """As `logprobs._TokenLogprobs`, of a whole half-precision head with nothing added to its logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: torch.Tensor,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of targets `[N]` or `[N, m]`, float32 of their shape, and entropies, float32 `[N]`."""
        num, listed = hidden.shape[0], targets.ndim > 1
        # three tensors, no views of one: FSDP hangs its hooks on what the model returns, and warns of views
        shapes = targets.shape, (num,), (num,)
        logprobs, log_sums, entropy = (torch.empty(n, dtype=torch.float32, device=hidden.device) for n in shapes)
        buffer = hidden.new_empty((min(num, chunk_tokens), weight.shape[0]))
        for start in range(0, num, chunk_tokens):
            part = slice(start, min(start + chunk_tokens, num))
            logits = torch.mm(hidden[part], weight.T, out=buffer[: part.stop - start])
            column = targets[part, 0].contiguous() if listed else targets[part]
            values, log_sums[part], entropy[part] = row_statistics(logits, column, scale[part])
            if listed:
                values = logits.gather(1, targets[part]).float() * scale[part, None] - log_sums[part, None]
            logprobs[part] = values
        ctx.kept = buffer if num <= chunk_tokens else None
        ctx.chunk_tokens = chunk_tokens
        ctx.save_for_backward(hidden, weight, targets, scale, log_sums, entropy, *([logprobs] if listed else []))
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        """Gradients of hidden states and head, of those of log-probabilities and entropies."""
        hidden, weight, targets, scale, log_sums, entropy, *listed = ctx.saved_tensors
        num, chunk, kept = hidden.shape[0], ctx.chunk_tokens, ctx.kept
        ctx.kept = None
        grad_hidden, at_tokens = torch.empty_like(hidden), torch.zeros_like(targets, dtype=torch.float32)
        if grad is not None:
            at_tokens = grad * (scale[:, None] if listed else scale)
        rows, columns = (at_tokens.sum(1), targets[:, 0].contiguous()) if listed else (at_tokens, targets)
        entropy_rows = None if grad_entropy is None else grad_entropy * scale
        trains_weight = ctx.needs_input_grad[1]
        in_parts = trains_weight and kept is None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if in_parts else None
        buffer = hidden.new_empty((min(num, chunk), weight.shape[0])) if kept is None else kept
        for start in range(0, num, chunk):
            part = slice(start, min(start + chunk, num))
            delta = buffer[: part.stop - start]
            if kept is None:
                torch.mm(hidden[part], weight.T, out=delta)
            more = None if entropy_rows is None else entropy_rows[part]
            make_gradient(delta, columns[part], scale[part], log_sums[part], rows[part], entropy[part], more)
            if listed:
                known = listed[0][part]
                of_all = known.exp() * rows[part, None]
                if more is not None:
                    of_all += known.exp() * (known + entropy[part, None]) * more[:, None]
                add_listed(delta, targets[part], at_tokens[part], -of_all)
            torch.mm(delta, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.add_(delta.T @ hidden[part])
        if grad_weight is not None:
            return grad_hidden, grad_weight.to(weight.dtype), None, None, None
        return grad_hidden, buffer.T @ hidden if trains_weight else None, None, None, None


def is_served(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the kernels take a head of these tensors, here."""
    return (
        hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype in HALF and _works(hidden.device, hidden.dtype)
    )


@cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Try both kernels once on this device, against torch's own operators."""
    if triton is None:
        return False
    try:
        off = first_try(device, dtype)
    except Exception as error:  # noqa: BLE001  # whatever a compiler that never met this device may raise
        logger.warning(
            f"the LM head's Triton kernels do not run on {device} ({error}): torch's operators take their place"
        )
        return False
    if off > TOLERANCE:
        logger.warning(
            f"the LM head's Triton kernels are off by {off:.1e} on {device}: torch's operators take their place"
        )
    return off <= TOLERANCE


def first_try(device: torch.device, dtype: torch.dtype) -> float:
    """Return by how much the kernels differ from torch's own operators, on logits of several blocks."""
    generator = torch.Generator().manual_seed(0)
    width = 2 * BLOCK + 17
    logits = (torch.randn((6, width), generator=generator) * 4).to(device, dtype)
    column = torch.tensor([0, 1, BLOCK - 1, BLOCK, width - 2, width - 1], device=device)
    scale = torch.tensor([1.0, 1 / 0.7, 0.5, 1.0, 2.0, 0.1], device=device)
    rows = torch.tensor([1.0, -0.5, 3.0, 0.0, 0.25, -2.0], device=device)
    expected = (logits.float() * scale[:, None]).log_softmax(1)
    logprobs, log_sums, entropy = row_statistics(logits, column, scale)
    exact = -(expected.exp() * expected).sum(1)
    errors = [logprobs - expected.gather(1, column[:, None])[:, 0], entropy - exact]
    of_logprob = (torch.nn.functional.one_hot(column, width) - expected.exp()) * rows[:, None]
    of_entropy = -expected.exp() * (expected + exact[:, None]) * rows.flip(0)[:, None]
    for more, delta in ((None, of_logprob), (rows.flip(0), of_logprob + of_entropy)):
        turned = logits.clone()
        make_gradient(turned, column, scale, log_sums, rows, entropy, more)
        rounding = torch.finfo(dtype).eps * delta.abs()
        errors.append(((turned.float() - delta).abs() - rounding).clamp(min=0) / delta.abs().max())
    return max(float(error.abs().max()) for error in errors)
