"""Lint of what is asked of Slurm against the site profile: partitions, GPUs, nodes, CPUs, memory, options, paths."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from prime_hpc.config import ConfigError
from prime_hpc.launch.lint.lint_finding import EVERY, Finding, Subject, rule
from prime_hpc.launch.storage import homes
from prime_hpc.slurm.containers import fixed_part
from prime_hpc.slurm.options import JOB_WIDE, SlurmRole, key_of, parse_mem_mib, split_names
from prime_hpc.slurm.placement import Component, stated_device
from prime_hpc.slurm.script import render_job

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/local", "/localscratch")
_DEPENDENCY = re.compile(
    r"(?:singleton|expand:\d+|(?:after|afterany|afterburstbuffer|aftercorr|afternotok|afterok)"
    r"(?::\d+(?:_(?:\d+|\*))?(?:\+\d+)?)+)"
)
_SWITCHES = re.compile(r"\d+(?:@[\d:-]+)?")
_MAIL_TYPES = (
    *("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT", "TIME_LIMIT_90"),
    *("TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS"),
)
_MEMORY_OPTIONS = ("mem", "mem-per-cpu", "mem-per-gpu")


@rule(*EVERY, slurm=True)
def placed(subject: Subject) -> Iterator[Finding]:
    """Report what the placement refuses."""
    for problem in subject.misplaced.problems if subject.misplaced else []:
        message, _, remedy = problem.message.partition("; ")
        yield Finding.error("PH308", problem.key, message, remedy or "state nodes and GPUs that hold all ranks")


@rule(*EVERY, slurm=True)
def renders(subject: Subject) -> Iterator[Finding]:
    """Report what the script's text cannot hold."""
    if subject.placement is None:
        return
    try:
        render_job(subject.placement, subject.experiment, subject.site, python="/usr/bin/python3", command_tail=[])
    except ConfigError as error:
        for problem in error.problems:
            yield Finding.error("PH323", problem.key, problem.message, "see the key")


@rule(*EVERY, slurm=True)
def partitions(subject: Subject) -> Iterator[Finding]:
    """Names that the site does not have."""
    known, elastic = subject.site.partitions, subject.experiment.slurm.elastic
    named = [(key_of(r, "partition", subject.experiment), n) for r, a in subject.roles.items() for n in a.partitions]
    if elastic is not None and elastic.partition is not None:
        named += [("slurm.elastic.partition", name) for name in split_names(elastic.partition)]
    for key, name in named:
        if known and name not in known:
            near = get_close_matches(name, known, n=1)
            yield Finding.error(
                "PH301",
                key,
                f"the site {subject.site.name!r} has no partition {name!r}",
                f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}",
            )


@rule(*EVERY, slurm=True)
def sizes(subject: Subject) -> Iterator[Finding]:
    """GPUs, CPUs and memory of a node, and nodes of a partition, against what the profile says."""
    placement = subject.placement
    for role, asked in subject.roles.items():
        for name in asked.partitions:
            part = subject.site.partitions.get(name)
            if part is None:
                continue
            if asked.gpus_per_node > part.gpus_per_node:
                yield Finding.error(
                    "PH302",
                    _key_beside_partition(subject, role, "gpus_per_node"),
                    f"{asked.gpus_per_node} GPUs a node are asked of {name}, whose nodes have {part.gpus_per_node}",
                    f"at most {part.gpus_per_node}, or another partition",
                )
            cpus = int(str(asked.options.get("cpus-per-task", 0)))
            if part.cpus_per_node and cpus > part.cpus_per_node:
                yield Finding.error(
                    "PH315",
                    _key_beside_partition(subject, role, "cpus_per_task"),
                    f"{cpus} CPUs a node are asked of {name}, whose nodes have {part.cpus_per_node}",
                    f"at most {part.cpus_per_node}",
                )
            yield from _memory_size(subject, role, name)
    by_partition: dict[str, list[Component]] = {}
    for component in placement.components if placement else ():
        named = split_names(str(component.options.get("partition", "")))
        if len(named) == 1:
            by_partition.setdefault(named[0], []).append(component)
    for name, components in by_partition.items():
        part, count = subject.site.partitions.get(name), sum(component.num_nodes for component in components)
        if part is not None and part.nodes is not None and count > part.nodes:
            largest = max(components, key=lambda component: component.num_nodes).name
            role = largest if largest in subject.roles else "trainer" if subject.experiment.trains else "inference"
            yield Finding.error(
                "PH303",
                f"slurm.{role}.nodes",
                f"the job needs {count} nodes of {name}, which has {part.nodes}",
                "fewer ranks or engines, or more GPUs a node",
            )


def _key_beside_partition(subject: Subject, role: SlurmRole, field: str) -> str:
    """Key of what does not fit a partition: the role's own where it has chosen that, for others have other nodes."""
    group = getattr(subject.experiment.slurm, role)
    has_own = group is not None and group.partition is not None
    return f"slurm.{role}.{field}" if has_own else key_of(role, field, subject.experiment)


