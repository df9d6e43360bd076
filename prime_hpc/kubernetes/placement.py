"""Pods of a run: which there are, by the same placement that a Slurm job gets, and how the supervisor learns of them.

Supervisor and orchestrator share a pod; the trainer's nodes, each group of engines, or (of a run with one kind of
nodes) all nodes, are the pods of an Indexed Job: `NAME-trainer-0.NAME`, `NAME-trainer-1.NAME`, ...
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.experiment import Experiment
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.sections.supervisor import KubernetesConfig
from prime_hpc.kubernetes.job_id import job_of
from prime_hpc.runtime.role_context import NODE
from prime_hpc.slurm.allocation import Allocation, read_allocation
from prime_hpc.slurm.options import ENV_NODES, num_env_nodes
from prime_hpc.slurm.placement import place_slurm

PODS = "PRIMEHPC_PODS"
"""Environment of the supervisor's pod: name, hosts of each component, notice before a pod's end, as JSON."""
SUPERVISOR = "supervisor"
SITE = SiteConfig(name="kubernetes", srun_args=[])
MOST_LETTERS = 40
"""Of a run's name: with a component's and an index it must be a host name of at most 63."""


@dataclass(frozen=True)
class Component:
    """Pods of one kind."""

    name: str
    """`trainer`, `inference`, `teacher`, `judge`, `all`; `supervisor` for the orchestrator's, which is the supervisor's
    pod."""
    num_pods: int
    gpus: int
    """Of each pod."""


def section_of(experiment: Experiment) -> KubernetesConfig:
    """Return the section. Raises ConfigError: the experiment has none."""
    if experiment.kubernetes is None or not experiment.kubernetes.image:
        raise ConfigError("which image holds prime-hpc? State kubernetes.image", "kubernetes.image")
    return experiment.kubernetes


def for_pods(experiment: Experiment) -> Experiment:
    """Return the experiment as its pods run it: the roles on nodes of their own, the orchestrator beside the
    supervisor."""
    slurm = experiment.slurm
    own: dict[str, object] = {"site": None}
    if experiment.samples and experiment.trains:
        own |= {"layout": "het", "orchestrator": slurm.orchestrator or type(slurm.trainer)(), "spare_nodes": 0}
    return experiment.model_copy(update={"slurm": slurm.model_copy(update=own)})


def components_of(experiment: Experiment) -> list[Component]:
    """Return the kinds of pods, in the order of the placement's components. `experiment`: as `for_pods` returns it.
    Raises ConfigError: the roles do not fit nodes of `slurm.gpus_per_node` GPUs."""
    if num_env_nodes(experiment):
        raise ConfigError("hosts of environments in pods are your own: env_servers.addresses", ENV_NODES)
    placement = place_slurm(experiment, SITE)
    found = []
    for component in placement.components:
        groups = [group for group in placement.groups if group.component == component.index]
        gpus = max((max(group.gpus) + 1 for group in groups if group.gpus and group.device == "cuda"), default=0)
        is_supervisors = component.name == "orchestrator"
        found.append(Component(SUPERVISOR if is_supervisors else component.name, component.num_nodes, gpus))
    return found


def object_name(experiment: Experiment) -> str:
    """Return the run's name as Kubernetes takes it (RFC 1123: small letters, digits, hyphens).
    Raises ConfigError: nothing is left of it, or it is too long."""
    name = re.sub(r"[^a-z0-9]+", "-", experiment.name.lower()).strip("-")
    if not name or not name[0].isalpha() or len(name) > MOST_LETTERS:
        message = f"{experiment.name!r} makes no name of Kubernetes objects: "
        raise ConfigError(f"{message}a letter first, at most {MOST_LETTERS} signs", "name")
    return name


def hosts_of(name: str, component: Component) -> list[str]:
    """Return the names under which the pods of a component reach each other, in the run's headless service."""
    if component.name == SUPERVISOR:
        return [f"{name}-{SUPERVISOR}.{name}"]
    return [f"{name}-{component.name}-{index}.{name}" for index in range(component.num_pods)]


def describe_pods(experiment: Experiment) -> str:
    """Return the value of `PODS` of an experiment as `for_pods` returns it. Raises ConfigError."""
    name = object_name(experiment)
    hosts = [hosts_of(name, component) for component in components_of(experiment)]
    return json.dumps({"name": name, "hosts": hosts, "notice_s": section_of(experiment).grace_s})


def read_nodes(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return the nodes that this process's roles may use: the run's pods, or those of its Slurm job; None outside of
    either. Raises ConfigError: the variables contradict each other."""
    if PODS not in environ:
        return read_allocation(environ)
    said = json.loads(environ[PODS])
    return Allocation(
        job_id=job_of(said["name"]),
        hosts=tuple(tuple(group) for group in said["hosts"]),
        batch_host=environ.get(NODE) or f"{said['name']}-{SUPERVISOR}.{said['name']}",
        restarts=0,
        by_slurm=False,
        notice_s=float(said["notice_s"]),
    )
