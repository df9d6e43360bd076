"""`scontrol requeue` and what must follow it. Imports nothing heavy: agents need it as well (`orphan`)."""

import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loguru import logger

from prime_hpc.slurm.client import ShownJob, SlurmError, field, run_slurm, show_job
from prime_hpc.slurm.hostlist import compress_hosts, expand_hosts

SCONTROL_TIMEOUT_S = 30.0
UPDATE_TRIES = 6
KEPT_S = 8.0
"""After so long a requeue is on the controller's disk: within 5 s it writes down whatever it has taken."""
KEPT_LOOK_S = 2.0
KEPT_TRIES = 4
PATIENCE_S = 1800.0
"""So long a controller may be away before the job ends without being requeued."""
_BEGUN = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED")
_NOT_UP = ("down", "drain", "drng", "maint", "fail", "inval", "unk", "futr")
"""Beginnings of the short states of nodes that take no more jobs."""


class RequeueDisabled(SlurmError):
    """Slurm puts this job back at nobody's word: `--no-requeue`, by its user, a site's submit plugin, or an admin."""


def requeue(job_id: str, num_nodes: int, restarts: int) -> list[ShownJob] | None:
    """Put the job back into the queue; the caller, a process of it and its main thread, dies of that soon.

    Where Slurm has done so itself (a preemption, or an earlier call whose answer was lost) it is not asked again: that
    would end the attempt that follows.

    Args:
        job_id: its leader.
        num_nodes: that it needs; a homogeneous job that lost a node (--no-kill) would come back smaller. 0: leave it.
        restarts: SLURM_RESTART_COUNT of the caller's attempt.

    Returns:
        its components as they were; None: the job's next attempt has begun.

    Raises:
        RequeueDisabled: Slurm requeues no such job.
        SlurmError: it refuses otherwise, or cannot be asked, or somebody has cancelled the job.
    """
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the requeue's own, and Slurm's warning of the time limit
        signal.signal(number, signal.SIG_IGN)
    command, job = ["scontrol", "requeue", job_id], show_job(job_id, SCONTROL_TIMEOUT_S)
    if job[0].state == "CANCELLED":  # Slurm would do it
        raise SlurmError(command, 1, "it was cancelled: it is left so")
    if not _is_again(job[0], restarts):
        try:
            run_slurm(command, timeout_s=SCONTROL_TIMEOUT_S)
        except SlurmError as error:
            if "presently disabled" in error.stderr and not _is_again(job[0], restarts):
                raise RequeueDisabled(command, error.code, error.stderr) from error
            if error.is_unreachable or not _is_again(show_job(job_id, SCONTROL_TIMEOUT_S)[0], restarts):
                raise  # else it was put back between the two questions
        logger.info(f"job {job_id} is requeued")
    elif job[0].state in _BEGUN:
        logger.info(f"job {job_id} was requeued meanwhile, and runs again")
        return None
    else:
        logger.info(f"job {job_id} is in the queue again already")
    if num_nodes > job[0].num_nodes > 0:
        update(job_id, f"NumNodes={num_nodes}")
    return job


