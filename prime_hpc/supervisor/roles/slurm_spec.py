"""Steps of a Slurm job: the placement's role groups on the nodes that Slurm gave.

The counterpart of `spec` (one machine).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.engine_groups import ENGINE_ROLES, EngineRole, engine_roles, ready_timeout_s, servers_of
from prime_hpc.config.sections.network import NetworkConfig
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.inference.backend import node_options
from prime_hpc.inference.environment import told_to_servers
from prime_hpc.runtime.role_context import (
    ENV_HOSTS,
    ENV_KEY,
    INFERENCE_URLS,
    NODE_PORTS,
    NOWHERE,
    RANKS_FILE,
    RANKS_PREFIX,
    URL_VARIABLES,
)
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.options import OF_NODES
from prime_hpc.slurm.placement import Placement, RoleGroup, stated_port
from prime_hpc.store.messaging.auth import new_secret
from prime_hpc.store.messaging.sockets import ALL, join
from prime_hpc.supervisor.agent import LaunchOrder
from prime_hpc.supervisor.roles.slurm_step import Hellos, StepSpec, http_port
from prime_hpc.supervisor.roles.spec import ORCHESTRATING_MODULES, Urls, inference_command

_ORDER = (*ENGINE_ROLES, "trainer", "orchestrator")


@dataclass(frozen=True)
class _Role:
    """A role of the job, and what its commands are made of."""

    experiment: Experiment
    site: SiteConfig
    group: RoleGroup
    hosts: tuple[str, ...]
    run_dir: Path
    num_servers: Mapping[str, int]
    """Group of engines -> its servers, all of them started before."""

    @property
    def python(self) -> str:
        """The container's, else that of its agent, which may be the node's own."""
        return self.site.container.python if self.site.container else "{python}"

    @property
    def network(self) -> NetworkConfig:
        """The experiment's, over the site's."""
        return self.experiment.network.over(self.site.network)

    def misses_servers(self, urls: Urls) -> bool:
        """Return whether a server has not been told where to listen."""
        return any(len(urls.get(role, [])) < count for role, count in self.num_servers.items())

    def order(self, spec: StepSpec, commands: list[list[str]], environment: dict[str, str], **more: Any) -> LaunchOrder:
        """Return the order to the agents of its step."""
        grace_s = self.experiment.supervisor.grace_s
        return LaunchOrder(0, list(spec.hosts), commands, environment, grace_s=grace_s, **more)


def slurm_specs(
    experiment: Experiment, site: SiteConfig, placement: Placement, allocation: Allocation, run_dir: Path
) -> list[StepSpec]:
    """Return the steps of a job, in the order in which they are started.
    Raises ConfigError: Slurm gave other nodes than the placement asks for."""
    _check_nodes(placement, allocation)
    specs: list[StepSpec] = []
    for group in sorted(placement.groups, key=lambda g: _ORDER.index(g.role)):
        if group.role == "orchestrator" and is_parent(experiment):
            continue  # each of its runs gets one, beside the supervisor, when the trainer takes it up
        if group.role in ENGINE_ROLES and group.role not in engine_roles(experiment):
            continue  # it has nothing left to ask them
        nodes = allocation.hosts[group.component]
        if group.first_node + group.num_nodes > len(nodes):
            logger.warning(
                f"{group.role}[{group.index}] has no node: the job came back smaller; the run goes on without"
            )
            continue
        more = [nodes[i] for i in group.env_nodes if i < len(nodes)]  # the job may have come back smaller
        hosts = (*nodes[group.first_node : group.first_node + group.num_nodes], *more)
        num_servers = Counter(spec.name for spec in specs if spec.is_server)  # they come first
        build = {"trainer": _trainer, "orchestrator": _orchestrator}.get(group.role, _inference)
        spec = build(_Role(experiment, site, group, hosts, run_dir, num_servers))
        specs.append(
            replace(
                spec,
                hosts=hosts,
                component=group.component,
                options={k: v for k, v in placement.components[group.component].options.items() if k in OF_NODES},
                gpus=group.gpus,
                is_on_gpus=group.device == "cuda",
                port=stated_port(experiment, placement, group),
            )
        )
    return [*specs, *_elastic_specs(experiment, site, placement, run_dir)] if allocation.by_slurm else specs


def _elastic_specs(experiment: Experiment, site: SiteConfig, placement: Placement, run_dir: Path) -> list[StepSpec]:
    """Return servers like the others, without nodes."""
    elastic, specs = experiment.slurm.elastic, list[StepSpec]()
    if elastic is None or placement.elastic is None:
        return specs
    others = [group for group in placement.groups if group.role == "inference"]
    gpus = None if others[0].gpus is None else tuple(range(len(others[0].gpus)))
    for number in range(elastic.servers):
        group = replace(others[0], index=len(others) + number, gpus=gpus, first_node=0)
        spec = _inference(_Role(experiment, site, group, (), run_dir, {}))
        specs.append(
            replace(
                spec,
                options=placement.elastic,
                gpus=gpus,
                is_on_gpus=group.device == "cuda",
                port=stated_port(experiment, placement, group),
                is_elastic=True,
            )
        )
    return specs


def spare_hosts(placement: Placement, allocation: Allocation) -> list[str]:
    """Nodes of a homogeneous job that no role uses at first."""
    return [allocation.hosts[0][i] for i in placement.spares]


def _check_nodes(placement: Placement, allocation: Allocation) -> None:
    asked = [component.num_nodes for component in placement.components]
    given = [len(hosts) for hosts in allocation.hosts]
    # one that lost a node may come back without it: a server less, if one is left
    if placement.abilities.survives_lost_node:
        ends = {g.role: g.first_node + g.num_nodes for g in reversed(placement.groups)}
        asked = [max(ends.values())]
    if len(asked) != len(given) or any(have < want for have, want in zip(given, asked, strict=True)):
        raise ConfigError(
            f"job {allocation.job_id} has {' + '.join(map(str, given))} nodes, but the experiment needs "
            f"{' + '.join(map(str, asked))} ({', '.join(c.name for c in placement.components)}): the script was "
            "rendered from another config; render or submit it again"
        )


def _interface(site: SiteConfig) -> dict[str, str]:
    name = site.network_interface
    return {} if name is None else {"NCCL_SOCKET_IFNAME": name, "GLOO_SOCKET_IFNAME": name}


def _gpus(group: RoleGroup) -> list[int] | None:
    """Positions of the GPUs that a role computes on; None: it gets none to see."""
    return list(group.gpus) if group.gpus is not None and group.device == "cuda" else None


def _threads(ranks: int) -> dict[str, str]:
    """OpenMP threads are left to the role's own setting, which knows the node it runs on."""
    return {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}


