"""sbatch options of each role, resolved: `slurm.<role>.X` over `slurm.X` over the site profile's `options.X`."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.sections.sbatch_options import TRANSLATED, long_name
from prime_hpc.config.sections.slurm import SiteConfig, SitePartition, SlurmConfig, SlurmOptions
from prime_hpc.slurm.times import parse_time_s

Options = dict[str, str | bool]
"""Long option name (`time-min`) -> value; True: a bare flag."""
ENV_NODES = "slurm.orchestrator.nodes"
"""Its first node is the orchestrator's own, the others play episodes."""
SlurmRole = Literal["trainer", "inference", "teacher", "judge", "orchestrator"]
Mode = Literal["requeue", "successor", "off"]
"""How a job comes back: the same job again, another that waits for it, or not at all."""


@dataclass(frozen=True)
class Traits:
    """Properties of an sbatch option that has a key of its own."""

    of_node: bool = False
    """True if a stand-in asks for it too, since it decides what kind of node the job gets."""
    larger_wins: bool = False
    """True if, where the roles of a homogeneous job differ, the larger value holds for the job."""
    of_job: bool = False
    """True if it is of the job as a whole: of a het job only its leader states it."""
    handed_on: bool = False
    """True if sbatch hands it on from one component of a het job to the next."""


KEYED: dict[str, Traits] = {
    "partition": Traits(of_node=True),
    "account": Traits(of_node=True, handed_on=True),
    "qos": Traits(of_node=True, handed_on=True),
    "reservation": Traits(of_node=True, handed_on=True),
    "constraint": Traits(of_node=True),
    "mem": Traits(of_node=True, larger_wins=True, handed_on=True),
    "cpus_per_task": Traits(of_node=True, larger_wins=True),
    "time": Traits(of_node=True, larger_wins=True, handed_on=True),
    "time_min": Traits(larger_wins=True, handed_on=True),
    "exclude": Traits(of_node=True, handed_on=True),
    "nodelist": Traits(),
    "switches": Traits(),
    "exclusive": Traits(of_node=True),
    "licenses": Traits(of_job=True),
    "dependency": Traits(of_job=True),
    "mail_user": Traits(of_job=True),
    "mail_type": Traits(of_job=True),
    "comment": Traits(of_job=True),
}
"""Field of `SlurmOptions` -> properties of the option of the same name."""


def options_with(**traits: bool) -> tuple[str, ...]:
    """Long names of the options that have these properties: `options_with(of_job=True)`."""
    chosen = (name for name, row in KEYED.items() if all(getattr(row, key) is value for key, value in traits.items()))
    return tuple(name.replace("_", "-") for name in chosen)


JOB_WIDE = options_with(of_job=True)
OF_NODES = (*options_with(of_node=True), "gres", "gpus-per-node")
"""Options that decide what kind of node a job gets."""
_LARGEST = options_with(larger_wins=True)
_GRES_GPU = re.compile(r"^gpu(?::(?P<type>[^:=(]+))??(?:[:=](?P<count>\d+))?(?:\(.*\))?$")
_MEM = re.compile(r"^(\d+)([KMGT]?)B?$", re.IGNORECASE)


@dataclass(frozen=True)
class RoleOptions:
    """Options of one role's nodes."""

    role: SlurmRole
    options: Options
    """sbatch options, without `nodes` and `ntasks-per-node`."""
    gpus_per_node: int
    partitions: tuple[str, ...]
    """Those named, in order, or those of the profile that the constraint stands for; () is the cluster's default."""


