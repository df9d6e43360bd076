"""Right results on CPU in place of vLLM 0.32's wrong ones: of adapters, and of speculative decoding.

Products of LoRA: vLLM's own pick each token's matrices with `weights[indices]`, where -1 means the base model and so
picks the *last* adapter: once all places for adapters are taken, requests of the base model that run beside an
adapter's are sampled from that adapter, silently. They also copy a pair of matrices for every token. These multiply the
rows of one adapter at a time and leave the base model's rows alone.

Speculative decoding: vLLM's own kernel writes temperature and top-p of the drafted tokens, as whole numbers, into a
copy that nobody reads. The target's logits are then divided by what happened to be in memory: tokens come from another
distribution (0.5 nats a token at a temperature of 0.7), some with a log-probability of NaN.
"""

from collections.abc import Iterator
from typing import Any

import torch

_Rows = slice | torch.Tensor


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
