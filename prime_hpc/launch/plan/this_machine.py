"""This machine as a plan's allocation of one host."""

import os
from typing import Literal

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.engine_groups import ENGINE_ROLES, EngineRole, engine_roles, first_port, servers_of
from prime_hpc.slurm.client import why_not_in_force
from prime_hpc.slurm.options import Options, SlurmRole
from prime_hpc.slurm.placement import Component, Placement, RoleGroup
from prime_hpc.supervisor.roles.spec import split_gpus, usable_gpus


def resolve_launch(experiment: Experiment) -> Literal["slurm", "local"]:
    """Decide where `submit` would start the job: as the experiment says, else through Slurm where one is in force."""
    if experiment.launch != "auto":
        return experiment.launch
    return "slurm" if why_not_in_force() is None else "local"


def launcher() -> str:
    """Name the launcher of a local job, in one line."""
    why = why_not_in_force()
    if why is None:
        return "submitit's LocalExecutor on this machine (there is a Slurm here: --launch slurm takes it)"
    return f"submitit's LocalExecutor on this machine ({why})"


def place_here(experiment: Experiment) -> tuple[Placement, str]:
    """Place the roles on this machine: an allocation of one host.

    Returns:
        the placement, its GPUs as positions among the visible ones; why it is as it is, or what this machine lacks: a
        plan may be looked at on another machine than the run's.
    """
    gpus: list[str] = []
    serving: dict[EngineRole, list[list[str]]] = {}
    training: list[str] = []
    why, lacking = "every role on this machine", False
    try:
        gpus = usable_gpus(experiment, os.environ)
        serving, training = split_gpus(experiment, gpus)
    except ConfigError as error:
        why, lacking = f"this machine cannot hold it: {error}", True

    def group(role: SlurmRole, index: int, own: list[str], processes: int = 1) -> RoleGroup:
        on_gpus = bool(own) or (lacking and role != "orchestrator")
        positions = tuple(gpus.index(gpu) for gpu in own) or None
        return RoleGroup(
            *(role, index, 0, 0, 1, processes, positions),
            dp_size=processes if role in ENGINE_ROLES else 1,
            device="cuda" if on_gpus else "cpu",
        )

    groups = [group("orchestrator", 0, [])] if experiment.samples else []
    groups += [group("trainer", 0, training, experiment.trainer.num_ranks)] if experiment.trains else []
    for role in engine_roles(experiment):
        servers = servers_of(experiment, role)
        for index, own in enumerate(serving.get(role) or [[] for _ in range(servers.num_replicas)]):
            groups.append(group(role, index, own, servers.data_parallel_size))
    options: Options = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return Placement("local", (Component(0, "this machine", 1, options),), tuple(groups)), why


def ports_here(experiment: Experiment) -> list[int]:
    """HTTP ports of the servers on this machine that are known beforehand."""
    groups = [servers_of(experiment, role) for role in engine_roles(experiment)]
    firsts = [(first_port(experiment, servers), servers.num_replicas) for servers in groups]
    return sorted({port + index for port, count in firsts if port for index in range(count)})
