"""Why a job waits, in words that say what to change: for a limit, how much it allows, has in use, and is asked for.

Slurm names the kind of a limit (`QOSMaxCpuPerJobLimit`) and neither its holder nor its size: the job's QOS or that of
its partition, its user or an account above. Those are read from the controller (`scontrol show assoc_mgr`), which
needs no accounting daemon; where it does not tell, the kind alone is said.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from prime_hpc.slurm.client import ASK_TIMEOUT_S, ShownJob, SlurmError, field, run_slurm, show_job
from prime_hpc.slurm.jobs import JobInfo
from prime_hpc.slurm.times import parse_duration

_CANNOT = "Slurm cannot start it as it is: `prime-hpc cancel`, ask otherwise"
_HINTS = (
    (r"JobHeldAdmin", "held by the site: its staff alone can let it go"),
    (
        r".*reserved[ _]for[ _]maintenance.*",
        "a maintenance begins before its time limit would be over: a shorter slurm.time may start before it "
        "(`scontrol show reservation` says when)",
    ),
    (r"ReqNodeNotAvail.*UnavailableNodes.*", "these are down or drained; it waits for them"),
    (r"Partition(Down|Inactive)", "the site has closed the partition: it waits until that is open, or name another"),
    (
        r"Partition(Node|Time)Limit",
        "more than a partition of its allows now, or fewer nodes, or nodes that it asks for are down",
    ),
    (
        r"(Assoc|QOS)Grp[A-Za-z]+(?<!Run)Minutes(Limit)?|QOSUsageThreshold",
        "the hours that the site granted are used up, or would be: its staff can add some; else another slurm.account, "
        "or a shorter slurm.time",
    ),
)
"""Reason, and what it means to the user where Slurm's word does not say it."""
_REASON = re.compile(
    r"(?P<holder>Assoc|QOS|)(?P<kind>Grp|Max|Min)(?P<what>Cpu|CPU|Memory|Mem|Node|GRES|Billing|WallDuration|Wall|Jobs)"
    r"(?P<minutes>RunMinutes|Minutes|)(?P<per>PerJob|PerNode|PerUser|PerAccount|)(?:Limit|NotSatisfied|)"
)
_OF_PARTITIONS = ("PartitionNodeLimit", "PartitionTimeLimit", "PartitionConfig")
"""The last is what Slurm says of either in a job's first moment."""
_TRES = {"Cpu": "cpu", "CPU": "cpu", "Memory": "mem", "Mem": "mem", "Node": "node", "Billing": "billing"}
_UNITS = {"cpu": "CPU", "node": "node", "gres/gpu": "GPU", "time": "minute", "jobs": "job"}
_KEYS = {
    "cpu": "slurm.cpus_per_task, or nodes",
    "mem": "slurm.mem, or nodes",
    "node": "slurm.trainer.nodes and slurm.inference.nodes",
    "gres/gpu": "slurm.gpus_per_node, or nodes",
    "time": "slurm.time",
}
_PER = {"PerJob": " a job", "PerNode": " a node", "PerUser": " a user at once", "PerAccount": " an account at once"}
_MOST_PARENTS = 8
_MIB = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


@dataclass(frozen=True)
class Limit:
    """A limit that keeps a job out."""

    words: str
    """Holder, how much it allows, has in use and is asked for, and what to change."""
    is_for_ever: bool
    """The job exceeds it by itself: it would not start on an empty cluster."""


def hint(job: JobInfo) -> str:
    """Return what a waiting job's reason means, or what to do; empty where Slurm's own word says it. Asks nobody."""
    for pattern, words in _HINTS:
        if re.fullmatch(pattern, job.reason, re.IGNORECASE):
            return words
    if job.is_held:
        return f"held: `scontrol release {job.job_id}` lets it go"
    return _CANNOT if job.cannot_start else ""


def limit_of(job: JobInfo, asked: float = 0.0) -> Limit | None:
    """Look up the limit that keeps a job out.

    Args:
        asked: when Slurm was asked about the job; the same question about the same answer is asked once.

    Returns:
        None: its reason is no such limit, or Slurm does not tell.
    """
    is_limit = job.reason in _OF_PARTITIONS or _REASON.fullmatch(job.reason) is not None
    return _look_up(job.job_id, job.reason, asked) if is_limit and job.is_pending else None