def _trainer(of: _Role) -> StepSpec:
    group, trainer = of.group, of.experiment.trainer
    by_task = trainer.launcher == "srun"
    per_node = group.processes_per_node
    program = ["-m", "prime_hpc.trainer.main", str(of.run_dir)]
    samples = trainer.tinker is not None and of.experiment.inference is not None

    def order(spec: StepSpec, hellos: Hellos, urls: Urls) -> LaunchOrder | None:
        if samples and of.misses_servers(urls):
            return None
        first = hellos[f"{spec.hosts[0]}/0"]
        address, port = first["collectives"], str(first["ports"][0])
        environment = {**_interface(of.site), "PYTHONSAFEPATH": "1"}  # torchrun starts the ranks without -P
        if samples:
            environment[INFERENCE_URLS] = ",".join(urls["inference"])
        if trainer.threads_per_rank:
            environment["OMP_NUM_THREADS"] = str(trainer.threads_per_rank)
        if by_task:
            command = [of.python, "-P", *program]
            environment |= {
                "RANK": "{rank}",
                "LOCAL_RANK": "{local_rank}" if group.device == "cpu" else "0",
                "WORLD_SIZE": str(trainer.num_ranks),
                "LOCAL_WORLD_SIZE": str(per_node),
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
            }
            if len(spec.hosts) == 1:
                environment[RANKS_FILE] = f"/tmp/{RANKS_PREFIX}{new_secret()}/store"
        else:
            command = [of.python, "-P", "-m", "prime_hpc.trainer.torchrun"]
            if len(spec.hosts) > 1:  # on one node nothing need listen
                command += ["--nnodes", str(len(spec.hosts)), "--node-rank", "{node_rank}"]
                command += ["--master-addr", address, "--master-port", port]
            command += ["--nproc-per-node", str(per_node), "--max-restarts", "0"]
            command += ["--signals-to-handle", "SIGINT", *program]
            environment |= {} if trainer.threads_per_rank else _threads(per_node)
        tasks = per_node if by_task else 1
        return of.order(spec, [command], environment, tasks_per_node=tasks, gpus=_gpus(group))

    return StepSpec(
        "trainer",
        [],
        of.experiment.supervisor.start_timeout_s,
        num_processes=trainer.num_ranks,
        tasks_per_node=per_node if by_task else 1,
        order=order,
    )


