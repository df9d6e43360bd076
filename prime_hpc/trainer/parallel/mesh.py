"""The parallel dimensions' device meshes and process groups. Built by `trainer.py`; carried by `model.Policy`.

Two views of the same ranks. Parameters that every token passes lie on (dp_replicate, fsdp, tp), where `fsdp` runs over
dp_shard and cp: ranks that split a row hold the same weights, so FSDP shards over them and sums their gradients. Where
experts are split, each of a copy's ranks, tensor-parallel ones too, works on tokens of its own there: experts lie on
(dp_replicate, expert_fsdp, ep).
"""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from prime_hpc.config.sections.parallel import ParallelDims


@dataclass(frozen=True)
class Parallel:
    """The parallel dimensions, and this rank's place in it."""

    dims: ParallelDims
    rank: int
    fsdp: DeviceMesh
    """(dp_replicate, fsdp), or (fsdp,) of a single copy."""
    tp: DeviceMesh | None
    """None without tensor parallelism; likewise the others."""
    cp: DeviceMesh | None
    expert_fsdp: DeviceMesh | None
    """(dp_replicate, expert_fsdp), or (expert_fsdp,); None where experts lie as everything else does."""
    ep: DeviceMesh | None

    @property
    def data_rank(self) -> int:
        """The part of the batch that this rank reads, out of `dims.num_data_ranks`."""
        return self.dims.data_rank(self.rank)

    @property
    def leads(self) -> bool:
        """True if this rank is the first of those that read its part of the batch."""
        return self.rank % self.dims.ranks_per_part == 0

    @property
    def cp_rank(self) -> int:
        """This rank's place among those that split a row."""
        return self.rank // self.dims.tp % self.dims.cp

    @property
    def row_multiple(self) -> int:
        """Packed rows are filled up to a multiple of this, so that ranks can split their tokens evenly."""
        return self.dims.ranks_per_part


def build_parallel(dims: ParallelDims, device: torch.device | str, timeout_s: float | None = None) -> Parallel:
    """Return the meshes of the parallel dimensions. Collective over the default process group.

    Args:
        dims: of as many ranks as the process group has.
        timeout_s: deadline of a collective; None: torch's own, 10 minutes on NCCL, whatever the default group's is.
    """
    kind, rank = torch.device(device).type, dist.get_rank()
    assert dims.world_size == dist.get_world_size(), (dims, dist.get_world_size())
    weights = _mesh(kind, {"dp_replicate": dims.dp_replicate, "fsdp": dims.fsdp, "tp": dims.tp}, "fsdp")
    cp = ep = expert_fsdp = None
    if dims.cp > 1:
        rows = _mesh(kind, {"data": dims.num_data_ranks, "cp": dims.cp, "other": dims.tp}, "cp")
        cp = rows["cp"]
    if dims.ep > 1 or dims.tp > 1:
        experts = {"dp_replicate": dims.dp_replicate, "expert_fsdp": dims.expert_shard, "ep": dims.ep}
        mesh = _mesh(kind, experts, "expert_fsdp")
        expert_fsdp = _part(mesh, "dp_replicate", "expert_fsdp")
        ep = mesh["ep"] if dims.ep > 1 else None
    found = Parallel(
        dims=dims,
        rank=rank,
        fsdp=_part(weights, "dp_replicate", "fsdp"),
        tp=weights["tp"] if dims.tp > 1 else None,
        cp=cp,
        expert_fsdp=expert_fsdp,
        ep=ep,
    )
    if timeout_s is not None and dist.get_backend() != "fake":  # a rehearsal's
        meshes = [mesh for mesh in (found.fsdp, found.tp, found.cp, found.expert_fsdp, found.ep) if mesh is not None]
        for group in {group for mesh in meshes for group in mesh.get_all_groups()}:
            _set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
    return found


def _mesh(kind: str, sizes: dict[str, int], kept: str) -> DeviceMesh:
    """Return a mesh of the dimensions that are longer than 1, and of `kept`."""
    used = {name: size for name, size in sizes.items() if size > 1 or name == kept}
    return init_device_mesh(kind, tuple(used.values()), mesh_dim_names=tuple(used))


def _part(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Return the dimensions of `mesh` among `names`."""
    assert mesh.mesh_dim_names is not None
    used = tuple(name for name in names if name in mesh.mesh_dim_names)
    return mesh if used == mesh.mesh_dim_names else mesh[used]
