"""When a job would start, as `sbatch --test-only` says. Nothing is submitted, and no silent Slurm holds anybody up.

Slurm says it on standard error: "Job 7 to start at ... using 4 processors on nodes n[1-2] in partition gpu", of a
heterogeneous job "... on n[1-2,5]". The jobs that wait ahead count, by their time limits; a dependency does not. Of a
heterogeneous job each component is tested alone, and the latest time is said, even where two took the same nodes.
"""

import re
from dataclasses import dataclass
from typing import Literal

from prime_hpc.slurm.client import ASK_TIMEOUT_S, SlurmError, on_cluster, run_slurm
from prime_hpc.slurm.hostlist import expand_hosts
from prime_hpc.slurm.placement import Placement
from prime_hpc.slurm.sbatch_errors import refusal
from prime_hpc.slurm.times import parse_time

Word = Literal["starts", "refused", "no answer", "unclear"]
_START = re.compile(r"to start at (\S+)(?:.*? on (?:nodes )?(\S+))?")


@dataclass(frozen=True)
class ExpectedStart:
    """Slurm's answer about one script."""

    word: Word
    """`starts`: at `start`; `refused`: it can never run as it is; `no answer`: Slurm is silent, missing or away;
    `unclear`: it answered, and said no time."""
    start: float | None = None
    """Epoch seconds."""
    nodes: str = ""
    """Slurm's host list of where it would run now; empty where it does not say."""
    why: str = ""
    """Of all but `starts`: what was said, and what to do."""
    is_earliest: bool = False
    """It may start later: components of a heterogeneous job were given the same nodes."""


def expected_start(
    text: str, placement: Placement, *, cluster: str | None = None, timeout_s: float = ASK_TIMEOUT_S
) -> ExpectedStart:
    """Ask about a batch script. `cluster`: of the site, where it would be sent with `-M`; None: this one."""
    try:
        with on_cluster(cluster):
            said = run_slurm(["sbatch", "--test-only"], timeout_s, stdin=text, with_stderr=True)
    except SlurmError as error:
        if error.is_unreachable:
            return ExpectedStart("no answer", why=str(error))
        return ExpectedStart(
            "refused", why="; ".join(str(problem) for problem in refusal(error, placement.layout).problems)
        )
    return _read(said, placement.num_nodes)


def _read(said: str, num_nodes: int) -> ExpectedStart:
    for line in reversed(said.splitlines()):
        match = _START.search(line)
        start = parse_time(match[1]) if match else None
        if match and start is not None:
            nodes = match[2] or ""
            return ExpectedStart("starts", start, nodes, is_earliest=0 < len(expand_hosts(nodes)) < num_nodes)
    words = " ".join(said.split())
    return ExpectedStart("unclear", why=f"sbatch --test-only names no time: {words or 'it said nothing'}")
