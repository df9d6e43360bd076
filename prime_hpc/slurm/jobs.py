"""Jobs as Slurm knows them: their states, hosts, times and tokens.

Asks `squeue`, and `sacct` only where it answers: nothing here needs accounting.

    info = jobs(["123"]).get("123")          # None: Slurm does not remember it (any more)
    mine = find_by_token(token)              # the jobs that carry `prime-hpc:<token>` in their comment
"""

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from prime_hpc.slurm.client import (
    ASK_TIMEOUT_S,
    COMMENT_PREFIX,
    TIMEOUT_S,
    SlurmError,
    asked_cluster,
    run_slurm,
    sacct_rows,
    squeue_rows,
)
from prime_hpc.slurm.queue_facts.job_scripts import tokens_in_scripts
from prime_hpc.slurm.times import parse_duration, parse_time

_PENDING = ("EXPEDITING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ACTIVE = (
    *("RUNNING", "SUSPENDED", "STOPPED", "CONFIGURING", "COMPLETING", "STAGE_OUT", "SIGNALING", "RESIZING"),
    *_PENDING,
    "POWER_UP_NODE",
)
"""States of a job that has not ended, the one that speaks for a heterogeneous job first."""
ENDED = (
    *("NODE_FAIL", "OUT_OF_MEMORY", "FAILED", "BOOT_FAIL", "DEADLINE"),
    *("TIMEOUT", "PREEMPTED", "CANCELLED", "REVOKED", "COMPLETED"),
)
"""States of a job that has ended, worst first."""

JOB_ID = re.compile(r"\d+([_+]\d+)?")
"""Ids of Slurm's; those of other launchers' jobs (a run's pods) are none."""
_SINGLE_QUESTIONS = 4
"""Up to so many jobs that are not this user's (or forgotten) are asked for one by one."""
_VAGUE = ("Priority", "Resources", "Dependency")
"""Reasons that another component's outweighs."""
_NEVER = re.compile(
    "(PartitionConfig|BadConstraints|(Account|QOS)NotAllowed|Invalid(Account|QOS)"
    r"|(Assoc|QOS)Max\w+Per(Job|Node)(Limit)?|QOSMin\w+|MaxMemPerLimit|DependencyNeverSatisfied"
    "|.* not permitted to use this partition.*)"
)
"""Reasons of waiting jobs that time does not mend; accounts and QOS that a partition refuses come as a sentence. Of a
partition's limits `waiting.limit_of` tells: nodes that are down give the same reason."""
_FIELDS = (
    *("JobArrayID", "JobID", "HetJobID", "HetJobOffset", "State", "Reason", "NumNodes", "NodeList"),
    *("StartTime", "EndTime", "TimeLeft", "RestartCnt", "Name", "Comment"),
)


@dataclass(frozen=True)
class JobInfo:
    """One job as the controller sees it: a plain one, an array's task, or a het job folded into its leader."""

    job_id: str
    """`12`, of an array's task `12_3`, of a heterogeneous job its leader's, of one component `12+1`."""
    state: str
    """Slurm's long name, e.g. `PENDING`."""
    reason: str = ""
    """Why it waits, or why it failed; empty where there is none."""
    nodes: str = ""
    """Slurm's host list (see `expand_hosts`), of all components; empty before the start."""
    num_nodes: int = 0
    start: float | None = None
    """Epoch seconds; of a waiting job Slurm's estimate, where it has one."""
    end: float | None = None
    """Epoch seconds at which it ended or will have to end."""
    time_left_s: float | None = None
    restarts: int = 0
    comment: str = ""
    name: str = ""
    components: tuple["JobInfo", ...] = ()
    """Of a heterogeneous job, by offset."""
    raw_id: str = ""
    """SLURM_JOB_ID inside: of an array's task (and of a component) another number than in `job_id`."""

    @property
    def is_active(self) -> bool:
        """True if it waits, runs or is about to end."""
        return self.state not in ENDED

    @property
    def is_pending(self) -> bool:
        """True if it holds no node yet."""
        return self.state in _PENDING

    @property
    def is_waiting(self) -> bool:
        """True if its script has not begun: it holds no node, or nodes that are still being started."""
        return self.is_pending or self.state in ("CONFIGURING", "POWER_UP_NODE")

    @property
    def is_held(self) -> bool:
        """True if it waits to be let go: its user held it, or Slurm after a prolog failed (again and again)."""
        is_held = "held" in self.reason.lower() or self.reason == "JobHoldMaxRequeue" or self.state.endswith("_HOLD")
        return self.is_pending and is_held

    @property
    def cannot_start(self) -> bool:
        """True if it waits for what time alone does not bring: the job has to ask for something else."""
        return self.is_pending and _NEVER.fullmatch(self.reason) is not None

    @property
    def token(self) -> str | None:
        """Token of our submission, None for a job that is not ours."""
        return token_of(self.comment)