def resolve(role: SlurmRole, experiment: Experiment, site: SiteConfig) -> RoleOptions:
    """Options of one role.
    Raises ConfigError: a value that no batch script can hold, or an `extra` that has a key of its own."""
    levels = _levels(role, experiment, site)
    options: Options = {}
    for name in KEYED:
        value = next((v for v in (getattr(level, name) for _, level in levels) if v is not None), None)
        if value is not None and value is not False:
            options[name.replace("_", "-")] = value if value is True else str(value)
    partitions = split_names(str(options.get("partition", ""))) or _by_constraint(options, site)
    unsaid = () if experiment.device == "cpu" else known_partitions(partitions, site)
    count, request = _gpus(role, levels, unsaid, site)
    options.update(request)
    options.update(_extra(role, levels))
    _by_node(options, count, role)
    _whole_node_mem(options, site)
    for name, value in options.items():
        _check_value(name, value, key_of(role, name.replace("-", "_"), experiment))
    return RoleOptions(role, options, count, partitions)


def resolve_elastic(experiment: Experiment, site: SiteConfig, num_nodes: int, gpus: int) -> Options | None:
    """Options of an elastic server's job: `slurm.elastic.X` over what decides on the nodes of the others.

    Args:
        num_nodes: of each of the others.
        gpus: that each of the others computes on; so many are asked for, unless `slurm.elastic` says how many.

    Returns:
        None: the experiment has no such servers.

    Raises:
        ConfigError: as `resolve`; the others have more than one node each.
    """
    elastic, group = experiment.slurm.elastic, experiment.slurm.inference
    if elastic is None:
        return None
    if num_nodes > 1:
        raise ConfigError(
            f"a server is on {num_nodes} nodes, and an elastic one is a job of one node: fewer engines a server "
            "(inference.data_parallel_size), or leave it out",
            "slurm.elastic",
        )
    stated = {name: value for name in SlurmOptions.model_fields if (value := getattr(elastic, name)) is not None}
    stated["extra"] = {**group.extra, **elastic.extra}
    if elastic.gres is None and elastic.gpus_per_node is None:
        stated |= {"gres": None, "gpus_per_node": gpus}
    own = experiment.slurm.model_copy(update={"inference": group.model_copy(update=stated)})
    found = resolve("inference", experiment.model_copy(update={"slurm": own}), site).options
    named = {long_name(name) for name in (*stated, *elastic.extra)}
    found = {name: value for name, value in found.items() if name in OF_NODES or name in named}
    return found | {"signal": f"B:USR1@{experiment.slurm.restart.signal_lead_s}"}


def key_of(role: SlurmRole, field: str, experiment: Experiment) -> str:
    """Dotted key of the experiment that states a field of SlurmOptions for a role, or where it would be stated."""
    group = getattr(experiment.slurm, role)
    return f"slurm.{role}.{field}" if getattr(group, field, None) is not None else f"slurm.{field}"


def _levels(role: SlurmRole, experiment: Experiment, site: SiteConfig) -> list[tuple[str, SlurmOptions]]:
    """(name for messages, options), most specific first."""
    group = getattr(experiment.slurm, role)
    own = [(f"slurm.{role}", group)] if group is not None else []
    return [*own, ("slurm", experiment.slurm), (f"options of the site profile {site.name!r}", site.options)]


def split_names(text: str) -> tuple[str, ...]:
    """Split `a, b` into ("a", "b")."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _by_constraint(options: Options, site: SiteConfig) -> tuple[str, ...]:
    """Partitions of the profile that the constraint stands for, where the site takes no partition's name."""
    asked = options.get("constraint")
    return tuple(name for name, part in site.partitions.items() if part.constraint and part.constraint == asked)


def known_partitions(partitions: Iterable[str], site: SiteConfig) -> list[SitePartition]:
    """Return the site's facts of those partitions that it knows."""
    return [site.partitions[name] for name in partitions if name in site.partitions]