@lru_cache(maxsize=64)
def _look_up(job_id: str, reason: str, asked: float) -> Limit | None:
    match = _REASON.fullmatch(reason)
    try:
        parts = show_job(job_id, ASK_TIMEOUT_S)
        alike = _OF_PARTITIONS if reason in _OF_PARTITIONS else (reason,)
        part = next((part for part in parts if part.reason in alike), None)
        if part is None:  # it has changed meanwhile
            return None
        if match is None:
            beyond = [_beyond(name, part) for name in part.partition.split(",")]
            return beyond[0] if all(beyond) else None  # it may start in another one
        holders = _associations(part) if match["holder"] == "Assoc" else _qos(part, match["per"])
        return next(filter(None, (_exceeded(name, limits, part, match) for name, limits in holders)), None)
    except (SlurmError, ValueError):
        return None  # of another form, or hidden from users: the reason alone is said


def _beyond(partition: str, job: ShownJob) -> Limit | None:
    """Return the limit of a partition that a job exceeds."""
    shown = run_slurm(["scontrol", "show", "partition", "--oneliner", partition], ASK_TIMEOUT_S)
    nodes, limit_s = field(shown, "MaxNodes"), parse_duration(field(shown, "MaxTime"))
    least = field(shown, "MinNodes")
    if least.isdigit() and 0 < job.num_nodes < int(least):  # 0: Slurm did not say
        words, fewer = f"nodes: {least} at least, and it asks for {job.num_nodes}", f"more {_KEYS['node']}"
    elif nodes.isdigit() and job.num_nodes > int(nodes):
        words, fewer = f"nodes: {nodes} at most, and it asks for {job.num_nodes}", f"fewer {_KEYS['node']}"
    elif limit_s is not None and limit_s < _least_time_s(job):
        words, fewer = f"time: {field(shown, 'MaxTime')} at most, and it asks for {job.time_limit}", _shorter(job)
    else:
        return None
    return Limit(f"partition {partition} limits the {words}: it would wait for ever; {fewer}, or another", True)


def _least_time_s(job: ShownJob) -> float:
    """Return the shortest time that a job takes: backfill may lower its limit to `slurm.time_min`, seconds."""
    limits = [inf if text == "UNLIMITED" else parse_duration(text) for text in (job.time_min, job.time_limit)]
    return min((seconds for seconds in limits if seconds is not None), default=0.0)


def _shorter(job: ShownJob) -> str:
    return f"a shorter slurm.time (`scontrol update JobId={job.job_id} TimeLimit=...` shortens it where it waits)"


def _records(*which: str) -> list[str]:
    """Return what the controller shows of associations or QOS, one text each. Raises SlurmError."""
    text = run_slurm(["scontrol", "show", "assoc_mgr", *which], ASK_TIMEOUT_S)
    return re.split(r"^(?=ClusterName=|QOS=)", text, flags=re.MULTILINE)[1:]