@dataclass(frozen=True)
class HistoryRow:
    """One run of a job (or of one component) in the accounting; a requeued job has several."""

    job_id: str
    state: str
    exit_code: str
    """`status:signal`."""
    start: float | None
    end: float | None
    nodes: str
    comment: str = ""


def token_of(comment: str) -> str | None:
    """Return the token in a job's comment."""
    match = re.match(rf"{COMMENT_PREFIX}(\S+)", comment)
    return match[1] if match else None


def jobs(
    ids: Iterable[str] | None = None, timeout_s: float = TIMEOUT_S, *, of_others: bool = False
) -> dict[str, JobInfo]:
    """Ask the controller about jobs: waiting, running, and ended in the last minutes.

    Args:
        ids: job ids (`12`; of an array `12` or `12_3`), others are passed over; None: all jobs of this user.
        of_others: all of this user's jobs are known not to be among them.

    Returns:
        by job id: a plain job's, a heterogeneous job's leader, each of an array's tasks as `ID_k` (asked for by the
        SLURM_JOB_ID that the task has inside, under that as well). Jobs that the controller does not remember are
        absent.

    Raises:
        SlurmError: Slurm cannot be asked.
    """
    wanted = None if ids is None else {str(i) for i in ids if JOB_ID.fullmatch(str(i))}
    if wanted is not None and not wanted:
        return {}

    found: dict[str, JobInfo] = {}
    for which in _questions(wanted, found, of_others):
        rows = squeue_rows(which, _FIELDS, timeout_s)
        found |= _with_tokens(fold(map(_parse, rows)), which, timeout_s) | found
    if wanted is None:
        return found
    by_raw_id = {info.raw_id: info for info in found.values() if info.raw_id in wanted and "_" in info.job_id}
    return by_raw_id | {key: info for key, info in found.items() if {key, key.split("_")[0], info.raw_id} & wanted}


def _questions(wanted: set[str] | None, found: dict[str, JobInfo], of_others: bool) -> Iterator[list[str]]:
    """Options of squeue that find these jobs without having the controller send its whole table.

    It picks out the jobs of one user or a single job; with several ids squeue gets all jobs and picks by itself. So
    this user's are asked for first, and by id only what is not among them (`found` is what the answers so far held).
    """
    own = ["-u", str(os.getuid())]
    if wanted is None:
        yield own
        return
    bases = sorted({re.split(r"[_+]", job)[0] for job in wanted}, key=int)
    if len(bases) > 1 and not of_others:
        yield own
        parts = [part for info in found.values() for part in (info, *info.components)]
        known = {word for part in parts for word in (re.split(r"[_+]", part.job_id)[0], part.raw_id)}
        bases = [base for base in bases if base not in known]
    if len(bases) > _SINGLE_QUESTIONS:
        yield ["-j", ",".join(bases)]
    else:
        yield from (["-j", base] for base in bases)


def job(job_id: str, timeout_s: float = TIMEOUT_S) -> JobInfo | None:
    """One job, None where the controller does not remember it. Raises SlurmError."""
    return jobs([job_id], timeout_s).get(job_id)


def find_by_token(token: str) -> list[JobInfo]:
    """Return this user's jobs whose comment carries the token, oldest first; of an array all its tasks.
    Raises SlurmError: Slurm cannot be asked."""
    mine = [info for info in jobs(None, ASK_TIMEOUT_S).values() if info.token == token]
    return sorted(mine, key=lambda info: tuple(int(part) for part in info.job_id.split("_")))


def find_in_history(token: str, since: float) -> list[HistoryRow]:
    """Return the same from the accounting, where there is one: jobs that the controller may have forgotten.
    `since`: epoch seconds after which it was submitted."""
    begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
    rows = _sacct(["-u", str(os.getuid()), "-S", begin, "-E", "now"], ASK_TIMEOUT_S)
    return [row for row in rows if token_of(row.comment) == token]


def history(job_id: str) -> list[HistoryRow]:
    """Every run of a job in the accounting, oldest first; empty where there is no accounting."""
    return _sacct(["-j", job_id], TIMEOUT_S) if JOB_ID.fullmatch(job_id) else []


