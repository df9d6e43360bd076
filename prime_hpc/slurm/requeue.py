"""`scontrol requeue` and what must follow it. Imports nothing heavy: agents need it as well (`orphan`)."""

import signal
import time
from collections.abc import Sequence

from loguru import logger

from prime_hpc.slurm.client import SlurmError, run_slurm
from prime_hpc.slurm.hostlist import compress_hosts, expand_hosts
from prime_hpc.slurm.termination import field

SCONTROL_TIMEOUT_S = 30.0
UPDATE_TRIES = 6


def requeue(job_id: str, num_nodes: int) -> str:
    """Put the job back into the queue; the caller, a process of it and its main thread, dies of that soon.

    Args:
        job_id: its leader.
        num_nodes: that it needs; a homogeneous job that lost a node (--no-kill) would come back smaller. 0: leave it.

    Returns:
        what `scontrol show job --oneliner` said of it before.

    Raises:
        SlurmError: Slurm refuses, or cannot be asked, or somebody has cancelled the job.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the requeue's own, and Slurm's warning of the time limit
        signal.signal(number, signal.SIG_IGN)
    job = run_slurm(["scontrol", "show", "job", "--oneliner", job_id], timeout_s=SCONTROL_TIMEOUT_S)
    command = ["scontrol", "requeue", job_id]
    if field(job, "JobState") == "CANCELLED":  # Slurm would do it
        raise SlurmError(command, 1, "it was cancelled: it is left so")
    run_slurm(command, timeout_s=SCONTROL_TIMEOUT_S)
    logger.info(f"job {job_id} is requeued")
    if num_nodes > int(field(job, "NumNodes").partition("-")[0] or num_nodes):
        update(job_id, f"NumNodes={num_nodes}")
    return job


def update(job_id: str, change: str) -> None:
    """Change the requeued job; right after the requeue Slurm says for a second or two that it is not available."""
    for left in reversed(range(UPDATE_TRIES)):
        try:
            run_slurm(["scontrol", "update", f"JobId={job_id}", change], timeout_s=SCONTROL_TIMEOUT_S)
        except SlurmError as error:
            if not left:
                logger.warning(f"job {job_id} goes without {change}: {error}")
            time.sleep(1.0 if left else 0.0)
        else:
            logger.info(f"job {job_id}: {change}")
            return


def leave_out(job: str, job_id: str, exclude: Sequence[str], num_nodes: int) -> None:
    """Have the requeued job not get these nodes, unless it asked for them or too few others are up.

    Args:
        job: what `requeue` returned.
        job_id: its leader.
        exclude: nodes.
        num_nodes: that the job needs.
    """
    if not exclude or not _enough_without(job_id, exclude, num_nodes):
        return
    for component, own, required in _nodes_before(job, job_id):
        # a job that must run on a node and must not would wait for ever: it gets its node again
        new = [node for node in exclude if node not in required]
        if new:
            update(component, f"ExcNodeList={compress_hosts(list(dict.fromkeys([*own, *new])))}")


def silent_nodes(hosts: str) -> list[str]:
    """Those of a host list that Slurm holds for down, or that do not answer it. None where it cannot be asked.

    A node that comes back may end, as a task of the attempt before, what the next attempt starts on it in that moment.
    """
    try:
        table = run_slurm(["sinfo", "-h", "-N", "-o", "%N %t", "-n", hosts], SCONTROL_TIMEOUT_S)
    except SlurmError as error:
        logger.warning(f"which of {hosts} are silent is unknown: {error}")
        return []
    rows = [line.split() for line in table.splitlines() if line.strip()]
    return list(dict.fromkeys(name for name, state in rows if state.startswith("down") or state.endswith("*")))


def _nodes_before(job: str, job_id: str) -> list[tuple[str, list[str], list[str]]]:
    """Return the nodes that each component's user, or an admin, had excluded (an update replaces the whole list) or
    asked for.

    Args:
        job: of `scontrol show job --oneliner`, a line a component.
        job_id: of the job, or of a het job's leader.

    Returns:
        the id of the job, or of each component (`12+1`), its excluded nodes, and those that it must have.
    """
    found = []
    for line in job.splitlines():
        if not line.startswith("JobId="):
            continue
        offset = field(line, "HetJobOffset")
        own, required = (_hosts_of(field(line, name)) for name in ("ExcNodeList", "ReqNodeList"))
        found.append((f"{job_id}+{offset}" if offset else job_id, own, required))
    return found or [(job_id, [], [])]


def _hosts_of(text: str) -> list[str]:
    return [] if text in ("", "(null)") else expand_hosts(text)


def _enough_without(job_id: str, exclude: Sequence[str], num_nodes: int) -> bool:
    """Return whether the partition has enough other nodes that are up: a job must not wait for ever for want of one."""
    try:
        job = run_slurm(["scontrol", "show", "job", "--oneliner", job_id], timeout_s=SCONTROL_TIMEOUT_S)
        table = run_slurm(["sinfo", "-h", "-N", "-o", "%N %t", "-p", field(job, "Partition")], SCONTROL_TIMEOUT_S)
    except SlurmError as error:
        logger.warning(f"no node is excluded, the partition's nodes are unknown: {error}")
        return False
    rows = [line.split() for line in table.splitlines() if line.strip()]
    good = {name for name, state in rows if name not in exclude and not state.startswith(("down", "drain", "fail"))}
    if len(good) < max(1, num_nodes):
        logger.warning(f"{', '.join(exclude)} cannot be excluded: only {len(good)} other nodes are up")
        return False
    return True
