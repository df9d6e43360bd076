"""How many jobs a user may have in Slurm's queue, and how many are in it: from the site profile, `sacctmgr`, `squeue`.

Slurm counts each task of an array and each component of a heterogeneous job, whether it waits or runs. Limits of whole
accounts or QOS (GrpSubmitJobs), which others use up too, are not read: a refusal tells of them.
"""

import os
import pwd
import re
from collections.abc import Sequence
from dataclasses import dataclass

from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import cluster_name
from prime_hpc.slurm.client import ASK_TIMEOUT_S, SlurmError, is_queue_full, run_slurm, squeue_rows
from prime_hpc.slurm.jobs import ENDED

MAX_ARRAY = 1000
"""Tasks of an array where Slurm's MaxArraySize is not known (its default is 1001)."""
_BY_NAME = r"(?:assoc|qos)(?:max|grp)\w+"
_IN_GENERAL = r"job submit limit"
"""Words of every refusal for a policy; alone where a Slurm names no limit."""


@dataclass(frozen=True)
class SubmitLimit:
    """One limit on the jobs that are in the queue at once."""

    most: int
    source: str
    """Its origin, for people."""
    account: str | None = None
    """It counts jobs of this account alone; None: of all."""
    qos: str | None = None
    """It counts jobs of this QOS alone; None: of all."""


@dataclass(frozen=True)
class QueuedPart:
    """A job, an array's task or a component that waits or runs."""

    account: str
    qos: str


def submit_limits(site: SiteConfig, account: str | None, qos: str | None) -> tuple[list[SubmitLimit], str]:
    """Find what limits the jobs that this user submits.

    Args:
        site: its `max_submit_jobs` counts as well; without accounting (`sacct: false`) nobody else is asked.
        account: that the jobs name; None: the user's default.
        qos: that they name; None: the account's default.

    Returns:
        the limits, and why some could not be read; empty where all could.
    """
    found: list[SubmitLimit] = []
    if site.max_submit_jobs is not None:
        found.append(SubmitLimit(site.max_submit_jobs, f"max_submit_jobs of site profile {site.name}"))
    if not site.sacct:
        return found, ""
    try:
        return [*found, *_of_accounting(account, qos)], ""
    except SlurmError as error:
        return found, f"limits of accounts and QOS cannot be read: {error}"


def _of_accounting(account: str | None, qos: str | None) -> list[SubmitLimit]:
    user = _user()
    rows = _ask(["show", "assoc", f"user={user}"], ("Cluster", "Account", "MaxSubmitJobs", "DefaultQOS"))
    here = cluster_name()
    rows = [row for row in rows if here is None or row[0] in ("", here)]
    if account is None and len({row[1] for row in rows}) > 1:
        named = _ask(["show", "user", user], ("DefaultAccount",))
        account = named[0][0] if named else None
    found: list[SubmitLimit] = []
    for _, theirs, most, default_qos in rows:
        if account is not None and theirs != account:
            continue
        qos = qos or default_qos.partition(",")[0] or None
        if most.isdigit():
            found.append(SubmitLimit(int(most), f"MaxSubmitJobs of user {user} in account {theirs}", account=theirs))
    for name, most in _ask(["show", "qos"], ("Name", "MaxSubmitJobsPU")):
        if name == (qos or "normal") and most.isdigit():
            found.append(SubmitLimit(int(most), f"MaxSubmitJobsPU of QOS {name}", qos=name))
    return found


def _ask(question: Sequence[str], fields: Sequence[str]) -> list[list[str]]:
    """Rows of sacctmgr, each as long as `fields`. Raises SlurmError."""
    text = run_slurm(["sacctmgr", "-nP", *question, f"format={','.join(fields)}"], ASK_TIMEOUT_S)
    rows = [line.split("|") for line in text.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def queued_parts() -> list[QueuedPart]:
    """List what Slurm counts of this user's jobs. Raises SlurmError."""
    rows = squeue_rows(["-u", str(os.getuid())], ("State", "Account", "QOS"), ASK_TIMEOUT_S)
    return [QueuedPart(row["Account"], row["QOS"]) for row in rows if row["State"] not in ENDED]


def num_free(limits: Sequence[SubmitLimit], parts: Sequence[QueuedPart]) -> tuple[int | None, SubmitLimit | None]:
    """Return how many more may be submitted, and the limit that says so; None: nothing is known to limit them."""
    room: int | None = None
    closest: SubmitLimit | None = None
    for limit in limits:
        used = sum(limit.account in (None, p.account) and limit.qos in (None, p.qos) for p in parts)
        if room is None or limit.most - used < room:
            room, closest = limit.most - used, limit
    return (None if room is None else max(0, room)), closest


def is_over_limit(words: str) -> bool:
    """Return whether a refusal of sbatch's is, or may be, for too many jobs, which waiting mends."""
    named = re.findall(_BY_NAME, words, re.IGNORECASE)
    if named:
        return any("submitjob" in name.lower() for name in named)
    return is_queue_full(words) or re.search(_IN_GENERAL, words, re.IGNORECASE) is not None


def max_array_size(site: SiteConfig) -> int:
    """Tasks that an array may have here, ids from 0: the site profile's word, Slurm's, else `MAX_ARRAY`."""
    if site.max_array_size is not None:
        return site.max_array_size
    try:
        text = run_slurm(["scontrol", "show", "config"], ASK_TIMEOUT_S)
    except SlurmError:
        return MAX_ARRAY
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", text, re.MULTILINE)
    size = int(match[1]) if match and int(match[1]) > 1 else MAX_ARRAY
    tasks = re.search(r"^SchedulerParameters\s*=.*\bmax_array_tasks=(\d+)", text, re.MULTILINE)
    return min(size, int(tasks[1])) if tasks and int(tasks[1]) > 0 else size
