"""Right results on CPU in place of vLLM 0.32's wrong ones: adapters, speculative decoding, routers, rotary positions.

Products of LoRA: vLLM's own pick each token's matrices with `weights[indices]`, where -1 means the base model and so
picks the *last* adapter: once all places for adapters are taken, requests of the base model that run beside an
adapter's are sampled from that adapter, silently. They also copy a pair of matrices for every token. These multiply the
rows of one adapter at a time and leave the base model's rows alone.

Speculative decoding: vLLM's own kernel writes temperature and top-p of the drafted tokens, as whole numbers, into a
copy that nobody reads. The target's logits are then divided by what happened to be in memory: tokens come from another
distribution (0.5 nats a token at a temperature of 0.7), some with a log-probability of NaN.

Routers: where experts are chosen by softmax and a correction bias without groups (ERNIE 4.5), vLLM's leave the bias
out, silently; with one group of all experts, which is the same choice, they have it.

Rotary positions: vLLM's kernel takes the heads of `[tokens, heads, head size]` for one, silently, where a model does
not lay them behind each other first (LFM2).

Ranks: vLLM counts with a compiled function how many tokens are likelier than the sampled one, and compiles it when the
first request asks for log-probabilities. Until then nothing is answered: for half a minute on a busy machine that has
compiled nothing yet, longer than an episode may take. Left uncompiled it takes twenty times as long. Counted here
without a compiler, within 3 ms of its time a step.
"""

from collections.abc import Iterator
from typing import Any

import torch

_Rows = slice | torch.Tensor
_RANKED_AT_ONCE = 1 << 19
"""Logits: what is written of them between a comparison and its sum stays in a core's cache."""


def heed_bias(model: torch.nn.Module) -> None:
    """Let the routers of a model on CPU choose experts with their bias; does nothing a second time."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    for module in model.modules():
        router: Any = vars(module).get("router")
        if not isinstance(router, CPURouter) or router.use_grouped_topk or router.e_score_correction_bias is None:
            continue
        if router.custom_routing_function is None and router.scoring_func in ("softmax", "sigmoid"):
            router.use_grouped_topk, router.num_expert_group, router.topk_group = True, 1, 1


def rotate_heads() -> None:
    """Let rotary layers on CPU see all heads; does nothing a second time. Before a model is built: layers keep what
    they are to call."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu
    if rotate.__module__ == __name__:
        return

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.ndim != positions.ndim + 2:
            return rotate(self, positions, query, key)
        flat_key = None if key is None else key.flatten(-2)
        rotated, rotated_key = rotate(self, positions, query.flatten(-2), flat_key)
        return rotated.view_as(query), None if key is None or rotated_key is None else rotated_key.view_as(key)

    vars_of: Any = RotaryEmbedding
    vars_of.forward_cpu = forward_cpu


def rank_at_once() -> None:
    """Let vLLM's sampler use `count_at_least`; does nothing a second time."""
    from vllm.v1.sample import sampler

    module: Any = sampler
    module.batched_count_greater_than = count_at_least


def count_at_least(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Count in each row of `x`, float32 `[requests, vocabulary]`, the elements not below the row's of `values`
    `[requests, 1]`.
    Returns `[requests]`, int64."""
    counts = torch.empty(len(x), dtype=torch.int64, device=x.device)
    step = max(1, _RANKED_AT_ONCE // x.shape[1])
    above = x.new_empty(min(step, len(x)), x.shape[1])  # as floats: sums of booleans take twenty times as long
    for first in range(0, len(x), step):
        rows = slice(first, first + step)
        part = above[: len(x[rows])]
        torch.ge(x[rows], values[rows], out=part)
        counts[rows] = part.sum(-1)  # exact: no vocabulary has 2**24 tokens
    return counts


def speculate() -> None:
    """Let vLLM's rejection sampler use `expand_batch_to_tokens`; does nothing a second time."""
    from vllm.v1.sample import rejection_sampler

    module: Any = rejection_sampler
    module.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> torch.Tensor:
    """Repeat each request's value for its drafted tokens.

    Args:
        x: a value of each request, `[requests]`.
        cu_num_tokens: drafted tokens up to and with each request, `[requests]`.
        num_tokens: of all requests.
        replace_from: a value in whose place stands `replace_to`.

    Returns:
        `[num_tokens]`, of `x`'s type.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


def multiply_adapters() -> None:
    """Let vLLM's CPU path use the products below; does nothing a second time."""
    from vllm.lora.punica_wrapper import punica_cpu

    module: Any = punica_cpu
    module.bgmv_shrink, module.bgmv_expand, module.bgmv_expand_slice = shrink, expand, expand_slice
    module.sgmv_shrink, module.sgmv_expand, module.sgmv_expand_slice = (
        _by_sequence(shrink),
        _by_sequence(expand),
        _by_sequence(expand_slice),
    )


def shrink(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, scaling: float = 1.0
) -> None:
    """output = scaling A x.

    Args:
        inputs: x, `[tokens, in]`.
        weights: A of each place, `[places, (1,) rank, in]`.
        output: `[tokens, at least rank]`, overwritten.
        indices: place of each token's adapter, -1: none; int `[tokens]`.
    """
    rank = weights.shape[-2]
    output[:, :rank] = 0
    for place, rows in _places(indices):
        product = inputs[rows].to(output.dtype) @ _matrix(weights, place, output.dtype).T
        output[rows, :rank] = scaling * product


def expand(
    inputs: torch.Tensor, weights: torch.Tensor, output: torch.Tensor, indices: torch.Tensor, add_inputs: bool = True
) -> None:
    """output (+)= B x; shapes as `shrink`'s, with B `[places, (1,) out, rank]`. The output may be padded or cut."""
    expand_slice(inputs, weights, output, indices, 0, min(weights.shape[-2], output.shape[1]), add_inputs)


def expand_slice(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    indices: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """`expand` into columns `slice_offset` .. + `slice_size` of the output."""
    columns = slice(slice_offset, slice_offset + slice_size)
    if not add_inputs:
        output[:, columns] = 0
    for place, rows in _places(indices):
        product = inputs[rows].to(output.dtype) @ _matrix(weights, place, output.dtype).T
        output[rows, columns] += product[:, :slice_size]


def _places(indices: torch.Tensor) -> Iterator[tuple[int, _Rows]]:
    """Each adapter's place and its tokens."""
    found = indices.unique().tolist()
    for place in found:
        if place >= 0:
            yield place, slice(None) if len(found) == 1 else (indices == place).nonzero()[:, 0]


def _matrix(weights: torch.Tensor, place: int, dtype: torch.dtype) -> torch.Tensor:
    matrix = weights[place]
    return (matrix[0] if matrix.ndim == 3 else matrix).to(dtype)


def _by_sequence(function: Any) -> Any:
    """Return the same with one place a sequence instead of one a token, as vLLM calls it during prefill."""

    def call(
        inputs: torch.Tensor,
        weights: torch.Tensor,
        output: torch.Tensor,
        starts: torch.Tensor,
        lengths: torch.Tensor,
        indices: torch.Tensor,
        num_sequences: int,
        max_length: int,
        num_tokens: int,
        *rest: Any,
    ) -> None:
        function(inputs, weights, output, torch.repeat_interleave(indices, lengths), *rest)

    return call
