"""The allocation that Slurm gave to this job: its id, its nodes by component, when it ends. Read once by the
supervisor.

Variables as Slurm sets them in the batch step (sbatch(1), heterogeneous_jobs): a het job states each component's nodes
under `SLURM_JOB_NODELIST_HET_GROUP_<i>`, a homogeneous one its only list under `SLURM_JOB_NODELIST`.
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass

from loguru import logger

from prime_hpc.config.errors import ConfigError
from prime_hpc.slurm.client import SlurmError, first_end, show_job
from prime_hpc.slurm.hostlist import expand_hosts

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Allocation:
    """The nodes of a running job."""

    job_id: str
    """The leader's, for a het job; `<array>_<task>` for an array's task."""
    hosts: tuple[tuple[str, ...], ...]
    """Node names of each component, in Slurm's order."""
    batch_host: str
    restarts: int
    """How often Slurm has started this job before."""
    component_ids: tuple[str, ...] = ()
    """Job id of each component of a het job, under which Slurm knows its steps."""
    ends_at: float | None = None
    """Epoch seconds of the time limit, of a het job the first of its components'; None: unknown or unlimited."""
    by_slurm: bool = True
    """False: its nodes are Kubernetes pods, and there is no Slurm to ask."""
    notice_s: float | None = None
    """Of pods: seconds from the notice that one goes to its end."""

    @property
    def is_het(self) -> bool:
        """True if srun must be told the component."""
        return len(self.hosts) > 1

    @property
    def all_hosts(self) -> list[str]:
        """Every node."""
        return [host for group in self.hosts for host in group]


def job_argument(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the id of this process's job as Slurm's commands are to be told it; None outside a job.

    The task of an array that is started last has the array's own id in SLURM_JOB_ID: to `scancel`, `scontrol requeue`
    and the like that means every task.
    """
    job_id = environ.get("SLURM_JOB_ID") or None
    if job_id is None:
        return None
    if "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    is_het = int(environ.get("SLURM_HET_SIZE", "1")) > 1
    return environ.get("SLURM_JOB_ID_HET_GROUP_0", job_id) if is_het else job_id


def forget_surrounding_job(environ: MutableMapping[str, str], *, is_of_array: bool) -> None:
    """Remove what an sbatch by hand inside another job has handed on to this one, a job's batch process.

    Slurm sets the variables of arrays, het jobs and later lives for those alone, and clears them for no other: this job
    would take the other's id, or nodes, for its own, and requeue or cancel that.
    """
    is_het = environ.get("SLURM_JOB_ID_HET_GROUP_0") == environ.get("SLURM_JOB_ID")
    for name in list(environ):
        of_het = name.startswith(("SLURM_HET_", "SLURM_PACK_")) or re.search("_(HET|PACK)_GROUP_", name)
        if (of_het and not is_het) or (name.startswith("SLURM_ARRAY_") and not is_of_array):
            del environ[name]
    if "SLURM_RESTART_COUNT" in environ and (job_id := job_argument(environ)):
        with suppress(SlurmError):
            # not above what is said here: Slurm may be about to start it once more
            known = min(int(environ["SLURM_RESTART_COUNT"]), show_job(job_id, END_TIMEOUT_S)[0].restarts)
            environ["SLURM_RESTART_COUNT"] = str(known)


def read_allocation(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """Return the allocation that this process is the batch step of; None outside a job.
    Raises ConfigError: the variables contradict each other (a shell inside another job)."""
    job_id = job_argument(environ)
    if not job_id or ("SLURM_JOB_NODELIST" not in environ and "SLURM_JOB_NODELIST_HET_GROUP_0" not in environ):
        return None
    size = int(environ.get("SLURM_HET_SIZE", "1"))
    if size > 1:
        lists = [environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}") for i in range(size)]
    else:
        lists = [environ.get("SLURM_JOB_NODELIST")]
    if None in lists:
        raise ConfigError(f"job {job_id}: Slurm names no nodes for component {lists.index(None)}")
    hosts = tuple(tuple(expand_hosts(text)) for text in lists if text is not None)
    return Allocation(
        job_id=job_id,
        hosts=hosts,
        batch_host=environ.get("SLURMD_NODENAME") or hosts[0][0],
        restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
        component_ids=tuple(environ.get(f"SLURM_JOB_ID_HET_GROUP_{i}", job_id) for i in range(size)),
        ends_at=_end_time(job_id, environ),
    )


def held_devices(environ: Mapping[str, str], allocation: Allocation) -> dict[str, float]:
    """Count the nodes, CPUs and GPUs that the job holds, as Slurm accounts for them; what it does not say is absent.

    Slurm tells the GPUs of the batch host alone: those of a homogeneous job are as many on every node. `since` is when
    the job began, epoch seconds; before 23.02 Slurm does not say.
    """
    if not allocation.by_slurm:
        return {}
    held: dict[str, float] = {"nodes": len(allocation.all_hosts)}
    names = [f"_HET_GROUP_{i}" for i in range(len(allocation.hosts))] if allocation.is_het else [""]
    counts = [_sum_of_counts(environ.get(f"SLURM_JOB_CPUS_PER_NODE{name}", "")) for name in names]
    if all(counts):
        held["cpus"] = sum(counts)
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    if gpus.isdigit() and not allocation.is_het:
        held["gpus"] = int(gpus) * len(allocation.all_hosts)
    if environ.get("SLURM_JOB_START_TIME", "").isdigit():
        held["since"] = float(environ["SLURM_JOB_START_TIME"])
    return held


def _sum_of_counts(text: str) -> int:
    """Return the sum of `4(x2),2`, Slurm's short form of 4,4,2; 0 for anything else."""
    total = 0
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            return 0
        total += int(match.group(1)) * int(match.group(2) or 1)
    return total


def _end_time(job_id: str, environ: Mapping[str, str]) -> float | None:
    """When the time limit strikes, from the environment (Slurm 23 and later; of a het job the leader's alone is there)
    or from the controller."""
    stated = environ.get("SLURM_JOB_END_TIME", "")
    if stated.isdigit() and int(environ.get("SLURM_HET_SIZE", "1")) == 1:
        return float(stated)
    try:
        return first_end(show_job(job_id, END_TIMEOUT_S))
    except SlurmError as error:
        logger.warning(f"the job's time limit is unknown: {error}")  # as yet: `TimeLimit` asks again
        return None