def _fields(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", text))


def _associations(job: ShownJob) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the job's user in its account, that account and those above it: name, and what limits them."""
    account, user = job.account, job.user.partition("(")[0]
    for _ in range(_MOST_PARENTS):
        parent = ""
        found = [_fields(record) for record in _records("flags=assoc", f"accounts={account}", f"users={user}")]
        for limits in sorted(found, key=lambda limits: not limits.get("UserName")):
            if not limits.get("UserName"):
                parent = limits.get("ParentAccount", "").partition("(")[0]
                yield f"account {account}", limits
            elif account == job.account:
                yield f"user {user} in account {account}", limits
        if not parent:
            return
        account = parent


def _qos(job: ShownJob, per: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the job's QOS and that of its partition: name, and what limits them, or their one user or account."""
    argv = ["scontrol", "show", "partition", "--oneliner", job.partition.partition(",")[0]]
    names = [job.qos, field(run_slurm(argv, ASK_TIMEOUT_S), "QoS")]
    for name in dict.fromkeys(name for name in names if name not in ("", "N/A")):
        for record in _records("flags=qos", f"qos={name}"):
            general, _, rest = record.partition("Account Limits")
            accounts, _, users = rest.partition("User Limits")
            if per in ("PerUser", "PerAccount"):
                whose = "|".join(map(re.escape, re.findall(r"[^()]+", job.user if per == "PerUser" else job.account)))
                section = users if per == "PerUser" else accounts
                general = "".join(re.findall(rf"^ +(?:{whose})(?:\(\d+\))?\n((?: +Max.*\n?)+)", section, re.MULTILINE))
            yield f"QOS {name}", _fields(general)


def _exceeded(name: str, limits: Mapping[str, str], job: ShownJob, match: re.Match[str]) -> Limit | None:
    """Return the limit of this holder that keeps the job out; None: it has none that does."""
    kind, what, minutes, per = match["kind"], match["what"], match["minutes"], match["per"]
    suffix = (
        "PJ" if kind == "Min" else {"PerJob": "PJ", "PerNode": "PN", "PerUser": "PU", "PerAccount": "PA"}.get(per, "")
    )
    asks = _amounts(job.asks)
    time_s = parse_duration(job.time_limit)
    if what in ("WallDuration", "Wall"):
        key, allowed, asks = "time", {"time": limits.get(f"{kind}Wall{suffix}", "")}, {"time": (time_s or 0.0) / 60}
    elif what == "Jobs":
        key, allowed, asks = "jobs", {"jobs": limits.get(f"{kind}Jobs{suffix}", "")}, {"jobs": 1.0}
    else:
        key = "gres/" if what == "GRES" else _TRES[what]
        if minutes:
            asks = {tres: amount * (time_s or 0.0) / 60 for tres, amount in asks.items()}
        form = {"RunMinutes": "TRESRunMins", "Minutes": "TRESMins"}.get(minutes, "TRES")
        allowed = dict(part.rpartition("=")[::2] for part in limits.get(f"{kind}{form}{suffix}", "").split(",") if part)
    if not asks or (per == "PerNode" and not job.num_nodes):
        return None  # Slurm does not say how much it asks for
    for tres, text in allowed.items():
        number, _, used_text = text.rstrip(")").partition("(")
        if not tres.startswith(key) or number in ("", "N"):
            continue
        most, used, wanted = float(number), float(used_text or 0), asks.get(tres, 0.0)
        if per == "PerNode":
            wanted /= job.num_nodes
        if wanted < most if kind == "Min" else used + wanted > most:
            return _limit(name, match, (most, used, wanted), tres)
    return None


def _limit(name: str, match: re.Match[str], figures: tuple[float, float, float], tres: str) -> Limit:
    most, used, wanted = (f"{number:,.0f}" for number in figures)
    unit = ("MiB of memory" if tres == "mem" else _UNITS.get(tres, tres)) + (" minute" if match["minutes"] else "")
    unit += "" if tres == "mem" or most == "1" else "s"
    change = "slurm.account" if match["holder"] == "Assoc" else "slurm.qos"
    if match["kind"] == "Min":
        return Limit(f"{name} is for at least {most} {unit}, and it asks for {wanted}: another {change}", True)
    per = _PER.get(match["per"], " for its whole time" if match["minutes"] == "Minutes" else " at once")
    in_use = f", {used} are in use" if figures[1] else ""
    words = f"{name} allows {most} {unit}{per}{in_use}, and it asks for {wanted}"
    if figures[2] <= figures[0]:
        return Limit(words, False)
    fewer = _KEYS.get(tres, "nodes") + (", or a shorter slurm.time" if match["minutes"] else "")
    return Limit(f"{words}: it would wait for ever. Ask for less ({fewer}), or name another {change}", True)


def _amounts(tres: str) -> dict[str, float]:
    """Parse `cpu=4,mem=1.5G,node=1,gres/gpu=8`, memory in MiB."""
    found = re.findall(r"([\w/:.-]+)=([\d.]+)([KMGTP]?)", tres)
    return {name: float(number) * _MIB[unit] for name, number, unit in found}