def fold(rows: Iterable[JobInfo]) -> dict[str, JobInfo]:
    """Jobs by id, the components of each heterogeneous job (`12+0`, `12+1`) folded into one under its leader's id."""
    found: dict[str, JobInfo] = {}
    parts: dict[str, list[JobInfo]] = {}
    for row in rows:
        leader, plus, _ = row.job_id.partition("+")
        if plus:
            parts.setdefault(leader, []).append(row)
        else:
            found[row.job_id] = row
    for leader, components in parts.items():
        components.sort(key=lambda info: int(info.job_id.partition("+")[2]))
        state = fold_states([info.state for info in components])
        reasons = [info.reason for info in components if info.state == state and info.reason]
        limits = [info.time_left_s for info in components if info.time_left_s is not None]
        found[leader] = replace(
            components[0],
            job_id=leader,
            state=state,
            reason=next((reason for reason in reasons if reason not in _VAGUE), (reasons or [""])[0]),
            nodes=",".join(info.nodes for info in components if info.nodes),
            num_nodes=sum(info.num_nodes for info in components),
            time_left_s=min(limits, default=None),
            restarts=max(info.restarts for info in components),
            components=tuple(components),
        )
    return found


def fold_states(states: Sequence[str]) -> str:
    """Return the state of a job of several parts: it has not ended while one part has not; then the worst end
    counts."""
    return next((state for state in (*ACTIVE, *ENDED) if state in states), states[0])


def hides_others() -> bool:
    """Return whether the cluster that is asked shows the jobs of others to its staff alone (`PrivateData`)."""
    try:
        return "jobs" in _private_data(asked_cluster())
    except SlurmError:
        return False


@lru_cache
def _private_data(cluster: str | None) -> list[str]:
    """Raise SlurmError: it cannot be asked. `cluster`: `asked_cluster`."""
    stated = re.search(
        r"^PrivateData\s*=\s*(\S+)", run_slurm(["scontrol", "show", "config"], ASK_TIMEOUT_S), re.MULTILINE
    )
    return stated[1].split(",") if stated else []


def _parse(row: dict[str, str]) -> JobInfo:
    job_id = row["JobArrayID"].partition("+")[0]
    if row["HetJobID"].isdigit() and row["HetJobID"] != "0":
        job_id = f"{row['HetJobID']}+{row['HetJobOffset']}"
    state = row["State"].split()[0] if row["State"] else "UNKNOWN"
    end, left_s = parse_time(row["EndTime"]), parse_duration(row["TimeLeft"])
    if state == "RUNNING" and left_s is not None and end is not None:
        left_s = max(0.0, min(left_s, end - time.time()))  # a preemption's grace moves the end, and the end alone
    return JobInfo(
        job_id=job_id,
        state=state,
        reason=_said(row["Reason"]),
        nodes=_said(row["NodeList"]),
        num_nodes=_count(row["NumNodes"].partition("-")[0]),
        start=parse_time(row["StartTime"]),
        end=end,
        time_left_s=left_s,
        restarts=_count(row["RestartCnt"]),
        comment=_said(row["Comment"]),
        name=row["Name"],
        raw_id=row["JobID"],
    )


def _with_tokens(found: dict[str, JobInfo], which: list[str], timeout_s: float) -> dict[str, JobInfo]:
    """Return the same jobs, those whose comment a site has changed with their token put before it."""
    silent = [info.job_id for info in found.values() if not re.match(r"prime-hpc\b", info.comment)]
    result = dict(found)
    for job_id, token in tokens_in_scripts(silent, which, timeout_s).items():
        comment = f"{COMMENT_PREFIX}{token} {found[job_id].comment}".rstrip()
        result[job_id] = replace(found[job_id], comment=comment)
    return result


def _count(text: str) -> int:
    return int(text) if text.isdigit() else 0  # of a Slurm that words it otherwise: unknown, and no reason to fail


def _said(text: str) -> str:
    return "" if text in ("None", "(null)", "N/A", "n/a") else text


def _sacct(which: list[str], timeout_s: float) -> list[HistoryRow]:
    fields = ("JobID", "State", "ExitCode", "Start", "End", "NodeList", "Comment")
    return [
        HistoryRow(
            job_id=row["JobID"],
            state=(row["State"].split() or ["UNKNOWN"])[0],  # `CANCELLED by 1000`
            exit_code=row["ExitCode"],
            start=parse_time(row["Start"]),
            end=parse_time(row["End"]),
            nodes="" if row["NodeList"] == "None assigned" else row["NodeList"],
            comment=row["Comment"],
        )
        for row in sacct_rows(which, fields, timeout_s) or ()
        if row["JobID"]
    ]