def requeue_for_good(
    job_id: str,
    num_nodes: int,
    restarts: int,
    exclude: Sequence[str] = (),
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """`requeue` and `leave_out`, and the same again where the controller dies before it has kept that: for its next
    one the job would have failed, and the run be lost.

    The job waits for Slurm's credential meanwhile (`cred_expire`, 120 s by default), and Slurm lets this process stay
    for KillWait (30 s by default). Arguments and errors: as of `requeue` and `leave_out`.
    """
    for _ in range(KEPT_TRIES):
        job = requeue(job_id, num_nodes, restarts)
        if job is None:
            return
        leave_out(job, job_id, exclude, num_nodes)
        if _is_again(job[0], restarts) or _is_kept(job_id, restarts, clock, sleep):
            return
        logger.warning(f"job {job_id}: Slurm's controller has forgotten the requeue, and is asked again")


def _is_kept(job_id: str, restarts: int, clock: Callable[[], float], sleep: Callable[[float], None]) -> bool:
    """Wait until a requeue is sure to outlive its controller, or nobody can say; False: it did not."""
    kept_at, end = clock() + KEPT_S, clock() + PATIENCE_S
    while clock() < end:
        sleep(KEPT_LOOK_S)
        try:
            if not _is_again(show_job(job_id, SCONTROL_TIMEOUT_S)[0], restarts):
                return False
        except SlurmError as error:
            if not error.is_unreachable:
                return True
            logger.debug(f"whether the requeue of job {job_id} is kept is unknown: {error}")
        else:
            if clock() >= kept_at:
                return True
    return True


def _is_again(job: ShownJob, restarts: int) -> bool:
    return job.restarts > restarts or job.state == "PENDING"


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


def leave_out(job: Sequence[ShownJob], job_id: str, exclude: Sequence[str], num_nodes: int) -> None:
    """Have a job that waits not get these nodes, unless it asked for them or too few others are up: it must not wait
    for ever for want of one.

    Args:
        job: what `requeue` returned; of another than was requeued nothing.
        num_nodes: that a homogeneous job needs; 0: as many as each component states.
    """
    if not exclude:
        return
    try:  # a running job names one partition, where it may have asked for several
        parts = show_job(job_id, SCONTROL_TIMEOUT_S)
        tables = {name: _nodes_of(name) for name in {part.partition for part in parts}}
        reserved = {name: _reserved_nodes(name) for name in {part.reservation for part in parts}}
    except SlurmError as error:
        logger.warning(f"no node is excluded, the partition's nodes are unknown: {error}")
        return
    before = {part.job_id: part for part in job}
    for part in parts:
        nodes, was = tables[part.partition], before.get(part.job_id, part)
        # a job that must run on a node and must not would wait for ever: it gets its node again
        new = [node for node in exclude if node in nodes and node not in expand_hosts(was.required)]
        left_out = list(dict.fromkeys([*expand_hosts(was.excluded), *new]))
        own = reserved[part.reservation]  # in a reservation it gets no other nodes, outside of one none of those
        usable = {name: node for name, node in nodes.items() if (name in own if own else not node.is_reserved)}
        good = [
            name for name, node in usable.items() if name not in left_out and node.is_up and node.fits(part.features)
        ]
        wanted = sum(max(1, num_nodes, other.num_nodes) for other in parts if other.partition == part.partition)
        if new and len(good) < wanted:
            words = f"{', '.join(new)} cannot be excluded from {part.partition}"
            logger.warning(f"{words}: only {len(good)} other nodes are up that job {part.job_id} could have")
        elif new:
            update(part.job_id, f"ExcNodeList={compress_hosts(left_out)}")


def silent_nodes(hosts: str) -> list[str]:
    """Those of a host list that Slurm holds for down, or that do not answer it. None where it cannot be asked.

    A node that comes back may end, as a task of the attempt before, what the next attempt starts on it in that moment.
    """
    try:
        table = run_slurm(["sinfo", "-h", "-N", "-o", "%N %t", "-n", hosts], SCONTROL_TIMEOUT_S)
    except SlurmError as error:
        logger.warning(f"which of {hosts} are silent is unknown: {error}")
        return []
    return list(
        dict.fromkeys(name for name, state in _rows(table, 2) if state.startswith("down") or state.endswith("*"))
    )


@dataclass(frozen=True)
class _Node:
    """A node of a partition."""

    state: str
    """In short, `drng*`."""
    features: frozenset[str]
    is_reserved: bool
    """It is in a reservation that has begun, whether jobs run on it or not."""

    @property
    def is_up(self) -> bool:
        """True if it takes jobs, now or when those on it have ended."""
        return not self.state.startswith(_NOT_UP) and not self.state.endswith(("*", "$"))

    def fits(self, asked: str) -> bool:
        """Return whether it has the features `a&b|c`; an expression with counts or brackets fits no node."""
        if not asked:
            return True
        return any(self.features.issuperset(re.split("[&,]", words)) for words in asked.split("|"))


def _nodes_of(partition: str) -> dict[str, _Node]:
    """Return the nodes of partitions by name. Raises SlurmError where Slurm does not say."""
    layout = ",".join(f"{name}:0 " for name in ("NodeHost", "StateCompact", "StateComplete", "Features"))
    table = run_slurm(["sinfo", "-h", "-N", "-O", layout, "-p", partition], SCONTROL_TIMEOUT_S)
    return {
        name: _Node(state, frozenset(features.split(",")), "reserved" in flags.lower().split("+"))
        for name, state, flags, features in _rows(table, 4)
    }


def _reserved_nodes(reservations: str) -> list[str]:
    """Return the nodes of these reservations; none where they hold none. Raises SlurmError: Slurm does not say."""
    nodes: list[str] = []
    for name in filter(None, reservations.split(",")):
        shown = run_slurm(["scontrol", "show", "reservation", "--oneliner", name], SCONTROL_TIMEOUT_S)
        nodes += expand_hosts(field(shown, "Nodes"))
    return nodes


def _rows(table: str, num_fields: int) -> list[list[str]]:
    """Split sinfo's answer into words, without what a site's wrapper says around it."""
    rows = [line.split() for line in table.splitlines()]
    return [row for row in rows if len(row) == num_fields]
