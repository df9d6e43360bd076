"""Objectives over the trained tokens of a packed micro-batch, and the log-probabilities that they need.

Called by `engine.py` through `model.Policy`. All tensors here are flat over the N *targets* (trained tokens) of a
micro-batch; sequences appear only through the per-target weights, so nothing loops over sequences and packing order
cannot matter.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

MAX_LOG_RATIO = 20.0
"""Reported ratios saturate here (e^20 = 5e8); the objective itself never exponentiates beyond its clip."""


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


@dataclass
class LossStats:
    """Sums and maxima over targets, as 0-dim tensors: `engine.py` reduces them over micro-batches and ranks."""

    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor]


def target_weights(
    sequence: torch.Tensor, targets_of_sequence: torch.Tensor, normalize: str, num_targets: int, num_sequences: int
) -> torch.Tensor:
    """Weight of every target in the batch's loss; over the whole batch, all ranks, they sum to 1.

    Args:
        sequence: int64 `[N]`, the sequence (of this micro-batch) to which a target belongs.
        targets_of_sequence: int64 `[S]`, number of targets of each sequence.
        normalize: `token` (every target counts the same) or `sequence` (every sequence counts the same).
        num_targets, num_sequences: targets, and sequences that have any, in the WHOLE batch: the global denominators.

    Raises:
        ValueError: unknown `normalize`.
    """
    if normalize == "token":
        return torch.full((len(sequence),), 1.0 / max(num_targets, 1), device=sequence.device)
    if normalize == "sequence":
        return 1.0 / (targets_of_sequence[sequence].float() * max(num_sequences, 1))
    raise ValueError(f"trainer.loss.normalize must be token or sequence, got {normalize!r}")


def aipo_loss(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    delta: float,
) -> tuple[torch.Tensor, LossStats]:
    """Token-level AIPO, the off-policy objective of LlamaRL (arXiv 2505.24034), without entropy and KL terms.

    With pi the trainer's policy, mu the policy that sampled the token, A the advantage and w the token's weight:

        loss = - sum_t  w_t * min(rho_t, delta) * A_t * log pi(t),      rho_t = stop_gradient(pi(t) / mu(t))

    so that its gradient is - sum_t w_t min(rho_t, delta) A_t grad log pi(t): REINFORCE under importance sampling, with
    the ratio clipped from above only. Unlike PPO's clip, a clipped token keeps its gradient (with factor delta).

    Edge cases: on-policy (rho = 1) it is plain REINFORCE. The minimum is taken between logarithms, so a ratio that
    would overflow, or a token to which the engine gave probability 0 (log mu = -inf), counts as delta. delta = inf
    switches the clip off. No targets: loss 0, still connected to the graph. A non-finite advantage or log pi makes
    the loss non-finite, which stops the run (`engine.py`).

    Args:
        logprobs: float32 `[N]`, log pi, differentiable.
        behaviour_logprobs: float32 `[N]`, log mu as the engine reported it.
        advantages, weights: float32 `[N]`.
        delta: upper clip of the importance ratio, > 0.

    Returns:
        the loss (0-dim) and its statistics: of d = log pi - log mu: sum and maximum of |d| and of rho, the number of
        clipped targets, and the sum of rho - 1 - d, whose mean under mu estimates KL(mu || pi) without ever being
        negative.
    """
    difference = logprobs.detach() - behaviour_logprobs
    clipped_ratio = torch.exp(torch.clamp(difference, max=math.log(delta)))
    loss = -(weights * clipped_ratio * advantages * logprobs).sum()
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, gap = bounded.exp(), difference.abs()
    empty = torch.zeros((), device=logprobs.device)
    sums = {
        "logprob_diff": gap.sum(),
        "ratio": ratio.sum(),
        "clipped": (difference > math.log(delta)).sum().float(),
        "kl": (ratio - 1 - bounded).sum(),
    }
    maxima = {
        "logprob_diff_max": gap.max() if len(gap) else empty,
        "ratio_max": ratio.max() if len(ratio) else empty,
    }
    return loss, LossStats(sums, maxima)


def sft_loss(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
    """Negative log-likelihood of the targets: - sum_t w_t log pi(t); with `token` weights the mean over the batch.

    Args:
        logprobs: float32 `[N]`, differentiable.
        weights: float32 `[N]`.
    """
    return -(weights * logprobs).sum(), LossStats({"nll": -logprobs.detach().sum()}, {})