def _memory_size(subject: Subject, role: SlurmRole, name: str) -> Iterator[Finding]:
    part, text = subject.site.partitions[name], subject.roles[role].options.get("mem")
    if text is None:
        return
    key = _key_beside_partition(subject, role, "mem")
    try:
        mib = parse_mem_mib(str(text))
    except ConfigError as error:
        yield Finding.error("PH321", key, error.problems[0].message, "for instance 500G")
        return
    if part.mem_gib and mib > part.mem_gib * 1024:
        yield Finding.error(
            "PH316",
            key,
            f"{text} a node are asked of {name}, whose nodes have {part.mem_gib:.0f} GiB",
            f"less than {part.mem_gib:.0f}G",
        )


@rule(*EVERY, slurm=True)
def resources(subject: Subject) -> Iterator[Finding]:
    """Nodes whose CPUs or GPUs the job would not get, or not use."""
    for role, asked in subject.roles.items():
        options, experiment = asked.options, subject.experiment
        exclusive = "exclusive" in options
        if "cpus-per-task" not in options and not exclusive and "cpus-per-gpu" not in options:
            yield Finding.warning(
                "PH315",
                key_of(role, "cpus_per_task", experiment),
                "neither CPUs nor whole nodes are asked for: one task a node gets the default, often one CPU",
                "state cpus_per_task (all that go with the GPUs), or exclusive = true",
            )
        stated = any(name in options for name in _MEMORY_OPTIONS) or subject.site.whole_node_mem is None
        if asked.gpus_per_node and not stated:
            yield Finding.info(
                "PH316",
                key_of(role, "mem", experiment),
                "no memory is asked for: the partition's default may be small",
                "state mem: a size, or for whole nodes 0, all of a node's, where the site takes it",
            )
        if len([name for name in _MEMORY_OPTIONS if name in options]) > 1:
            yield Finding.error(
                "PH316",
                key_of(role, "mem", experiment),
                "only one of mem, mem-per-cpu and mem-per-gpu may be asked for",
                "take one back (in `extra`: false)",
            )
        if asked.gpus_per_node and subject.site.gpu_option == "none" and not exclusive:
            yield Finding.warning(
                "PH326",
                key_of(role, "exclusive", experiment),
                f"the site {subject.site.name!r} does not give GPUs out (gpu_option none): another job may share them",
                "exclusive = true",
            )
    yield from _unsaid_gpus(subject)
    yield from _idle_gpus(subject)


def _unsaid_gpus(subject: Subject) -> Iterator[Finding]:
    """Nodes of which nothing says how many GPUs they have; roles of which the same is to be said are named together."""
    if stated_device(subject.experiment, subject.site) == "cpu":
        return
    roles: dict[str, list[str]] = {}
    for role, asked in subject.roles.items():
        if not asked.gpus_per_node and role != "orchestrator" and not _speaks_of_gpus(subject, role):
            roles.setdefault(key_of(role, "gpus_per_node", subject.experiment), []).append(role)
    for key, names in roles.items():
        yield Finding.error(
            "PH318",
            key,
            f"no GPUs are asked for: the site profile {subject.site.name!r} does not know the partition "
            f"and the config does not say, so {' and '.join(names)} would compute on the CPU",
            "state slurm.gpus_per_node (0 or device: cpu for a run on CPUs), or add the partition to the site profile",
        )
    for role, asked in subject.roles.items():
        is_meant = role == "orchestrator" or _states_gpus(subject, role)
        if not asked.gpus_per_node and subject.facts_of(role) and not is_meant:
            yield Finding.warning(
                "PH318",
                _key_beside_partition(subject, role, "partition"),
                f"nodes of {', '.join(asked.partitions)} have no GPUs: {role} would compute on the CPU",
                "a partition with GPUs; or say that it is meant, by gpus_per_node = 0 there or device: cpu",
            )


def _idle_gpus(subject: Subject) -> Iterator[Finding]:
    """GPUs that nobody uses; roles named together likewise."""
    used, on_cpus = _gpus_used(subject), subject.experiment.device == "cpu"
    roles: dict[tuple[str, int, int], list[str]] = {}
    for role, asked in subject.roles.items():
        if used.get(role) and asked.gpus_per_node > used[role]:
            key = key_of(role, "gpus_per_node", subject.experiment)
            roles.setdefault((key, asked.gpus_per_node, used[role]), []).append(role)
    for (key, num_asked, num_used), names in roles.items():
        yield Finding.warning(
            "PH317",
            key,
            f"{' and '.join(names)}: {num_asked} GPUs a node are asked for and "
            + ("none is used, for device = cpu" if on_cpus else f"{num_used} are used"),
            "gpus_per_node = 0" if on_cpus else f"gpus_per_node = {num_used}, or more ranks or engines a node",
        )


def _gpus_used(subject: Subject) -> dict[str, int]:
    """Role -> most GPUs in use on one node of its component."""
    busy: dict[int, dict[int, set[int]]] = {}
    groups = subject.placement.groups if subject.placement else ()
    for group in groups:
        nodes = busy.setdefault(group.component, {})
        for node in range(group.first_node, group.first_node + group.num_nodes):
            nodes.setdefault(node, set()).update(group.gpus or ())
    return {group.role: max(map(len, busy[group.component].values())) for group in groups}


