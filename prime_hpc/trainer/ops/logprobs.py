"""Log-probabilities of the trained tokens through the LM head, in float32 and chunk by chunk."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from prime_hpc.trainer.ops import fused_head
from prime_hpc.trainer.ops.cpu_matmul import product, product_into
from prime_hpc.trainer.ops.truncation import Cut, Truncation, apply_cut, find_cut

ROW_BLOCKS = 8
"""Parts in which a chunk's exponentials are made where nobody needs them all at once."""


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of an LM head that tensor-parallel ranks split; every rank has all hidden states."""

    mesh: DeviceMesh
    first: int
    """Token id of the first row."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, in place."""
        dist.all_reduce(x, group=self.mesh.get_group())
        return x

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the maximum over ranks, in place."""
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.mesh.get_group())
        return x

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' columns of a matrix, in the ranks' order."""
        parts = [torch.empty_like(x) for _ in range(self.mesh.size())]
        dist.all_gather(parts, x.contiguous(), group=self.mesh.get_group())
        return torch.cat(parts, dim=1)


def _chunk_logits(
    out: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    softcap: float | None,
    exact: bool,
) -> torch.Tensor:
    """Fill `out`, float32 `[n, vocab]`, with the logits of n hidden states, capped where the model caps, times scale.

    Half-precision products are rounded to their dtype, as engines do by default, or with `exact` kept in float32. All
    chunks share one buffer: on a CPU, fresh memory of this size costs several times the arithmetic on it.
    """
    if hidden.dtype == torch.float32 and bias is None:
        product_into(out, hidden, weight.T)
    elif not exact:
        out.copy_(torch.nn.functional.linear(hidden, weight, bias))
    else:
        if hidden.is_cuda:  # vLLM's own product, without a float32 copy of the weight
            torch.mm(hidden, weight.T, out_dtype=torch.float32, out=out)
        else:
            product_into(out, hidden.float(), weight.float().T)
        if bias is not None:
            out.add_(bias)
    if softcap is not None:
        out.div_(softcap).tanh_().mul_(softcap)
    return out.mul_(scale[:, None])


