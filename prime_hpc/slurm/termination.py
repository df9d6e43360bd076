"""Causes of a job's end as Slurm knows them: which nodes are lost, and what a SIGTERM inside a job means.

`supervisor.attempt` asks while the job is being ended, the next attempt asks again. Every question has a short
deadline; where Slurm does not answer, the answer is that the reason is unknown, or of a job that runs on: ask again.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from prime_hpc.slurm.client import ShownJob, SlurmError, field, first_end, parse_shown, run_slurm, show_job
from prime_hpc.slurm.hostlist import compress_hosts
from prime_hpc.slurm.times import parse_time

END_TIMEOUT_S = 5.0
GRACE_TIMEOUT_S = 15.0
"""Of questions about a job that runs on: a controller that preempts many answers late, and there is time."""
LIMIT_SLACK_S = 15.0
"""Slurm ends a job up to so long after (and its clock may be so far before) the time limit."""
AT_LIMIT = "the time limit was reached before everything was saved"
_CANCELLED = re.compile(r"\*\*\* JOB \d+ ON \S+ CANCELLED AT [^\s*]+(.*?) \*\*\*")
_DUE_TO = re.compile(r" DUE to SIGNAL | DUE TO (PREEMPTION|TIME LIMIT|JOB REQUEUE|NODE FAILURE)(?:,|$)")
"""Additions of slurmstepd: `SIGNAL` is a plain scancel, which Slurm before 25.05 does not explain at all."""
_DOWN = frozenset(("DOWN", "NOT_RESPONDING", "FAIL"))
_SWITCHED_OFF = frozenset(("POWERING_DOWN", "POWERED_DOWN"))
"""To save power, once nobody computes on the node: of a job that still runs, it is lost."""
_SUFFIXES = "*~#!%$@^-+"
"""Marks that follow a state, see scontrol(1)."""


@dataclass(frozen=True)
class Verdict:
    """Why Slurm ends the job."""

    outcome: str
    """preempted, requeued, node_lost, or interrupted (cancelled)."""
    reason: str
    by_slurm: bool
    """Slurm starts the job again by itself."""
    nodes: tuple[str, ...] = ()
    """Lost ones."""


class JobLog:
    """The batch step's own output, into which slurmstepd writes why it ends the job before the signal comes."""

    def __init__(self, descriptor: int = 2) -> None:
        """Remember where this attempt begins: an appended log holds the words about earlier ones too."""
        self._path = Path(f"/proc/self/fd/{descriptor}")
        try:
            self._offset = self._path.stat().st_size if self._path.is_file() else -1
        except OSError:
            self._offset = -1

    def words(self) -> str | None:
        """PREEMPTION, TIME LIMIT, JOB REQUEUE, NODE FAILURE, or empty (cancelled); None where nothing is said."""
        if self._offset < 0:
            return None
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return None
        found = _CANCELLED.findall(text)
        return parse_words(found[-1]) if found else None


def parse_words(added: str) -> str | None:
    """Return the reason in what slurmstepd adds to `CANCELLED AT ...`; see `JobLog.words`. None: words of no known
    Slurm."""
    known = _DUE_TO.match(added)
    if known is None and added:
        logger.warning(
            f"Slurm's reason for the end is of no known version ({added.strip()!r}): its state and fields decide"
        )
        return None
    return (known and known[1]) or ""


def granted_until(job_id: str) -> float | None:
    """EndTime of the running job: a preemption with grace moves it. None where the job is ending.
    Raises SlurmError: nobody answers now."""
    return first_end(part for part in _of_running(job_id) if not _is_over(part))


def cancelled_component(job_id: str, restarts: int, began: float, hosts: Sequence[str]) -> str | None:
    """Return the component of a het job, such as `131+1`, that somebody has cancelled alone; None: none was.

    All that Slurm does by itself (a preemption, a requeue, a lost node) it does to all components.
    `began`: of this attempt, epoch seconds. Raises SlurmError: nobody answers now.
    """
    over = [part for part in _of_running(job_id) if _is_over(part) and part.restarts <= restarts]
    if not over or lost_hosts(hosts, began):
        return None
    return over[0].job_id


def _of_running(job_id: str) -> list[ShownJob]:
    """Return a job's components, the leader first; none where that does not run."""
    try:
        parts = show_job(job_id, GRACE_TIMEOUT_S)
    except SlurmError as error:
        if error.is_unreachable:
            raise
        logger.debug(f"the job's end is unknown: {error}")
        return []
    return parts if parts[0].state == "RUNNING" else []


def _is_over(component: ShownJob) -> bool:
    return component.state in ("COMPLETING", "CANCELLED")


