"""Gradients of parameters that lie on different meshes: how large, which are still to be summed, their common norm.

Sums and norms are taken after the last backward pass of a step: FSDP has summed over `fsdp` and `dp_replicate` by then.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from prime_hpc.trainer.parallel.tensor import local

if TYPE_CHECKING:
    from prime_hpc.trainer.model.policy import Policy


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return what this rank holds of every gradient."""
    return [local(p.grad) for p in parameters if p.grad is not None]


def whole_gradient_bytes(module: nn.Module) -> int:
    """Bytes of the float32 gradients of all that a rank trains, as they are before FSDP scatters them."""
    total = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            total += 4 * parameter.numel() // _split_before(parameter)
    return total


def _split_before(parameter: torch.Tensor) -> int:
    """Among how many ranks tensor or expert parallelism has split a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    names = enumerate(mesh.mesh_dim_names or ())
    placed = parameter.placements
    return math.prod(mesh.size(i) for i, name in names if name in ("tp", "ep") and not placed[i].is_replicate())


@torch.no_grad()
def sum_over(parameters: list[torch.Tensor], mesh: DeviceMesh) -> None:
    """Add up the gradients of parameters of which every rank of `mesh` saw a part of the work: one collective."""
    grads = [g for g in local_gradients(parameters) if g.numel()]
    if not grads:
        return
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, group=mesh.get_group())
    for grad, whole in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(whole.view_as(grad))


def num_holders(parameter: torch.Tensor) -> int:
    """How many ranks hold each element of a parameter."""
    world_size = dist.get_world_size()
    if not isinstance(parameter, DTensor):
        return world_size
    mesh = parameter.device_mesh
    return world_size // math.prod(mesh.size(i) for i, p in enumerate(parameter.placements) if not p.is_replicate())


def squared_norm(parameters: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return this rank's share of the squared norm of all gradients, float64: summed over all ranks every element
    counts once, however many ranks hold it."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    by_holders: dict[int, list[torch.Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            by_holders.setdefault(num_holders(p), []).append(p)
    for holders, held in by_holders.items():
        shards = [g for g in local_gradients(held) if g.numel()]
        if shards:
            norms = torch.stack(torch._foreach_norm(shards))
            total = total + norms.double().square().sum() / holders
    return total


@torch.no_grad()
def spoiled(policy: "Policy", slot: int) -> str:
    """Say which gradients of a step are NaN or infinite, whichever rank holds them. Collective.

    What goes wrong in a layer's backward pass spreads towards the embeddings: the last of the model's parameters that
    has it is the nearest to its origin. `slot`: of the adapter, where the policy has any.
    """
    named = policy.named_parameters() if policy.adapters is None else policy.adapters.named_parameters(slot).items()
    trained = [(name, p) for name, p in named if p.requires_grad]
    wrong = [p.grad is not None and not bool(local(p.grad).isfinite().all()) for _, p in trained]
    flags = torch.tensor(wrong, dtype=torch.int32, device=trained[0][1].device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    found = [name for (name, _), flag in zip(trained, flags.tolist(), strict=True) if flag]
    of = f"of {len(found)} of {len(trained)} parameters"
    return f" (not finite are the gradients {of}; the nearest to the loss is {found[-1]})" if found else ""