def _softmax_sums(
    logits: torch.Tensor, top: torch.Tensor, *, with_entropy: bool, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sums over the vocabulary, `[n]` each, of e = exp(l - top) and, with entropy, of e (l - top).

    The logits' memory is overwritten: by e where `keep` is set.
    """
    if not with_entropy:
        return logits.sub_(top[:, None]).exp_().sum(dim=1), top
    rows = max(1, -(-logits.shape[0] // ROW_BLOCKS))
    scratch = torch.empty((rows, logits.shape[1]), dtype=logits.dtype, device=logits.device)
    sums, moments = torch.empty_like(top), torch.empty_like(top)
    for first in range(0, logits.shape[0], rows):
        part = slice(first, min(first + rows, logits.shape[0]))
        shifted = logits[part].sub_(top[part, None])
        exps = torch.exp(shifted, out=scratch[: len(shifted)])
        torch.sum(exps, dim=1, out=sums[part])
        torch.sum(shifted.mul_(exps), dim=1, out=moments[part])
        if keep:
            shifted.copy_(exps)
    return sums, moments


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return `[N]` as `[N, 1]`, `[N, m]` as it is."""
    return x[:, None] if x.ndim == 1 else x


def _columns(targets: torch.Tensor, width: int, shard: VocabShard | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits' column of each of `[N, m]` targets (any, where another rank has it), and whether this rank has
    it."""
    if shard is None:
        return targets, targets.new_ones(0, dtype=torch.bool)
    column = targets - shard.first
    own = (column >= 0) & (column < width)
    return torch.where(own, column, 0), own


def _scale_probabilities(
    p: torch.Tensor, rows: torch.Tensor, entropy_rows: torch.Tensor | None, entropy: torch.Tensor
) -> None:
    """Turn probabilities `[n, vocab]` in place into what softmax and entropy add to the gradient of the logits:
    - rows p, and with `entropy_rows`, the gradient of the entropy H, - entropy_rows p (log p + H)."""
    if entropy_rows is None:
        p.mul_(-rows[:, None])
        return
    step = max(1, -(-p.shape[0] // ROW_BLOCKS))
    for first in range(0, p.shape[0], step):
        part = slice(first, first + step)
        surprise = torch.special.xlogy(p[part], p[part])  # 0 where p is
        p[part].mul_(-(rows + entropy_rows * entropy)[part, None])
        p[part].sub_(surprise.mul_(entropy_rows[part, None]))


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax at the targets through the LM head, and entropies, without autograd ever holding `[N, vocab]`.

    One chunk (N <= chunk_tokens): the exponentials are kept and turned into the gradient in place.
    More: each chunk's logits are computed again in the backward pass.

    Of a split head each rank computes its columns of the logits; only maxima, sums and the target's logit travel, and
    in the backward pass the sum of the hidden states' gradients.

    A frozen head's own gradient is not computed: a third of the products, and a float32 copy of the head in memory.
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
        shard: VocabShard | None,
        truncation: Truncation | None,
        exact: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num = hidden.shape[0]
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        entropy = torch.zeros(num if with_entropy else 0, dtype=torch.float32, device=hidden.device)
        log_sums = logprobs.new_empty(num)
        column, own = _columns(wide(targets), weight.shape[0], shard)
        keep = num <= chunk_tokens and softcap is None
        ctx.kept = None
        ctx.cut = None if truncation is None else Cut(torch.empty_like(log_sums), torch.empty_like(log_sums))
        buffer = logprobs.new_empty((min(num, chunk_tokens), weight.shape[0]))
        for start in range(0, num, chunk_tokens):
            part = slice(start, min(start + chunk_tokens, num))
            logits = _chunk_logits(buffer[: part.stop - start], hidden[part], weight, bias, scale[part], softcap, exact)
            if truncation is not None:
                cut = find_cut(logits, truncation.part(part), shard)
                apply_cut(logits, cut, column[part, 0], None if shard is None else own[part, 0])
                ctx.cut.least[part], ctx.cut.share[part] = cut
            at_target = logits.gather(1, column[part])
            top = logits.amax(dim=1)
            if shard is not None:
                top = shard.maximum(top)
            sums, moments = _softmax_sums(logits, top, with_entropy=with_entropy, keep=keep)
            if shard is not None:
                at_target = torch.where(own[part], at_target, 0)
                both = shard.total(torch.cat([sums[:, None], moments[:, None], at_target], dim=1))
                sums, moments, at_target = both[:, 0], both[:, 1], both[:, 2:]
            log_sum = sums.log()
            if with_entropy:
                entropy[part] = log_sum - moments / sums
            log_sums[part] = log_sum + top
            wide(logprobs)[part] = at_target - log_sums[part, None]
            if keep:
                ctx.kept = (logits, sums)
        ctx.save_for_backward(hidden, weight, column, own, scale, log_sums, entropy, *(() if bias is None else (bias,)))
        ctx.softcap, ctx.chunk_tokens, ctx.shard, ctx.exact = softcap, chunk_tokens, shard, exact
        ctx.set_materialize_grads(False)  # a loss without the entropy costs nothing for it
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, column, own, scale, log_sums, entropy, *rest = ctx.saved_tensors
        grad = log_sums.new_zeros(column.shape) if grad is None else wide(grad)
        bias = rest[0] if rest else None
        num, chunk = hidden.shape[0], ctx.chunk_tokens
        grad_hidden = torch.empty_like(hidden)
        _, trains_weight, trains_bias, *_ = ctx.needs_input_grad
        in_parts = trains_weight and (num > chunk or not num)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if in_parts else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and trains_bias else None
        buffer = grad.new_empty((min(num, chunk), weight.shape[0])) if ctx.kept is None else None
        for start in range(0, num, chunk):
            part = slice(start, min(start + chunk, num))
            at_target = grad[part] * scale[part, None]  # the gradient that reaches the logits before scale
            rows = at_target.sum(dim=1)
            entropy_rows = None if grad_entropy is None else grad_entropy[part] * scale[part]
            if buffer is None:
                delta, sums = ctx.kept
                ctx.kept = None
                if entropy_rows is None:
                    delta.mul_((-rows / sums)[:, None])
                else:
                    _scale_probabilities(delta.div_(sums[:, None]), rows, entropy_rows, entropy)
            else:
                delta = _chunk_logits(
                    buffer[: part.stop - start], hidden[part], weight, bias, scale[part], ctx.softcap, ctx.exact
                )
                slope = None if ctx.softcap is None else 1 - (delta / (scale[part, None] * ctx.softcap)).square()
                if ctx.cut is not None:
                    cut = Cut(ctx.cut.least[part], ctx.cut.share[part])
                    apply_cut(delta, cut, column[part, 0], None if ctx.shard is None else own[part, 0])
                delta.sub_(log_sums[part, None]).exp_()
                _scale_probabilities(delta, rows, entropy_rows, entropy[part])
            at_target = at_target if ctx.shard is None else at_target * own[part]
            delta.scatter_add_(1, column[part, :1], at_target[:, :1])
            if column.shape[1] > 1:  # apart: the target may be among them, and a GPU adds up in any order
                delta.scatter_add_(1, column[part, 1:], at_target[:, 1:])
            if ctx.softcap is not None:
                delta.mul_(slope)
            if grad_bias is not None:
                grad_bias += delta.sum(dim=0)
            delta = delta.to(weight.dtype)
            product_into(grad_hidden[part], delta, weight)
            if not trains_weight:
                continue
            if grad_weight is None:
                grad_weight = product(delta.T, hidden[part])
            elif weight.dtype == torch.float32:
                grad_weight.addmm_(delta.T, hidden[part])
            else:
                grad_weight.add_(delta.T @ hidden[part])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(weight.dtype)
        if ctx.shard is not None:
            ctx.shard.total(grad_hidden)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None, None, None


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int = 1024,
    with_entropy: bool = False,
    shard: VocabShard | None = None,
    truncation: Truncation | None = None,
    exact: bool = False,
    fused: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target | hidden) under the softmax of the LM head at a temperature, in float32.

    Args:
        hidden: `[N, D]` final hidden states, one for each target.
        weight: `[V, D]` LM head, or this rank's rows of it.
        targets: int64 `[N]`, or `[N, m]`: the target and m - 1 further tokens, each at most once.
        temperatures: float32 `[N]`; 0 (greedy sampling) counts as 1.
        bias: `[V]` or None.
        logit_scale: constant factor of the model's logits.
        softcap: the model's logit soft-capping, or None.
        chunk_tokens: rows of float32 logits that exist at once, in the forward and the backward pass.
        with_entropy: also return the distributions' entropies.
        shard: which rows `weight` (and `bias`) are, where tensor-parallel ranks split them. Collective then.
        truncation: top-p, top-k and min-p of each target's distribution; None: the whole vocabulary's.
        exact: keep the logits of a half-precision head in float32 (`model.head_dtype = float32`).
        fused: use Triton's kernels on a GPU, where they serve (`fused_head`): a half-precision head, whole, without
            bias, cap or truncation.

    Returns:
        float32 log-probabilities of the targets' shape; float32 `[N]` entropies in nats (`[0]` without `with_entropy`).
        Both are differentiable in hidden, weight and bias.
    """
    scale = logit_scale / torch.where(temperatures > 0, temperatures, torch.ones_like(temperatures))
    if softcap is not None:  # the model scales before it caps; the temperature divides after
        weight, scale = weight * logit_scale if logit_scale != 1.0 else weight, scale / logit_scale
    is_plain = bias is None and softcap is None and shard is None and truncation is None and not exact
    if fused and is_plain and fused_head.is_served(hidden, weight):
        logprobs, entropy = fused_head.FusedTokenLogprobs.apply(hidden, weight, targets, scale, chunk_tokens)
        return logprobs, entropy if with_entropy else entropy[:0]
    return _TokenLogprobs.apply(
        hidden, weight, bias, targets, scale, softcap, chunk_tokens, with_entropy, shard, truncation, exact
    )