def why_terminated(
    job_id: str, restarts: int, began: float, ends_at: float | None, hosts: Sequence[str], words: str | None
) -> Verdict:
    """Decide what a SIGTERM in the batch step means.

    Args:
        restarts: SLURM_RESTART_COUNT of this attempt.
        began: of this attempt, epoch seconds.
        words: of slurmstepd in the job's log (`JobLog.words`).
    """
    try:
        job = show_job(job_id, END_TIMEOUT_S)[0]
        preempts = _partition(job.partition) if words is None else ""
    except SlurmError as error:
        if words in (None, "NODE FAILURE"):
            return Verdict("requeued", f"ended by Slurm (SIGTERM), which does not say why: {error}", False)
        (job,), preempts = parse_shown(f"JobId={job_id}", job_id), ""
    logger.debug(f"SIGTERM; Slurm says: {job}")
    lost = lost_hosts(hosts, began) if words in (None, "NODE FAILURE") else []  # a question more takes time of the save
    return parse_termination(job, preempts, restarts, lost, past_limit=_past(ends_at), words=words)


def _partition(name: str) -> str:
    """Return what Slurm shows of a partition; empty where it shows none: the job's own fields decide then."""
    try:
        return run_slurm(["scontrol", "show", "partition", "--oneliner", name], timeout_s=END_TIMEOUT_S)
    except SlurmError as error:
        logger.debug(f"how {name} preempts is unknown: {error}")
        return ""


def _past(ends_at: float | None) -> bool:
    return ends_at is not None and time.time() > ends_at - LIMIT_SLACK_S


def parse_termination(
    job: ShownJob,
    partition: str,
    restarts: int,
    lost: Sequence[str] = (),
    *,
    past_limit: bool = False,
    words: str | None = None,
) -> Verdict:
    """Return the verdict from what Slurm prints at the moment of SIGTERM.

    A job that Slurm puts back into the queue (preemption, a lost node, `scontrol requeue`) is COMPLETING with one
    restart more than the attempt that is being ended knows of; any other end leaves the count. A preemption and
    `scontrol requeue` look alike there: only slurmstepd's words in the job's log tell them apart.

    Args:
        job: of a het job the leader.
        partition: `scontrol show partition --oneliner` of the job's partition.
        lost: nodes that Slurm calls down.
    """
    state, again = job.state, job.restarts > restarts
    mode = field(partition, "PreemptMode")
    if words == "":
        return Verdict("interrupted", "cancelled (scancel)", again)
    if lost and words in (None, "NODE FAILURE"):
        return Verdict("node_lost", f"node {', '.join(lost)} was lost", again, tuple(lost))
    if words == "PREEMPTION" or state == "PREEMPTED" or job.preempt_time not in ("", "None", "N/A"):
        return Verdict("preempted", "preempted by a job of higher priority", again)
    if again and job.reason.replace("_", " ").startswith("launch failed"):  # `launch failed requeued held`
        return Verdict(
            "requeued", "a launch on a node failed (its prolog, as a rule): put back and held by Slurm", True
        )
    if words == "JOB REQUEUE":
        return Verdict("requeued", "put back into the queue by scontrol requeue", True)
    if again and words is None and "REQUEUE" in mode:
        return Verdict("preempted", "preempted by a job of higher priority", again)
    if again:
        return Verdict("requeued", "put back into the queue (scontrol requeue, or a lost node)", True)
    if words == "TIME LIMIT" or past_limit or state == "TIMEOUT" or job.reason == "TimeLimit":
        return Verdict("requeued", AT_LIMIT, False)
    # `PreemptTime=None` denies it; a Slurm that prints no such field leaves it open
    if words is None and "CANCEL" in mode and state != "CANCELLED" and not job.preempt_time:
        return Verdict("preempted", "preempted, or cancelled, in a partition that cancels preempted jobs", False)
    return Verdict("interrupted", "cancelled (scancel)", False)


def lost_hosts(hosts: Sequence[str], since: float, *, silent_end: bool = False) -> list[str]:
    """Of these, the nodes that Slurm calls down or silent, or that were started again.

    Args:
        since: epoch seconds.
        silent_end: the attempt on them ended without a word: then a slurmd that was started again counts as well.
    """
    if not hosts:
        return []
    command = ["scontrol", "show", "node", "--oneliner", compress_hosts(sorted(set(hosts)))]
    try:
        text = run_slurm(command, timeout_s=END_TIMEOUT_S)
    except SlurmError as error:
        logger.debug(f"the state of {', '.join(hosts)} is unknown: {error}")
        return []
    return [field(line, "NodeName") for line in text.splitlines() if _is_lost(line, since, silent_end)]


def _is_lost(node: str, since: float, silent_end: bool) -> bool:
    state = field(node, "State").upper()
    words = {word.rstrip(_SUFFIXES) for word in state.split("+")}
    if "*" in state or words & _DOWN or (words & _SWITCHED_OFF and not silent_end):  # `*`: it does not answer
        return True
    started, booted = parse_time(field(node, "SlurmdStartTime")), parse_time(field(node, "BootTime"))
    if started is None or booted is None:  # the node never registered
        return False
    # a slurmd alone may be restarted under a running job: nothing is lost by that, unless the job says so
    return booted > since or (started > since and silent_end)
