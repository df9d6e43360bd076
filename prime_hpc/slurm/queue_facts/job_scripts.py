"""Tells whose a job is, where a site has changed its comment, by the batch script that Slurm keeps of it.

A job_submit plugin may set or clear every job's comment, in which our token is (`slurm.jobs`). The script still says
what we asked for.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from prime_hpc.config.run_files import JOB_SBATCH
from prime_hpc.slurm.client import COMMENT_PREFIX, SlurmError, asked_cluster, run_slurm, squeue_rows


def tokens_in_scripts(job_ids: Sequence[str], which: list[str], timeout_s: float) -> dict[str, str]:
    """Return the tokens of the jobs that are ours, by id.

    Args:
        job_ids: jobs whose comment has none.
        which: selects them in squeue.
    """
    scripts = _scripts(which, timeout_s) if job_ids else {}
    tokens: dict[str, str] = {}
    for job_id in job_ids:
        base = re.split(r"[_+]", job_id)[0]
        if Path(scripts.get(base, "")).name != JOB_SBATCH:
            continue
        try:
            token = _token_in_script(base, scripts[base], asked_cluster(), timeout_s)
        except SlurmError as error:
            if error.is_unreachable:
                raise
            continue  # another user's job, or gone meanwhile
        if token is not None:
            tokens[job_id] = token
    return tokens


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