def _inference(of: _Role) -> StepSpec:
    group = of.group
    assert group.role in ENGINE_ROLES
    role: EngineRole = group.role
    servers = servers_of(of.experiment, role)

    def order(spec: StepSpec, hellos: Hellos, urls: Urls) -> LaunchOrder:
        first = hellos[f"{spec.hosts[0]}/0"]
        base = inference_command(servers.python or of.python, of.run_dir, role, group.index, http_port(spec, first))
        base += ["--host", first["address"] if of.network.serving else ALL]
        at = first["collectives"], int(first["ports"][1]) if len(spec.hosts) > 1 else 0
        options = node_options(servers.backend, group.dp_size, len(spec.hosts), *at)
        environment = _interface(of.site) | told_to_servers(servers.python)
        return of.order(spec, [[*base, *own] for own in options], environment, gpus=_gpus(group))

    return StepSpec(
        role,
        [],
        servers.ready_timeout_s,
        index=group.index,
        max_restarts=servers.max_restarts,
        order=order,
        backend=servers.backend,
        num_engines=group.dp_size,
    )


def _orchestrator(of: _Role) -> StepSpec:
    role = of.experiment.orchestrating_role

    def order(spec: StepSpec, hellos: Hellos, urls: Urls) -> LaunchOrder | None:
        if of.misses_servers(urls):
            return None
        elastic = of.experiment.slurm.elastic
        if elastic is not None and role == "orchestrator":  # where they are, it hears when they have a node
            absent = [f"{NOWHERE}{number}/v1" for number in range(elastic.servers)]
            urls = urls | {"inference": [*urls["inference"], *absent]}
        environment = {"OMP_NUM_THREADS": "1"} | {URL_VARIABLES[role]: ",".join(known) for role, known in urls.items()}
        commands = [[of.python, "-P", "-m", ORCHESTRATING_MODULES[role], str(of.run_dir)]]
        found = [hellos[f"{host}/0"] for host in spec.hosts[1:]]
        if found:
            environment[ENV_HOSTS] = ",".join(join(one["address"], one["ports"][0]) for one in found)
        for one in found:
            listen = join(one["address"] if of.network.serving else ALL, one["ports"][0])
            commands.append([of.python, "-P", "-m", "prime_hpc.envs.workers.host", "--listen", listen, "--of-a-job"])
        return of.order(spec, commands, environment, replaced=list(range(1, len(commands))))

    return StepSpec(
        role,
        [],
        of.experiment.supervisor.start_timeout_s + ready_timeout_s(of.experiment),
        environment={ENV_KEY: new_secret(), NODE_PORTS: "1"} if len(of.hosts) > 1 else {},
        order=order,
    )
