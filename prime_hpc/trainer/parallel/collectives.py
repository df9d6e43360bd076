"""Communication that gradients flow through, on NCCL and gloo alike. Used by `tensor`, `context` and `expert`.

Every function comes with the one that undoes it in the backward pass:

    replicate (nothing)         <->  sum over ranks        into matrices that are split by columns
    sum over ranks              <->  replicate             out of matrices that are split by rows
    own part of a tensor        <->  all parts together    where ranks that held the same part their ways, and back
    all-to-all                  <->  all-to-all with the sizes swapped
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def _group(mesh: DeviceMesh) -> dist.ProcessGroup:
    return mesh.get_group()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=_group(ctx.mesh))
        return grad, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=_group(mesh))
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _all_parts(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    out = x.new_empty((x.shape[0] * mesh.size(), *x.shape[1:]))
    dist.all_gather_single(out, x.contiguous(), group=_group(mesh))
    return out


def _own_part(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    assert x.shape[0] % mesh.size() == 0, (x.shape, mesh.size())
    return x.chunk(mesh.size())[mesh.get_local_rank()].contiguous()


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return _own_part(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_parts(grad, ctx.mesh), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return _all_parts(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _own_part(grad, ctx.mesh), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: DeviceMesh, sent: list[int] | None, received: list[int] | None
    ) -> torch.Tensor:
        ctx.mesh, ctx.sent, ctx.received = mesh, sent, received
        return exchange(x, mesh, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return exchange(grad, ctx.mesh, ctx.received, ctx.sent), None, None, None


def exchange(
    x: torch.Tensor, mesh: DeviceMesh, sent: list[int] | None = None, received: list[int] | None = None
) -> torch.Tensor:
    """`all_to_all` of a constant."""
    rows = x.shape[0] if received is None else sum(received)
    out = x.new_empty((rows, *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=_group(mesh))
    return out


@torch.compiler.disable
def enter_parallel(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A tensor that all ranks hold, on its way to where each uses it in its own way: gradients are summed."""
    return _Enter.apply(x, mesh)


@torch.compiler.disable
def leave_parallel(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' tensors, on every rank."""
    return _Leave.apply(x, mesh)


@torch.compiler.disable
def split_rows(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's share of the rows `[n, ...]` (a multiple of the ranks) that all ranks hold."""
    return _Split.apply(x, mesh)


@torch.compiler.disable
def join_rows(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The inverse of `split_rows`: what follows is computed alike on all ranks."""
    return _Join.apply(x, mesh)


@torch.compiler.disable
def all_to_all(
    x: torch.Tensor, mesh: DeviceMesh, sent: list[int] | None = None, received: list[int] | None = None
) -> torch.Tensor:
    """Rows for each rank, in rank order, against rows from each rank.

    Args:
        x: `[sum(sent), ...]`.
        mesh: the ranks.
        sent, received: rows for and from each rank; None: the same number each.

    Returns:
        `[sum(received), ...]`, differentiable.
    """
    return _AllToAll.apply(x, mesh, sent, received)