def _speaks_of_gpus(subject: Subject, role: SlurmRole) -> bool:
    """Return whether anything says how many GPUs a role's nodes have."""
    return bool(subject.facts_of(role)) or _states_gpus(subject, role)


def _states_gpus(subject: Subject, role: SlurmRole) -> bool:
    slurm = subject.experiment.slurm
    levels = (getattr(slurm, role), slurm, subject.site.options)
    return any(level.gpus_per_node is not None or level.gres is not None for level in levels)


@rule(*EVERY, slurm=True)
def handed_on(subject: Subject) -> Iterator[Finding]:
    """Slurm gives memory and time of one het component to the next that states none."""
    placement = subject.placement
    if placement is None or not placement.abilities.hands_options_on:
        return
    for before, after in zip(placement.components, placement.components[1:], strict=False):
        for name in ("mem", "time"):
            if name in before.options and name not in after.options:
                yield Finding.warning(
                    "PH319",
                    f"slurm.{after.name}.{name}",
                    f"{after.name} states no {name}: Slurm hands on {before.name}'s, {before.options[name]}",
                    f"state slurm.{after.name}.{name}",
                )
        for name in JOB_WIDE:
            if after.options.get(name) not in (None, placement.components[0].options.get(name)):
                yield Finding.warning(
                    "PH319",
                    f"slurm.{after.name}.{name.replace('-', '_')}",
                    f"{name} is the whole job's: only {placement.components[0].name}'s counts",
                    f"state slurm.{name.replace('-', '_')}",
                )


@rule(*EVERY, slurm=True)
def values(subject: Subject) -> Iterator[Finding]:
    """Values with a syntax of their own."""
    for role, asked in subject.roles.items():
        options, experiment = asked.options, subject.experiment
        dependency = str(options.get("dependency", ""))
        separator = "?" if "?" in dependency else ","
        if dependency and not all(_DEPENDENCY.fullmatch(part.strip()) for part in dependency.split(separator)):
            yield Finding.error(
                "PH314",
                key_of(role, "dependency", experiment),
                f"{dependency!r} is no dependency",
                "for instance afterok:123, afterany:123:124 or singleton, several with commas (all) or ? (any)",
            )
        switches = options.get("switches")
        if switches is not None and not _SWITCHES.fullmatch(str(switches)):
            yield Finding.error(
                "PH321",
                key_of(role, "switches", experiment),
                f"{switches!r} is no count of switches",
                "for instance 1 or 1@10:00",
            )
        wrong = [name for name in split_names(str(options.get("mail-type", ""))) if name.upper() not in _MAIL_TYPES]
        if wrong:
            yield Finding.error(
                "PH321",
                key_of(role, "mail_type", experiment),
                f"{wrong[0]!r} is no mail type",
                f"some of {', '.join(_MAIL_TYPES[:6])}",
            )


@rule(*EVERY, slurm=True)
def paths(subject: Subject) -> Iterator[Finding]:
    """Check that the run's directories are the same on all nodes, and on this one."""
    experiment, site = subject.experiment, subject.site
    local = [*_NODE_LOCAL, *([fixed_part(site.node_local)] if site.node_local else [])]
    many = subject.num_nodes > 1
    for key, folder in homes(experiment).items():
        home = next((root for root in local if root and folder.is_relative_to(root)), None)
        if home is None or (site.scratch is not None and folder.is_relative_to(site.scratch)):
            continue
        yield Finding(
            "PH313",
            "error" if many else "warning",
            key,
            f"{folder} is below {home}, which each node has for itself"
            + (f": the {subject.num_nodes} nodes of the job do not see one another's files" if many else ""),
            "a directory of the shared file system" + (f", for instance {site.scratch}" if site.scratch else ""),
        )


@rule(*EVERY, slurm=True, pods=True)
def networks(subject: Subject) -> Iterator[Finding]:
    """Addresses that only one node can reach."""
    service = subject.experiment.trainer.tinker
    if service is not None and service.host in _LOOPBACK:
        yield Finding.warning(
            "PH312",
            "trainer.tinker.host",
            f"{service.host} is reached on the service's own node alone",
            "leave it out: the service then listens where the login node reaches it",
        )
    for key, client in subject.attached.items():
        section = "a `teacher_inference`" if key == "orchestrator.teacher" else "an `inference`"
        for url in client.urls:
            if any(f"//{host}" in url.replace("[", "").replace("]", "") for host in _LOOPBACK):
                player = subject.experiment.orchestrating_role
                yield Finding.warning(
                    "PH312",
                    f"{key}.base_url",
                    f"{url} is an address of the node on which the {player} will run, and the job starts no server",
                    f"the server's own address, or {section} section",
                )
    for group in subject.engines:
        host = group.servers.server.host
        if subject.num_nodes > 1 and host in _LOOPBACK and group.role == "inference":
            yield Finding.info(
                "PH312",
                "inference.server.host",
                f"{host} is of one node alone; in a job of several the servers listen on all addresses, or on those of "
                "network.serving",
                "leave it out",
            )
