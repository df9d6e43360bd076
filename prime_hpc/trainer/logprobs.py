"""Log-probabilities of the trained tokens through the LM head, in float32 and chunk by chunk.

Called by `model.Policy`. All tensors here are flat over the N *targets* (trained tokens) of a micro-batch.
"""

from typing import Any

import torch


def _chunk_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor, softcap: float | None
) -> torch.Tensor:
    """float32 `[n, vocab]` logits of n hidden states, capped where the model caps, divided by the temperature."""
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits.mul_(scale[:, None])


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax at the targets through the LM head, without autograd ever holding `[N, vocab]`.

    One chunk (N <= chunk_tokens): the exponentials are kept and turned into the gradient in place.
    More: each chunk's logits are computed again in the backward pass, and dropped.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: torch.Tensor,
        softcap: float | None,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num = hidden.shape[0]
        logprobs = torch.empty(num, dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros(num if with_entropy else 0, dtype=torch.float32, device=hidden.device)
        log_sums = torch.empty_like(logprobs)
        ctx.kept = None
        for start in range(0, num, chunk_tokens):
            part = slice(start, min(start + chunk_tokens, num))
            logits = _chunk_logits(hidden[part], weight, bias, scale[part], softcap)
            at_target = logits.gather(1, targets[part, None])[:, 0]
            top = logits.amax(dim=1, keepdim=True)
            if with_entropy:
                exps = torch.exp(logits - top)
                mean_logit = torch.linalg.vecdot(exps, logits)
            else:
                exps = logits.sub_(top).exp_()
            sums = exps.sum(dim=1)
            log_sum = top[:, 0] + sums.log()
            if with_entropy:
                entropy[part] = log_sum - mean_logit / sums
            logprobs[part] = at_target - log_sum
            log_sums[part] = log_sum
            if num <= chunk_tokens and softcap is None:
                ctx.kept = (exps, sums)
        ctx.save_for_backward(hidden, weight, targets, scale, log_sums, *(() if bias is None else (bias,)))
        ctx.softcap, ctx.chunk_tokens = softcap, chunk_tokens
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, targets, scale, log_sums, *rest = ctx.saved_tensors
        bias = rest[0] if rest else None
        num = hidden.shape[0]
        grad_hidden = torch.empty_like(hidden)
        many = num > ctx.chunk_tokens
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if many or not num else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None else None
        for start in range(0, num, ctx.chunk_tokens):
            part = slice(start, min(start + ctx.chunk_tokens, num))
            rows = grad[part]
            if ctx.kept is not None:
                delta, sums = ctx.kept
                ctx.kept = None
                delta.mul_((-rows / sums)[:, None])
            else:
                logits = _chunk_logits(hidden[part], weight, bias, scale[part], ctx.softcap)
                delta = torch.exp(logits - log_sums[part, None]).mul_(-rows[:, None])
            delta.scatter_add_(1, targets[part, None], rows[:, None])
            if ctx.softcap is not None:
                capped = logits / (scale[part, None] * ctx.softcap)
                delta.mul_(1 - capped.square())
            delta.mul_(scale[part, None])
            if grad_bias is not None:
                grad_bias += delta.sum(dim=0)
            delta = delta.to(weight.dtype)
            torch.mm(delta, weight, out=grad_hidden[part])
            chunk_weight = delta.T @ hidden[part]
            grad_weight = chunk_weight if grad_weight is None else grad_weight.add_(chunk_weight)
        assert grad_weight is not None
        grad_bias = None if grad_bias is None else grad_bias.to(weight.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None, None, None, None


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int = 2048,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target | hidden) under the softmax of the LM head at a temperature, in float32.

    Args:
        hidden: `[N, D]` final hidden states, one for each target.
        weight: `[V, D]` LM head.
        targets: int64 `[N]`.
        temperatures: float32 `[N]`; 0 (greedy sampling) counts as 1.
        bias: `[V]` or None.
        logit_scale: constant factor of the model's logits.
        softcap: the model's logit soft-capping, or None.
        chunk_tokens: rows of float32 logits that exist at once, in the forward and the backward pass.
        with_entropy: also return the distributions' entropies.

    Returns:
        float32 `[N]` log-probabilities, differentiable in hidden, weight and bias; float32 `[N]` entropies in nats
        (`[0]` without `with_entropy`), not differentiable.
    """
    scale = logit_scale / torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))
    if softcap is not None:  # the model scales before it caps; the temperature divides after
        weight, scale = weight * logit_scale if logit_scale != 1.0 else weight, scale / logit_scale
    return _TokenLogprobs.apply(hidden, weight, bias, targets, scale, softcap, chunk_tokens, with_entropy)
