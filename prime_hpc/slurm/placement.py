"""Placement of the roles on the nodes of a Slurm job: a pure function of the experiment and the site profile.

`launch` renders the job from it (`components`), the supervisor starts the roles by it (`groups`) once Slurm has named
the nodes. Nothing here asks the machine or the cluster anything.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.engine_groups import ENGINE_ROLES, SECTIONS, EngineRole, engine_roles, servers_of
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.slurm.gpu_split import assign_gpus
from prime_hpc.slurm.options import (
    Options,
    RoleOptions,
    SlurmRole,
    merge,
    needs_het,
    num_env_nodes,
    resolve,
    resolve_elastic,
)


@dataclass(frozen=True)
class LayoutRow:
    """One layout."""

    survives_lost_node: bool
    """The job goes on without a node that holds no irreplaceable role; else Slurm ends it."""
    takes_arrays: bool
    """Points of a sweep can be one job array."""
    hands_options_on: bool
    """Slurm hands what one component states on to the next that does not."""
    if_refused: str
    """Advice where sbatch says that it does not support the job; empty: it says so of something else."""


LAYOUTS: dict[str, LayoutRow] = {
    "packed": LayoutRow(survives_lost_node=True, takes_arrays=True, hands_options_on=False, if_refused=""),
    "het": LayoutRow(
        survives_lost_node=False,
        takes_arrays=False,
        hands_options_on=True,
        if_refused=(
            "this cluster refuses het jobs: set slurm.layout = packed (and het_jobs: false in the site profile)"
        ),
    ),
}
"""`slurm.layout` -> its row."""


@dataclass(frozen=True)
class Component:
    """One component of the job (a homogeneous job has exactly one): what is asked of Slurm."""

    index: int
    name: str
    """For people: `trainer`, `inference`, `teacher`, `judge`, `orchestrator`, or `all`."""
    num_nodes: int
    options: dict[str, str | bool] = field(default_factory=dict)
    """sbatch options by long name (`partition`, `gres`, `time`, ...), without `nodes` and `ntasks-per-node`."""


@dataclass(frozen=True)
class RoleGroup:
    """One supervised role: where it runs. A step of its own in the job."""

    role: SlurmRole
    index: int
    """Of a group of engines the server's, else 0."""
    component: int
    first_node: int
    """Offset into the component's node list."""
    num_nodes: int
    processes_per_node: int
    """Trainer ranks, or data-parallel engines of this server, on each of its nodes."""
    gpus: tuple[int, ...] | None = None
    """Positions, among the GPUs that the job sees on each node, of those this role uses; None: no GPU."""
    dp_size: int = 1
    """Data-parallel size of this server, over all its nodes."""
    device: Literal["cuda", "cpu"] = "cpu"
    """`cuda`: it computes on `gpus`, and ends where they are not there."""
    env_nodes: tuple[int, ...] = ()
    """Of the orchestrator: further nodes of its component, which play episodes."""


@dataclass(frozen=True)
class Placement:
    """The whole job."""

    layout: Literal["packed", "het", "local"]
    """`local`: this machine, as one component of one host."""
    components: tuple[Component, ...]
    groups: tuple[RoleGroup, ...]
    spares: tuple[int, ...] = ()
    """Homogeneous jobs: node offsets that no role uses at first."""
    elastic: Options | None = None
    """sbatch options of the one-node job of a server of `slurm.elastic`; None: there are none."""

    @property
    def abilities(self) -> LayoutRow:
        """Return the layout's row."""
        return LAYOUTS[self.layout]

    @property
    def num_nodes(self) -> int:
        """Nodes of all components."""
        return sum(component.num_nodes for component in self.components)


