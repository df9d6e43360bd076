"""Tells whose a job is, where a site has changed its comment, by the batch script that Slurm keeps of it.

A job_submit plugin may set or clear every job's comment, in which our token is (`slurm.jobs`). The script still says
what we asked for.
"""

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from prime_hpc.config.run_files import JOB_SBATCH
from prime_hpc.slurm.client import COMMENT_PREFIX, SlurmError, asked_cluster, run_slurm, squeue_rows

if TYPE_CHECKING:
    from prime_hpc.slurm.jobs import JobInfo


def with_tokens(found: dict[str, "JobInfo"], which: list[str], timeout_s: float) -> dict[str, "JobInfo"]:
    """Return the same jobs, those whose comment a site has changed with the token of their batch script put before it.

    Args:
        found: jobs by id.
        which: selects them in squeue.
        timeout_s: deadline of each question.
    """
    silent = [info for info in found.values() if not re.match(r"prime-hpc\b", info.comment)]
    if not silent:
        return found
    scripts = _scripts(which, timeout_s)
    result = dict(found)
    for info in silent:
        base = re.split(r"[_+]", info.job_id)[0]
        if Path(scripts.get(base, "")).name != JOB_SBATCH:
            continue
        try:
            token = _token_in_script(base, scripts[base], asked_cluster(), timeout_s)
        except SlurmError as error:
            if error.is_unreachable:
                raise
            continue  # another user's job, or gone meanwhile
        if token is not None:
            result[info.job_id] = replace(info, comment=f"{COMMENT_PREFIX}{token} {info.comment}".rstrip())
    return result


def _scripts(which: list[str], timeout_s: float) -> dict[str, str]:
    """Path of each job's batch script by the id that the job, the array or the het job's leader has."""
    scripts: dict[str, str] = {}
    for row in squeue_rows(which, ("JobArrayID", "HetJobID", "Command"), timeout_s):
        array_id, leader, command = row.values()
        is_het = leader.isdigit() and leader != "0"
        scripts.setdefault(leader if is_het else re.split(r"[_+]", array_id)[0], command)
    return scripts


@lru_cache(maxsize=1024)
def _token_in_script(job_id: str, script: str, cluster: str | None, timeout_s: float) -> str | None:
    """Return the token that a job was submitted with, from the text that Slurm keeps of its script; asked for once."""
    text = run_slurm(["scontrol", "write", "batch_script", job_id, "-"], timeout_s)
    match = re.search(rf"^#SBATCH --comment=\"?{COMMENT_PREFIX}([^\s\"]+)", text, re.MULTILINE)
    return match[1] if match else None