def _gpus(
    role: SlurmRole, levels: list[tuple[str, SlurmOptions]], partitions: Sequence[SitePartition], site: SiteConfig
) -> tuple[int, Options]:
    """GPUs of a node, and how they are asked for. The most specific level that speaks of GPUs decides.

    Where none does, all that a node of `partitions` has. The orchestrator uses none: only its own section asks for any.
    """
    speaking = [options for name, options in levels if role != "orchestrator" or name == "slurm.orchestrator"]
    gpu_type = next((options.gpu_type for options in speaking if options.gpu_type), None)
    for options in speaking:
        if options.gres is not None:
            count = gres_gpus(options.gres) if options.gpus_per_node is None else options.gpus_per_node
            return count, {"gres": options.gres}
        if options.gpus_per_node is not None:
            return options.gpus_per_node, _gpu_request(options.gpus_per_node, gpu_type, site)
    if role == "orchestrator":
        return 0, {}
    # a job for several partitions may start in any of them: what the smallest node has
    count = min((part.gpus_per_node for part in partitions), default=0)
    return count, _gpu_request(count, gpu_type, site)


def _gpu_request(count: int, gpu_type: str | None, site: SiteConfig) -> Options:
    if count == 0 or site.gpu_option == "none":
        return {}
    text = f"{gpu_type}:{count}" if gpu_type else str(count)
    return {"gres": f"gpu:{text}"} if site.gpu_option == "gres" else {"gpus-per-node": text}


def gres_gpus(gres: str) -> int:
    """GPUs in a gres request: `gpu:h100:4,lustre:1` is 4, `gpu` is 1."""
    total = 0
    for part in split_names(gres):
        match = _GRES_GPU.match(part.removeprefix("gres/").removeprefix("gres:"))
        if match:
            total += int(match["count"] or 1)
    return total


def _extra(role: SlurmRole, levels: list[tuple[str, SlurmOptions]]) -> Options:
    merged: dict[str, object] = {}
    for _, options in reversed(levels):
        merged.update({long_name(name): value for name, value in options.extra.items()})
    result: Options = {}
    for name, value in merged.items():
        key = f"slurm.{role}.extra.{name}" if role == "orchestrator" else f"slurm.extra.{name}"
        field_name = name.replace("-", "_")
        if field_name in SlurmOptions.model_fields:
            raise ConfigError(f"--{name} has a key of its own: state slurm.{field_name}", key)
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]*", name):
            raise ConfigError(f"{name!r} is no name of an sbatch option", key)
        if value is None or value is False:
            continue  # takes back what the site profile or `slurm` states
        if not isinstance(value, str | int | float):
            raise ConfigError(f"--{name} must be text, a number or true, got {value!r}", key)
        if name == "export" and str(value).upper() == "ALL":
            continue  # sbatch's default
        result[name] = value if value is True else str(value)
    return result


def _by_node(options: Options, gpus: int, role: SlurmRole) -> None:
    """Say in place what is asked for by GPU by node instead: srun would take the former for its own steps too."""
    for name, field in TRANSLATED.items():
        value, home = options.pop(name, None), field.replace("_", "-")
        if value is None:
            continue
        key = f"slurm.extra.{name}"
        if not gpus:
            raise ConfigError(f"--{name} is asked for, but {role} asks for no GPU: state slurm.{field}", key)
        if home in options:
            raise ConfigError(f"--{name} and slurm.{field} are both stated: only one of them can hold", key)
        if home == "mem":
            options[home] = f"{round(parse_mem_mib(str(value)) * gpus)}M"
        elif not str(value).isdigit():
            raise ConfigError(f"--{name}={value} is no number", key)
        else:
            options[home] = str(int(str(value)) * gpus)


def _whole_node_mem(options: Options, site: SiteConfig) -> None:
    """Say all of a node's memory in place as the site takes it."""
    if re.fullmatch(r"0[KMGT]?B?", str(options.get("mem", "")).strip(), re.IGNORECASE):
        if site.whole_node_mem is None:
            del options["mem"]
        else:
            options["mem"] = site.whole_node_mem


def _check_value(name: str, value: str | bool, key: str) -> None:
    if isinstance(value, str) and any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise ConfigError(f"--{name}={value!r} holds a line break or another control character", key)