@dataclass(frozen=True)
class _Servers:
    """How the inference engines spread over nodes."""

    num_nodes: int
    nodes_per_replica: int
    """1, or over how many nodes one replica's engines are split."""
    num_replicas: int
    engines_per_node: int
    """Of one replica."""
    gpus_per_engine: int

    @property
    def gpus_of_part(self) -> int:
        """GPUs of one replica on one of its nodes."""
        return self.engines_per_node * self.gpus_per_engine

    def node_of(self, replica: int) -> int:
        """First node of a replica: as evenly as can be, several replicas of one node side by side."""
        if self.nodes_per_replica > 1:
            return replica * self.nodes_per_replica
        return replica * self.num_nodes // self.num_replicas

    @property
    def replicas_per_node(self) -> int:
        """On the fullest node."""
        return -(-self.num_replicas // self.num_nodes)


def place_slurm(experiment: Experiment, site: SiteConfig) -> Placement:
    """Place each role in the job's components.

    Component 0 holds the batch script (supervisor and orchestrator) on its first node. A homogeneous job's nodes are in
    the order trainer, inference, teacher, judge, spares.
    Raises ConfigError: the roles do not fit the nodes that are asked for, or the site has no such jobs.
    """
    layout, _ = choose_layout(experiment, site)
    placement = _PLACED_BY[layout](experiment, site)
    _check_ports(experiment, placement)
    groups = tuple(replace(group, device=_device(experiment, site, group)) for group in placement.groups)
    like = next((group for group in groups if group.role == "inference"), None)
    if like is None or not experiment.trains:
        return replace(placement, groups=groups)
    elastic = resolve_elastic(experiment, site, like.num_nodes, len(like.gpus or ()))
    return replace(placement, groups=groups, elastic=elastic)


def _device(experiment: Experiment, site: SiteConfig, group: RoleGroup) -> Literal["cuda", "cpu"]:
    """Decide a role's device. `auto` is decided here, by the GPUs that the job asks for, and nowhere else.
    Raises ConfigError: `device` is cuda and the role's nodes have no GPU."""
    stated = stated_device(experiment, site)
    if group.role == "orchestrator" or stated == "cpu" or (group.role == "trainer" and computes_on_cpu(experiment)):
        return "cpu"
    if group.gpus is None and stated == "cuda":
        raise ConfigError(
            f"cuda, but no GPU is asked for the nodes of {group.role}: state slurm.gpus_per_node", "device"
        )
    return "cpu" if group.gpus is None else "cuda"


def stated_device(experiment: Experiment, site: SiteConfig) -> Literal["auto", "cuda", "cpu"]:
    """Return what the experiment says of the device, else the site profile."""
    return experiment.device if experiment.device != "auto" else site.device


def computes_on_cpu(experiment: Experiment) -> bool:
    """Return whether the trainer's process group is gloo's by the config, which leaves GPUs alone."""
    return experiment.trainer.backend == "gloo"


def stated_port(experiment: Experiment, placement: Placement, group: RoleGroup) -> int | None:
    """HTTP port of a server whose section states one: servers of a group that share a node count up from it.
    Returns None where the node finds a free one."""
    if group.role not in ENGINE_ROLES:
        return None
    first = servers_of(experiment, group.role).server.port
    if not first:
        return None
    place = (group.role, group.component, group.first_node)
    return first + sum((g.role, g.component, g.first_node) == place for g in placement.groups if g.index < group.index)


def _check_ports(experiment: Experiment, placement: Placement) -> None:
    """Two groups of engines on one node must not be told the same port."""
    taken: dict[tuple[int, int, int], tuple[EngineRole, int]] = {}
    for group in placement.groups:
        port = stated_port(experiment, placement, group)
        if port is None or group.role not in ENGINE_ROLES:
            continue
        for node in range(group.first_node, group.first_node + group.num_nodes):
            other, index = taken.setdefault((group.component, node, port), (group.role, group.index))
            if other != group.role:
                raise ConfigError(
                    f"{servers_of(experiment, group.role).server.port}: on a node that both use, server {index} of "
                    f"{SECTIONS[other]} listens on {port} as well; leave it out, and a free one is found",
                    f"{SECTIONS[group.role]}.server.port",
                )


def placed_roles(experiment: Experiment) -> list[SlurmRole]:
    """Roles that take nodes of their own kind: the trainer, and the groups of engines that the run starts; of an
    evaluation that attaches to servers, the process that plays."""
    roles: list[SlurmRole] = [*(["trainer"] if experiment.trains else []), *engine_roles(experiment)]  # type: ignore[list-item]
    return roles or ["orchestrator"]


def choose_layout(experiment: Experiment, site: SiteConfig) -> tuple[Literal["packed", "het"], str]:
    """Return the layout, and why.
    Raises ConfigError: the layout that was asked for, or that the roles need, cannot be had."""
    slurm = experiment.slurm
    asked = [resolve(role, experiment, site) for role in placed_roles(experiment)]
    if slurm.orchestrator is not None and experiment.samples and experiment.trains:
        asked.append(resolve("orchestrator", experiment, site))
    if len(asked) == 1:
        return "packed", "one role group"
    difference = needs_het(asked)
    if slurm.layout == "packed":
        if difference:
            raise ConfigError(
                f"packed is one homogeneous job, but the roles ask for different nodes ({difference}); ask for the "
                "same, or use slurm.layout = het",
                "slurm.layout",
            )
        return "packed", "slurm.layout says so"
    if slurm.layout == "auto" and not difference:
        return "packed", "all roles ask for the same nodes"
    why = "slurm.layout says so" if slurm.layout == "het" else f"the roles ask for different nodes: {difference}"
    if not site.het_jobs:
        raise ConfigError(
            f"the site {site.name!r} accepts no het jobs ({why}); use slurm.layout = packed with the same "
            "partition, constraint and GPUs for all roles (slurm.partition instead of slurm.trainer.partition and "
            "slurm.inference.partition)",
            "slurm.layout",
        )
    if slurm.spare_nodes:
        raise ConfigError(
            "spare nodes exist in homogeneous jobs alone (Slurm ends a het job that loses a node), and this one is "
            f"het ({why}); set slurm.spare_nodes = 0, or slurm.layout = packed",
            "slurm.spare_nodes",
        )
    return "het", why


def _place_evaluation(experiment: Experiment, site: SiteConfig) -> Placement:
    """Engines alone, and who plays on the first of their nodes; without engines it has a node of its own. Groups that
    fit one node share it."""
    num_env_nodes(experiment)  # refuses any
    asked = {role: resolve(role, experiment, site) for role in placed_roles(experiment)}
    groups, used, roles = [_orchestrator()], 0, engine_roles(experiment)
    if len(roles) > 1 and _fits_one_node(experiment, gpus := asked[roles[0]].gpus_per_node):
        groups, used, roles = _shared_node(experiment, gpus), 1, []
    for role in roles:
        servers = _servers(experiment, role, asked[role])
        groups += _inference(experiment, role, servers, 0, used, asked[role].gpus_per_node)
        used += servers.num_nodes
    total = max(1, used) + experiment.slurm.spare_nodes
    options = merge(list(asked.values()))
    return Placement("packed", (Component(0, "all", total, options),), tuple(groups), tuple(range(max(1, used), total)))


def _place_homogeneous(experiment: Experiment, site: SiteConfig) -> Placement:
    if not experiment.trains:
        return _place_evaluation(experiment, site)
    slurm, more = experiment.slurm, num_env_nodes(experiment)
    asked = {role: resolve(role, experiment, site) for role in placed_roles(experiment)}
    options = merge(list(asked.values()))
    gpus = asked["trainer"].gpus_per_node
    if _fits_one_node(experiment, gpus):
        groups = _shared_node(experiment, gpus)
        used = 1
    else:
        trainer_nodes = _trainer_nodes(experiment, asked["trainer"])
        groups = [_orchestrator(), _trainer(experiment, 0, trainer_nodes, gpus)]
        used = trainer_nodes
        for role in engine_roles(experiment):
            servers = _servers(experiment, role, asked[role])
            groups += _inference(experiment, role, servers, 0, used, gpus)
            used += servers.num_nodes
    groups[0] = _orchestrator(tuple(range(used, used + more)))
    used += more
    if not experiment.samples:
        groups = [group for group in groups if group.role == "trainer"]
    total = used + slurm.spare_nodes
    return Placement("packed", (Component(0, "all", total, options),), tuple(groups), tuple(range(used, total)))


def _place_het(experiment: Experiment, site: SiteConfig) -> Placement:
    components: list[Component] = []
    more = num_env_nodes(experiment)
    groups = [_orchestrator(tuple(range(1, 1 + more)))]

    def add(name: SlurmRole, num_nodes: int, options: Options) -> int:
        components.append(Component(len(components), name, num_nodes, options))
        return len(components) - 1

    if experiment.slurm.orchestrator is not None:
        add("orchestrator", 1 + more, resolve("orchestrator", experiment, site).options)
    if experiment.trains:
        trainer = resolve("trainer", experiment, site)
        nodes = _trainer_nodes(experiment, trainer)
        groups.append(_trainer(experiment, add("trainer", nodes, trainer.options), nodes, trainer.gpus_per_node))
    for role in engine_roles(experiment):
        asked = resolve(role, experiment, site)
        servers = _servers(experiment, role, asked)
        index = add(role, servers.num_nodes, asked.options)
        groups += _inference(experiment, role, servers, index, 0, asked.gpus_per_node)
    return Placement("het", tuple(components), tuple(groups))


_PLACED_BY = {"packed": _place_homogeneous, "het": _place_het}


def _orchestrator(env_nodes: tuple[int, ...] = ()) -> RoleGroup:
    return RoleGroup("orchestrator", 0, 0, first_node=0, num_nodes=1, processes_per_node=1, env_nodes=env_nodes)


def _trainer_nodes(experiment: Experiment, asked: RoleOptions) -> int:
    """Nodes of the trainer, each with the same number of ranks."""
    ranks, gpus = experiment.trainer.num_ranks, asked.gpus_per_node
    given = experiment.slurm.trainer.nodes
    nodes = given or (-(-ranks // gpus) if gpus else 1)
    if ranks % nodes:
        below, above = ranks // nodes * nodes, -(-ranks // nodes) * nodes
        choice = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"{ranks} ranks cannot be spread evenly over {nodes} nodes; use {choice}", "trainer.num_ranks"
        )
    if gpus and ranks // nodes > gpus:
        raise ConfigError(
            f"{ranks} ranks on {nodes} nodes are {ranks // nodes} a node, but a node has {gpus} GPUs; use at least "
            f"{-(-ranks // gpus)} nodes",
            "slurm.trainer.nodes",
        )
    return nodes


def _trainer(experiment: Experiment, component: int, nodes: int, gpus: int) -> RoleGroup:
    ranks = experiment.trainer.num_ranks // nodes
    positions = _named(experiment, "trainer", ranks, gpus) or tuple(range(ranks))
    return RoleGroup("trainer", 0, component, 0, nodes, ranks, positions if gpus else None)


def _servers(experiment: Experiment, role: EngineRole, asked: RoleOptions) -> _Servers:
    """Spread num_replicas x data_parallel_size engines over the nodes of a group."""
    section, gpus = servers_of(experiment, role), asked.gpus_per_node
    replicas, engines, width = section.num_replicas, section.data_parallel_size, section.gpus_per_engine
    if gpus and width > gpus:
        stages = section.pipeline_parallel_size
        key = f"{SECTIONS[role]}.{'pipeline' if stages > 1 else 'tensor'}_parallel_size"
        raise ConfigError(f"an engine of {width} GPUs is larger than a node of {gpus}", key)
    nodes = getattr(experiment.slurm, role).nodes or _fewest_nodes(replicas, engines, width, gpus)
    split = max(1, nodes // replicas)
    if (nodes > replicas and nodes % replicas) or engines % split:
        what = f"{replicas} replicas of {engines} engines" if replicas > 1 else f"{engines} engines"
        choices = [n for n in _even_counts(replicas, engines) if n <= 4 * nodes]
        raise ConfigError(
            f"{what} cannot be spread evenly over {nodes} nodes; use {_or(choices)} nodes", f"slurm.{role}.nodes"
        )
    servers = _Servers(nodes, split, replicas, engines // split, width)
    need = servers.gpus_of_part * (servers.replicas_per_node if split == 1 else 1)
    if gpus and need > gpus:
        raise ConfigError(
            f"{need} GPUs a node are needed to serve with {nodes} nodes ({replicas} replicas x {engines} engines x "
            f"{width} GPUs), but a node has {gpus}; use {_fewest_nodes(replicas, engines, width, gpus)} nodes or "
            "more",
            f"slurm.{role}.nodes",
        )
    return servers


def _fewest_nodes(replicas: int, engines: int, width: int, gpus: int) -> int:
    if gpus == 0:
        return 1
    if engines * width <= gpus:
        return -(-replicas // (gpus // (engines * width)))
    split = next(k for k in range(2, engines + 1) if engines % k == 0 and engines // k * width <= gpus)
    return replicas * split


def _even_counts(replicas: int, engines: int) -> list[int]:
    return [*range(1, replicas), *(replicas * k for k in range(1, engines + 1) if engines % k == 0)]


def _or(choices: list[int]) -> str:
    shown = [str(choice) for choice in choices[-4:]]
    return " or ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _inference(
    experiment: Experiment,
    role: EngineRole,
    servers: _Servers,
    component: int,
    first_node: int,
    gpus: int,
    taken: tuple[int, ...] = (),
) -> list[RoleGroup]:
    """Return a group's servers: positions are disjoint between the replicas of a node, and with `taken`."""
    split, part = servers.nodes_per_replica, servers.gpus_of_part
    need = part * (servers.replicas_per_node if split == 1 else 1)
    named = _named(experiment, role, need, gpus)
    positions = named or tuple(g for g in range(max(gpus, need)) if g not in taken)
    grouped = across_nodes(experiment, role) == "engine_group"
    groups: list[RoleGroup] = []
    seat, last = 0, -1
    for replica in range(servers.num_replicas):
        node = servers.node_of(replica)
        seat, last = (seat + 1 if node == last else 0), node
        own = positions[seat * part : (seat + 1) * part] if gpus else None
        if grouped or split == 1:
            spans = [(node, split)]
        else:  # a server a node, each with its share of the engines
            spans = [(node + offset, 1) for offset in range(split)]
        for begin, count in spans:
            groups.append(
                RoleGroup(
                    *(role, len(groups), component, first_node + begin, count, servers.engines_per_node, own),
                    dp_size=servers.engines_per_node * count,
                )
            )
    return groups


def across_nodes(experiment: Experiment, role: EngineRole = "inference") -> Literal["servers", "engine_group"]:
    """Decide how to place a replica whose engines do not fit one node."""
    section = servers_of(experiment, role)
    return section.engines_together if section.across_nodes == "auto" else section.across_nodes


def _needs(experiment: Experiment) -> dict[str, int]:
    """GPUs of each role on a node that all share."""
    needs = {role: servers_of(experiment, role).num_gpus for role in engine_roles(experiment)}
    return needs | ({"trainer": experiment.trainer.num_ranks} if experiment.trains else {})


def _shared_positions(experiment: Experiment, gpus: int) -> dict[str, list[int]]:
    """Positions of each role on a node that all share; some may come out too short."""
    needs = _needs(experiment)
    return assign_gpus(range(gpus), needs, {role: _named(experiment, role, n, gpus) for role, n in needs.items()})


def _fits_one_node(experiment: Experiment, gpus: int) -> bool:
    roles, needs = engine_roles(experiment), _needs(experiment)
    if not roles or any(getattr(experiment.slurm, role).nodes for role in needs):
        return False
    if gpus == 0:
        return True
    if max(needs.values()) > gpus:
        return False
    shares = _shared_positions(experiment, gpus)
    return all(len(shares[role]) >= need for role, need in needs.items())


def _shared_node(experiment: Experiment, gpus: int) -> list[RoleGroup]:
    """Everything on node 0 of component 0."""
    shares = _shared_positions(experiment, gpus) if gpus else {}
    groups = [_orchestrator()]
    if experiment.trains:
        training = tuple(shares["trainer"]) if gpus else None
        groups.append(RoleGroup("trainer", 0, 0, 0, 1, experiment.trainer.num_ranks, training))
    for role in engine_roles(experiment):
        section = servers_of(experiment, role)
        servers = _Servers(1, 1, section.num_replicas, section.data_parallel_size, section.gpus_per_engine)
        taken = tuple(g for g in range(gpus) if g not in shares[role])
        groups += _inference(experiment, role, servers, 0, 0, gpus, taken)
    return groups


def _named(experiment: Experiment, role: str, need: int, gpus: int) -> tuple[int, ...] | None:
    """Return the first `need` of the GPUs that were named for a role; None where none were, or the nodes have no
    GPU."""
    key = f"{role}_gpu_ids"
    ids: list[int] | None = getattr(experiment, key)
    if ids is None or gpus == 0:
        return None
    if len(set(ids)) != len(ids) or not all(0 <= i < gpus for i in ids):
        raise ConfigError(f"{ids} must be different GPUs of a node, from 0 to {gpus - 1}", key)
    if len(ids) < need:
        raise ConfigError(f"{ids} are {len(ids)} GPUs, but {need} are needed on a node", key)
    return tuple(ids[:need])
