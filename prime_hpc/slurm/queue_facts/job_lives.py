"""Lives of jobs as Slurm accounted for them: when each began and ended, and what it held.

A job that was requeued has several lives; the components of a heterogeneous job live together and count as one.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prime_hpc.slurm.client import sacct_rows
from prime_hpc.slurm.jobs import JOB_ID
from prime_hpc.slurm.times import parse_time

TIMEOUT_S = 20.0
_FIELDS = ("JobID", "JobIDRaw", "Start", "End", "ElapsedRaw", "AllocTRES")
_MOST_AT_ONCE = 200


@dataclass(frozen=True)
class JobLife:
    """One life of a job."""

    names: frozenset[str]
    """Ids by which the job is known: `12`, an array's `12_3` and its SLURM_JOB_ID."""
    start: float
    """Epoch seconds."""
    end: float | None
    """None: it lives."""
    cpus: float
    gpus: float | None
    """None: the site does not account for them."""
    cpu_s: float
    """CPU-seconds that are charged: none while it was suspended."""
    gpu_s: float


def job_lives(ids: Iterable[str]) -> list[JobLife]:
    """Ask sacct; empty where there is no accounting, or where it does not answer: nothing may depend on it.
    `ids`: of jobs and of arrays' tasks; others are passed over, for which sacct would refuse all.
    Returns the lives of all these jobs that held nodes, oldest first."""
    wanted = sorted({job_id for job_id in ids if JOB_ID.fullmatch(job_id)})
    lives: list[JobLife] = []
    for first in range(0, len(wanted), _MOST_AT_ONCE):
        some = ",".join(wanted[first : first + _MOST_AT_ONCE])
        rows = sacct_rows(["-j", some], _FIELDS, TIMEOUT_S)
        if rows is None:
            return []
        lives += _lives(rows)
    return sorted(lives, key=lambda life: life.start)


def _lives(accounted: Iterable[dict[str, str]]) -> list[JobLife]:
    components: dict[str, dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for row in accounted:
        if parse_time(row["Start"]) is not None and _tres(row["AllocTRES"]).get("cpu"):
            leader, _, offset = row["JobID"].partition("+")
            components[leader][offset].append(row)
    lives = []
    for leader, parts in components.items():
        for rows in parts.values():
            rows.sort(key=lambda row: row["Start"])
        for index in range(max(map(len, parts.values()))):  # the components' first lives, their second ones, ...
            lives.append(_life(leader, [rows[index] for rows in parts.values() if index < len(rows)]))
    return lives


def _life(leader: str, rows: list[dict[str, str]]) -> JobLife:
    held = [_tres(row["AllocTRES"]) for row in rows]
    elapsed = [float(row["ElapsedRaw"]) if row["ElapsedRaw"].isdigit() else 0.0 for row in rows]
    ends = [parse_time(row["End"]) for row in rows]
    known_ends = [end for end in ends if end is not None]
    cpus = [tres["cpu"] for tres in held]
    gpus = [_gpus(tres) for tres in held]
    return JobLife(
        names=frozenset({leader, rows[0]["JobIDRaw"]}),
        start=min(start for row in rows if (start := parse_time(row["Start"])) is not None),
        end=max(known_ends) if len(known_ends) == len(ends) else None,
        cpus=sum(cpus),
        gpus=sum(gpus) if any(key.startswith("gres/gpu") for tres in held for key in tres) else None,
        cpu_s=sum(count * seconds for count, seconds in zip(cpus, elapsed, strict=True)),
        gpu_s=sum(count * seconds for count, seconds in zip(gpus, elapsed, strict=True)),
    )


def _tres(text: str) -> dict[str, float]:
    """Parse `billing=4,cpu=4,gres/gpu=2,mem=8G,node=1`; what is no number is left out."""
    found = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if value.isdigit():
            found[key] = float(value)
    return found


def _gpus(tres: Mapping[str, float]) -> float:
    """GPUs of any type; sites may account for the types alone."""
    return tres.get("gres/gpu", sum(count for key, count in tres.items() if key.startswith("gres/gpu:")))
