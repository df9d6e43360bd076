"""Context parallel: the tokens of one packed row split over the ranks of `cp` (Ulysses, arXiv 2309.14509).

    row of T tokens  ->  T / cp tokens on each rank, through every layer
    attention        ->  all-to-all: T tokens of heads / cp on each rank; any varlen kernel; all-to-all back
    targets          ->  a rank computes those that its own hidden states predict; log-probabilities (floats per
                         token) are then gathered, so that objectives see whole sequences

Each rank's gradient is that of its own targets; FSDP, which shards over `cp` as well, adds them up.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from prime_hpc.trainer.ops.collectives import all_to_all


def repeats(num_heads: int, num_kv_heads: int, width: int) -> int:
    """How often key-value heads are repeated so that `width` ranks can have their own.
    Raises ValueError: the ranks do not divide the query heads, or can neither split nor repeat the key-value heads."""
    if num_heads % width:
        raise ValueError(f"trainer.parallel.cp = {width} does not divide the {num_heads} attention heads of a rank")
    if num_kv_heads % width == 0:
        return 1
    if width % num_kv_heads == 0:
        return width // num_kv_heads
    raise ValueError(
        f"trainer.parallel.cp = {width}: the {num_kv_heads} key-value heads of a rank can be neither split nor repeated"
    )


def scatter_heads(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mesh: DeviceMesh,
) -> torch.Tensor:
    """`attend` over all tokens and some heads, from some tokens and all heads.

    Args:
        attend: of `[T, H / cp, D]`, `[T, KV', D]`, `[T, KV', D]`.
        query: `[T / cp, H, D]`; key, value: `[T / cp, KV, D]`.

    Returns:
        `[T / cp, H, D]`.
    """
    width, tokens = mesh.size(), query.shape[0]
    times = repeats(query.shape[1], key.shape[1], width)
    if times > 1:
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    shares = [x.unflatten(1, (width, -1)) for x in (query, key, value)]  # [T / cp, cp, heads of a rank, D]
    sizes = [x.shape[2] for x in shares]
    together = torch.cat(shares, dim=2).transpose(0, 1).contiguous()
    arrived = all_to_all(together, mesh).flatten(0, 1)  # parts of the row come in its order
    output = attend(*arrived.split(sizes, dim=1))
    returned = all_to_all(output.unflatten(0, (width, tokens)).contiguous(), mesh)  # [cp, T / cp, heads of a rank, D]
    return returned.transpose(0, 1).flatten(1, 2)


def local_targets(target_index: np.ndarray, first: int, stop: int) -> slice:
    """Return the targets that the hidden states of tokens `first` .. `stop` predict; `target_index` never falls."""
    return slice(*np.searchsorted(target_index, [first, stop]).tolist())


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, own: slice, num: int, mesh: DeviceMesh) -> torch.Tensor:
        ctx.own = own
        whole = x.new_zeros((num, *x.shape[1:]))
        whole[own] = x
        dist.all_reduce(whole, group=mesh.get_group())  # every element is on one rank: nothing is rounded
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return grad[ctx.own], None, None, None


def gather_targets(x: torch.Tensor, own: slice, num: int, mesh: DeviceMesh) -> torch.Tensor:
    """`[num, ...]`, all ranks' values of the row's targets; gradients flow back to this rank's own.

    What is computed from them is computed alike on all ranks, each of which goes on with its share of the gradient.

    Args:
        x: float32 `[len(own), ...]`.
        own: this rank's targets.
        num: targets of the row.
    """
    return _Gather.apply(x, own, num, mesh)
