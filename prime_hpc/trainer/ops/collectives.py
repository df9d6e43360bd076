"""Communication that gradients flow through, on NCCL and gloo alike.

Every function comes with the one that undoes it in the backward pass:

    replicate (nothing)         <->  sum over ranks        into matrices that are split by columns
    sum over ranks              <->  replicate             out of matrices that are split by rows
    own part of a tensor        <->  all parts together    where ranks that held the same part their ways, and back
    all-to-all                  <->  all-to-all with the sizes swapped
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Move = Callable[[torch.Tensor, DeviceMesh], torch.Tensor]
"""One communication of a constant."""


class _Moved(torch.autograd.Function):
    """One communication forwards, the one that undoes it backwards."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh, there: Move, back: Move) -> torch.Tensor:
        ctx.mesh, ctx.back = mesh, back
        return there(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.back(grad, ctx.mesh), None, None, None


def _as_it_is(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=mesh.get_group())
    return x


def _local_part(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    assert x.shape[0] % mesh.size() == 0, (x.shape, mesh.size())
    return x.chunk(mesh.size())[mesh.get_local_rank()].contiguous()


def _all_parts(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    out = x.new_empty((x.shape[0] * mesh.size(), *x.shape[1:]))
    dist.all_gather_single(out, x.contiguous(), group=mesh.get_group())
    return out


def exchange(
    x: torch.Tensor, mesh: DeviceMesh, sent: list[int] | None = None, received: list[int] | None = None
) -> torch.Tensor:
    """`all_to_all` of a constant."""
    rows = x.shape[0] if received is None else sum(received)
    out = x.new_empty((rows, *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=mesh.get_group())
    return out


@torch.compiler.disable
def enter_parallel(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a tensor that all ranks hold, on its way to where each uses it in its own way: gradients are summed."""
    return _Moved.apply(x, mesh, _as_it_is, _sum)


@torch.compiler.disable
def leave_parallel(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the sum of the ranks' tensors, on every rank."""
    return _Moved.apply(x, mesh, _sum, _as_it_is)


@torch.compiler.disable
def split_rows(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's share of the rows `[n, ...]` (a multiple of the ranks) that all ranks hold."""
    return _Moved.apply(x, mesh, _local_part, _all_parts)


@torch.compiler.disable
def join_rows(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the inverse of `split_rows`: what follows is computed alike on all ranks."""
    return _Moved.apply(x, mesh, _all_parts, _local_part)


@torch.compiler.disable
def all_to_all(
    x: torch.Tensor, mesh: DeviceMesh, sent: list[int] | None = None, received: list[int] | None = None
) -> torch.Tensor:
    """Rows for each rank, in rank order, against rows from each rank.

    Args:
        x: `[sum(sent), ...]`.
        sent, received: rows for and from each rank; None: the same number each.

    Returns:
        `[sum(received), ...]`, differentiable.
    """
    there = partial(exchange, sent=sent, received=received)
    back = partial(exchange, sent=received, received=sent)
    return _Moved.apply(x, mesh, there, back)