def needs_het(asked: list[RoleOptions]) -> str | None:
    """Why the roles cannot share one homogeneous job: what they ask of a node differs; None where they can."""
    first = asked[0]
    for other in asked[1:]:
        for name in dict.fromkeys([*first.options, *other.options]):
            if name in (*JOB_WIDE, *_LARGEST, "exclude"):
                continue
            here, there = first.options.get(name), other.options.get(name)
            if here != there:
                return f"{name}: {first.role} {_shown(here)}, {other.role} {_shown(there)}"
        if first.gpus_per_node != other.gpus_per_node:
            return f"GPUs a node: {first.role} {first.gpus_per_node}, {other.role} {other.gpus_per_node}"
    return None


def _shown(value: str | bool | None) -> str:
    return "yes" if value is True else str(value or "none")


def merge(asked: list[RoleOptions]) -> Options:
    """Options of one homogeneous job for roles that `needs_het` lets share it."""
    merged: Options = dict(asked[0].options)
    for other in asked[1:]:
        for name, value in other.options.items():
            if name in _LARGEST and name in merged:
                merged[name] = max(str(merged[name]), str(value), key=lambda text, n=name: _size(n, text))  # type: ignore[misc]
            elif name == "exclude" and name in merged:
                names = [*split_names(str(merged[name])), *split_names(str(value))]
                merged[name] = ",".join(dict.fromkeys(names))
            else:
                merged.setdefault(name, value)
    return merged


def _size(name: str, text: str) -> float:
    if name == "cpus-per-task":
        return float(text)
    if name == "mem":
        return parse_mem_mib(text) or float("inf")  # 0 is all of the node's
    seconds = parse_time_s(text)
    return float("inf") if seconds is None else seconds


def parse_mem_mib(text: str) -> float:
    """sbatch's memory size in MiB; `0` is 0. Raises ConfigError: not a size."""
    match = _MEM.match(text.strip())
    if not match:
        raise ConfigError(f"{text!r} is no memory size (for instance 500G, 64000M, 0 for all)", "slurm.mem")
    return int(match[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2].upper()]


def resolve_mode(config: SlurmConfig, site: SiteConfig, partition: str | None) -> Mode:
    """Resolve `slurm.restart.how` for a cluster: `auto` takes a requeue where the site allows it.
    `partition`: of the batch component, names separated by commas."""
    how = config.restart.how
    if how != "auto":
        return how
    cancels = any(part.preempt == "cancel" for part in known_partitions(split_names(partition or ""), site))
    return "requeue" if site.requeue and not cancels else "successor"


def num_env_nodes(experiment: Experiment) -> int:
    """Return how many nodes of the job play episodes. Raises ConfigError: nothing would be played there."""
    own, config = experiment.slurm.orchestrator, experiment.orchestrator
    more = (own.nodes or 1) - 1 if own is not None else 0
    if not more:
        return 0
    if not (experiment.samples and experiment.trains):
        raise ConfigError("an evaluation plays its episodes on one node", ENV_NODES)
    servers, evaluated = config.env_servers, config.eval.env if config.eval is not None else []
    stated = [servers.workers if env.workers is None else env.workers for env in (*config.env, *evaluated)]
    if not any(stated):
        raise ConfigError(
            f"{more + 1}: the orchestrator is one process on one node, and the others would play episodes, but no "
            "environment has workers: state orchestrator.env_servers.workers, or 1 node",
            ENV_NODES,
        )
    if servers.addresses:
        raise ConfigError(f"{more + 1}: the workers are at env_servers.addresses: 1 node, or no addresses", ENV_NODES)
    if "auto" in stated and servers.max_workers is None:
        key = "orchestrator.env_servers.max_workers"
        raise ConfigError("workers: auto on other nodes needs it: this one's cores say nothing of theirs", key)
    return more
