"""The command of `prime-hpc shell`: which node of which job a role's rank is on, and how one gets there.

What the run wrote of its placement is read, and Slurm is asked whether the node is still there; nothing is started.
"""

import re
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import ENGINE_ROLES, RUN_YAML
from prime_hpc.config.site import read_site
from prime_hpc.config.snapshot import read_experiment
from prime_hpc.kubernetes.job_id import objects_of
from prime_hpc.launch.monitor.run_facts import RunStatus
from prime_hpc.launch.monitor.who_hangs import Target
from prime_hpc.slurm.client import ASK_TIMEOUT_S, SlurmError, clean_environment, run_slurm
from prime_hpc.slurm.hostlist import expand_hosts
from prime_hpc.slurm.jobs import JobInfo, jobs
from prime_hpc.slurm.submission_record import cluster_of

_MODULE = "prime_hpc.supervisor.roles.shell_on_node"
_LOST = ("down", "fail", "error", "unknown", "power", "reboot")
"""Begin the states of nodes on which no step can be started."""
_NOT_NOW = {
    "away": "has no node, and waits for one",
    "waiting": "has not been started yet",
    "done": "is done",
    "dead": "has died",
}
"""State of a role that has no process, and what it says to people."""


class NotThereError(ConfigError):
    """Nothing is there now: the run is over, waits, or has lost a node. Exit code 3."""

    exit_code = 3


@dataclass(frozen=True)
class Way:
    """How one gets to a role: a command and its environment."""

    command: list[str]
    environment: dict[str, str]


def way_to(
    target: Target, role: str, rank: int | None, command: Sequence[str], *, terminal: bool, environ: Mapping[str, str]
) -> Way:
    """Return the command that opens a shell where a role runs, or runs a command there.

    Args:
        target: of `find_target`; its run is under way.
        role, rank: as of `parse_role`; rank None is 0.
        command: of the user; empty: a shell.

    Raises:
        ConfigError: the run has no such role or rank, or its directory is half-written.
        NotThereError: the role does not run now, or runs where one cannot get from here.
    """
    status = target.status
    if status is None:
        raise NotThereError(f"{target.path} cannot be read: its file system hangs; `prime-hpc why` says more")
    number = rank or 0
    there = [sys.executable, "-P", "-m", _MODULE, str(target.path), role, str(number)]
    there += ["--", *command] if command else []
    if (name := objects_of(status.job_id)) is not None:
        raise NotThereError(f"the run is in pods ({name}-...): `kubectl exec -it POD -- bash` opens a shell in one")
    label = _check(target.path, status, role, number)
    if status.job_id is None:
        if status.host not in (None, socket.gethostname()):
            raise NotThereError(f"the run is on {status.host}, and no job of Slurm: log in there and ask again")
        return Way(there, dict(environ))
    if (cluster := cluster_of(target.path)) is not None:
        raise NotThereError(f"the run is on cluster {cluster}: log in there and ask again")
    if target.job is None or not target.job.nodes:
        raise NotThereError(f"Slurm does not say where job {status.job_id} is: try again, or see `prime-hpc status`")
    host = _host_of(target.path, status, target.job, label, number)
    job, group = _job_with(target.job, host, f"{target.path.name}-{role}")
    _refuse_lost(host)
    options = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--export=ALL"]
    options += ["--cpu-bind=none"] if _binds_tasks() else []
    options += ["--chdir=/", "--job-name=shell", "--pty" if terminal else "--unbuffered"]
    options += [*read_site(target.path).srun_args, *read_experiment(target.path / RUN_YAML).slurm.srun_args]
    where = [f"--jobid={job}", *([] if group is None else [f"--het-group={group}"])]
    return Way(["srun", *where, *options, *there], clean_environment(environ))


def _check(path: Path, status: RunStatus, role: str, rank: int) -> str:
    """Return the label of a role that runs.

    Raises:
        ConfigError: there is none of that name.
        NotThereError: it does not run now.
    """
    label = f"{role}[{rank}]" if role in ENGINE_ROLES else role
    known = sorted((set(status.nodes) | set(status.roles)) - {"supervisor"})
    if role == "supervisor":
        return label
    if not known:
        raise NotThereError(f"the run is {status.state}: no role has been started yet")
    if label not in known:
        raise ConfigError(f"the run has no {label}; it has {', '.join(known)}", "--role")
    if status.is_between:
        raise NotThereError(f"{label} does not run now: the run is {status.state}, between two attempts")
    state = status.roles.get(label)
    if state in _NOT_NOW:
        raise NotThereError(f"{label} {_NOT_NOW[state]}: `prime-hpc status` says more")
    if role == "trainer" and rank >= (num_ranks := read_experiment(path / RUN_YAML).trainer.num_ranks):
        raise ConfigError(f"the trainer has no rank {rank}; it has ranks 0 to {num_ranks - 1}", "--rank")
    return label


def _host_of(path: Path, status: RunStatus, job: JobInfo, label: str, rank: int) -> str:
    """Return the node of a role's rank. Raises a NotThereError where it has none now."""
    if label == "supervisor":
        return expand_hosts((job.components or (job,))[0].nodes)[0]
    hosts = status.nodes.get(label)
    if not hosts:
        raise NotThereError(f"{label} has no node yet: `prime-hpc status` says more")
    if label != "trainer":
        return hosts[0]
    return hosts[rank * len(hosts) // read_experiment(path / RUN_YAML).trainer.num_ranks]


def _job_with(job: JobInfo, host: str, stand_in: str) -> tuple[str, int | None]:
    """Return the job that holds a node, and which component of a het job.

    A server that lost its node may be in a job of its own, whose name begins with `stand_in`.
    """
    for number, part in enumerate(job.components or (job,)):
        if host in expand_hosts(part.nodes):
            return job.raw_id or job.job_id, number if job.components else None
    try:
        others = jobs(None).values()
    except SlurmError:
        others = ()  # type: ignore[assignment]
    for other in others:
        if other.name.startswith(stand_in) and other.nodes and host in expand_hosts(other.nodes):
            return other.raw_id or other.job_id, None
    raise NotThereError(f"node {host} is no longer of job {job.job_id} ({job.nodes}): it was lost, or given back")


def _refuse_lost(host: str) -> None:
    """Raise a NotThereError where Slurm says that a node does not answer; srun would wait for it."""
    try:
        answer = run_slurm(["sinfo", "-h", "-N", "-n", host, "-o", "%N %T"], ASK_TIMEOUT_S)
    except SlurmError:
        return  # srun will say what it thinks of it
    lines = (line.split() for line in answer.splitlines())  # one a partition, and what a site's wrapper says
    state = next((words[1].lower() for words in lines if len(words) == 2 and words[0] == host), "")
    if state.endswith("*") or state.startswith(_LOST):
        raise NotThereError(f"node {host} is lost: Slurm says {state}")


def _binds_tasks() -> bool:
    """Return whether Slurm binds tasks to CPUs, which has to be undone; of a cluster that does not (TaskPlugin) srun
    would say so, as of a fault, to whoever mentions it."""
    try:
        config = run_slurm(["scontrol", "show", "config"], ASK_TIMEOUT_S)
    except SlurmError:
        return True
    return re.search(r"^TaskPlugin\s*=\s*(task/none|\(null\))?\s*$", config, re.MULTILINE) is None
