"""The GPUs on which the roles of a run compute, and those that engines share with the trainer."""

from prime_hpc.config import Experiment
from prime_hpc.config.engine_groups import EngineRole
from prime_hpc.slurm.placement import Placement


def gpu_places(experiment: Experiment, role: str, placement: Placement | None) -> set[tuple[int, int, int]]:
    """Return component, node and position of each GPU on which a role computes; without a placement those that its key
    names, of this machine."""
    if placement is None:
        return {(0, 0, gpu) for gpu in getattr(experiment, f"{role}_gpu_ids") or ()}
    groups = [group for group in placement.groups if group.role == role and group.device == "cuda"]
    return {
        (group.component, group.first_node + node, gpu)
        for group in groups
        for node in range(group.num_nodes)
        for gpu in group.gpus or ()
    }


def gpus_in_common(
    experiment: Experiment, role: EngineRole = "inference", placement: Placement | None = None
) -> set[int]:
    """Return the positions of the GPUs that a group of engines shares with the trainer: on its nodes, not on others."""
    shared = gpu_places(experiment, "trainer", placement) & gpu_places(experiment, role, placement)
    return {gpu for _, _, gpu in shared}
