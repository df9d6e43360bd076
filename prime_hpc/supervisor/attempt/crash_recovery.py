"""Attempts of a run that ended without a word: killed with their node, or at once. The next attempt finds out what it
can."""

import re
import shlex
import time
from pathlib import Path

from loguru import logger

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.run_files import STATUS_JSON
from prime_hpc.config.site import has_accounting
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.client import SlurmError, run_slurm
from prime_hpc.slurm.jobs import history, jobs
from prime_hpc.slurm.queue import logs_into
from prime_hpc.slurm.script import job_name
from prime_hpc.slurm.termination import lost_hosts
from prime_hpc.store.attempts import read_attempts, rewrite_row, runs_elsewhere, with_last_word
from prime_hpc.store.run_dirs import AttemptRow, read_json
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.attempt.bad_nodes import record_bad_nodes
from prime_hpc.supervisor.attempt.start import newest_saved_step, refuse_held

STEPS_TIMEOUT_S = 10.0
STALE_TRIES = 20
_STEP = re.compile(r"\d+([_+]\d+)?\.\d+")
"""`12.0`, `12+1.0` or `12_3.0`; not the batch script's own."""


def close_crashed_attempts(
    experiment: Experiment, run_dir: Path, paths: RunPaths, allocation: Allocation | None
) -> None:
    """Write down the end of every earlier attempt that could not do it itself, and the nodes that were lost with it.
    Raises ConfigError: another job, or another process here, still runs an attempt of this run."""
    for row in read_attempts(paths.attempts):
        if row["ended"] is not None:
            continue
        if allocation is None or row.get("job_id") != allocation.job_id:
            refuse_held(run_dir, row)
            if (signs := runs_elsewhere(run_dir, row)) is not None:
                raise ConfigError(f"{run_dir}: {signs}")
            if row.get("job_id"):
                _refuse_if_running(experiment, run_dir, row)
        outcome, cause, nodes = _cause(row, allocation, run_dir)
        last_word, saved = _last_seen(run_dir, row), newest_saved_step(paths)
        closed: AttemptRow = {**row, "ended": last_word, "outcome": outcome, "cause": cause, "lost_nodes": nodes}
        rewrite_row(paths.attempts, {**closed, "saved_step": saved})
        record_bad_nodes(experiment, closed)
        logger.warning(f"attempt {row['attempt']} wrote no end: {cause}")


def cancel_stale_steps(allocation: Allocation) -> None:
    """End steps of an earlier attempt of this job before the first step of this one is started.

    A het job that lost its batch host starts its first component anew beside the others' old steps; once a new step has
    taken an old one's number, Slurm cannot reach the old one's tasks any more.

    A site's step manager (`enable_stepmgr`) keeps the steps of homogeneous jobs from squeue (26.05). Such a job is not
    started again before all its nodes have ended them; those of het jobs, which have no step manager, are shown.
    """
    ids = sorted(set(allocation.component_ids) or {allocation.job_id})
    for again in range(STALE_TRIES):
        try:
            table = run_slurm(["squeue", "-h", "-s", "-j", ",".join(ids), "-o", "%i"], timeout_s=STEPS_TIMEOUT_S)
            lines = [line.strip() for line in table.splitlines()]  # a site's wrapper may say more
            stale = [line for line in lines if _STEP.fullmatch(line)]
            if not stale:
                return
            logger.warning(f"steps of an earlier attempt are still there: {', '.join(stale)}")
            for step in stale if not again else ():
                run_slurm(["scancel", step], timeout_s=STEPS_TIMEOUT_S)
        except SlurmError as error:  # agents of an old attempt fence themselves as well
            logger.warning(f"whether steps of an earlier attempt are left is unknown: {error}")
            return
        time.sleep(1.0)


def _refuse_if_running(experiment: Experiment, run_dir: Path, row: AttemptRow) -> None:
    job_id = str(row["job_id"])
    try:
        info = jobs([job_id]).get(job_id)
    except SlurmError as error:
        logger.warning(f"whether job {row['job_id']} still runs is unknown: {error}")
        return
    if info is None or info.state not in ("RUNNING", "COMPLETING", "SUSPENDED"):
        return
    try:  # of a sweep's point the log is in the sweep's directory; of a script sent with `-o` anywhere
        is_ours = info.name == job_name(experiment) or logs_into(job_id, run_dir, run_dir.parent)
    except SlurmError as error:
        is_ours = not error.is_unknown_job
    if is_ours:
        raise ConfigError(
            f"{run_dir}: job {row['job_id']} ({info.state}) still works there on {info.nodes}; "
            f"cancel it first (prime-hpc cancel {shlex.quote(str(run_dir))}), or choose another --name"
        )


def _last_seen(run_dir: Path, row: AttemptRow) -> float:
    times = [
        path.stat().st_mtime for path in (run_dir / STATUS_JSON, run_dir / "logs" / "supervisor.log") if path.exists()
    ]
    return max([row.get("began") or 0.0, *(t for t in times if t <= time.time())])


def _cause(row: AttemptRow, allocation: Allocation | None, run_dir: Path) -> tuple[str, str, list[str]]:
    """Outcome, cause and lost nodes of an attempt that left no end."""
    word = read_json(run_dir / STATUS_JSON) or {}
    if (told := with_last_word(row, word))["ended"] is not None and told["outcome"] != "node_lost":  # nor says which
        return str(told["outcome"]), str(told["cause"]), []
    if row.get("job_id") is None:
        return "failed", f"the supervisor (process {row['pid']} on {row['host']}) was killed", []
    hosts = sorted({host for group in (row.get("nodes") or {}).values() for host in group} | {row["host"]})
    lost = lost_hosts(hosts, row.get("began") or 0.0, silent_end=True)
    if lost:
        return "node_lost", f"node {', '.join(lost)} was lost", lost
    states = _accounting(row) if has_accounting(run_dir) else []
    for state, outcome, words in (
        ("NODE_FAIL", "node_lost", "Slurm lost a node"),
        ("PREEMPTED", "preempted", "preempted, with no time to save"),
        ("TIMEOUT", "requeued", "the time limit was reached, with no time to save"),
        ("CANCELLED", "interrupted", "cancelled"),
        ("OUT_OF_MEMORY", "failed", "a node ran out of memory"),
    ):
        if state in states:
            return outcome, words, []
    if word.get("attempt") == row["attempt"] and word.get("outcome"):  # KillWait was too short for its save
        return str(word["outcome"]), f"{word['cause']}; killed before everything was saved", []
    if allocation is not None and row.get("job_id") == allocation.job_id:
        return "failed", "the batch process was killed, and Slurm requeued the job (a node failure, or by hand)", []
    return "failed", f"job {row['job_id']} ended without a word: its batch process was killed", []


def _accounting(row: AttemptRow) -> list[str]:
    """States of this job's attempts that ended after the attempt began, where accounting answers."""
    began = row.get("began") or 0.0
    try:
        return [info.state for info in history(str(row["job_id"])) if info.end is None or info.end >= began]
    except SlurmError:
        return []
