"""`submit`: one experiment as one job, through Slurm where there is one, else on this machine."""

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prime_hpc.config import Experiment, Loaded, Problem
from prime_hpc.config.run_files import LOCK_JSON, SHAPES_JSON
from prime_hpc.config.secret import masked_command
from prime_hpc.config.site import write_site
from prime_hpc.launch.checks import check, starts_elsewhere
from prime_hpc.launch.estimate.micro_batch import with_micro_batch
from prime_hpc.launch.job import local_job
from prime_hpc.launch.monitor.logs import copy_new
from prime_hpc.launch.prepare import claim_directory, for_evaluation, refuse_anothers, write
from prime_hpc.launch.resume import without_dependency
from prime_hpc.launch.storage import homes
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.slurm.client import ASK_TIMEOUT_S, SlurmError, on_cluster, show_job, why_not_in_force
from prime_hpc.slurm.gpu_split import refuse_cpu_builds
from prime_hpc.slurm.jobs import ENDED, JobInfo, jobs
from prime_hpc.slurm.queue import Submission, queue_successor, render_submission, resolve_pending_submission, send
from prime_hpc.slurm.queue_facts.waiting import limit_of
from prime_hpc.slurm.sbatch_errors import SlurmRefused, error_lines
from prime_hpc.slurm.submission_record import add_to_record, cluster_of, submitting
from prime_hpc.store.run_dirs import SubmissionRecord, read_json, read_record

FOLLOW_POLL_S = 1.0
ASK_EVERY_S = 5.0
_LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay", "squashfs")


def submit(
    loaded: Loaded,
    *,
    follow: bool | None = None,
    dry_run: bool = False,
    as_json: bool = False,
    ranking: dict[str, Any] | None = None,
) -> int:
    """Start an experiment as a job.

    Args:
        follow: show the job's log until it ends; None: only for a job on this machine.
        dry_run: say what would be submitted; nothing is written and Slurm is not asked.
        ranking: of the shapes among which this one was chosen; kept with the run.

    Returns:
        exit code: 0 submitted (followed: of the run), 130 interrupted while following.

    Raises:
        ConfigError: the experiment is wrong, or its run directory is in use.
        SlurmRefused: Slurm refuses the job or cannot be reached.
    """
    if not uses_slurm(loaded.experiment, asks=not dry_run):
        from prime_hpc.launch.local import submit_local

        return submit_local(loaded, follow=follow, dry_run=dry_run, as_json=as_json)
    stated, run_dir = loaded.experiment.slurm, loaded.experiment.run_dir.resolve()
    if not loaded.experiment.clean:
        loaded = replace(loaded, experiment=without_dependency(loaded.experiment, run_dir))
    waits = loaded.experiment.slurm.waits
    loaded = for_evaluation(loaded, waits=waits)
    made = render_submission(loaded, as_rendered=dry_run)
    _refuse(loaded, made, quiet=dry_run)  # the plan lists what lint warns of
    if dry_run:
        from prime_hpc.launch.plan.plan import slurm_plan
        from prime_hpc.launch.plan.plan_text import show_dry_run

        show_dry_run(slurm_plan(made.experiment, made.site), made.text, as_json)
        return 0

    elsewhere = starts_elsewhere(made.experiment, made.site)
    check(loaded, by_slurm=True, starts_elsewhere=elsewhere, waits=waits)
    # without a container the job runs in this very environment
    refuse_cpu_builds(made.site.container is None and any(g.device == "cuda" for g in made.placement.groups))
    kept = replace(loaded, experiment=loaded.experiment.model_copy(update={"slurm": stated}))
    job, adopted = _queue(kept, made, ranking)
    with on_cluster(cluster_of(run_dir)):
        return _after(run_dir, job, made, adopted=adopted, follow=bool(follow), as_json=as_json)


def uses_slurm(experiment: Experiment, environ: Mapping[str, str] = os.environ, *, asks: bool = False) -> bool:
    """Return whether `submit` goes through Slurm: as `launch` says, or (`auto`) where an sbatch belongs to a cluster.
    `asks`: a job is to be sent, so that where `launch` says so there has to be a Slurm.
    Raises SlurmRefused: there is none, though the experiment is meant for one: it would run on the login node."""
    if experiment.launch == "local" or (experiment.launch == "slurm" and not asks):
        return experiment.launch == "slurm"
    why = why_not_in_force(environ)
    if why is None:
        return True
    _refuse_login_node(experiment, environ, why)
    if shutil.which("sbatch", path=environ.get("PATH")) is not None:
        print("note: there is an sbatch, but no slurm.conf is in force: starting on this machine", file=sys.stderr)
    return False


def _refuse_login_node(experiment: Experiment, environ: Mapping[str, str], why: str) -> None:
    """Raise where an experiment states what only Slurm has, or a site was chosen: here it was not meant to run."""
    stated = sorted(experiment.slurm.model_dump(exclude_defaults=True))
    if experiment.launch == "slurm":
        meant = "launch = slurm asks for one"
    elif stated:
        meant = f"the experiment states slurm.{stated[0]}"
    elif environ.get("PRIMEHPC_SITE"):
        meant = f"PRIMEHPC_SITE is {environ['PRIMEHPC_SITE']}"
    else:
        return
    message = f"{why}, but {meant}: nothing was started; --launch local runs it on this machine all the same"
    raise SlurmRefused(Problem(message, "launch"))


def _refuse(loaded: Loaded, made: Submission, *, quiet: bool) -> None:
    """Raise for what lint calls an error; print what it warns of, unless quiet."""
    from prime_hpc.launch.lint.lint import lint, print_warnings, refuse_errors

    findings = lint(made.experiment, made.site)
    if not quiet:
        print_warnings(findings)
    refuse_errors(loaded, findings)
    told = {finding.key for finding in findings if finding.code == "PH313"}
    for key, folder in homes(made.experiment).items():
        if key not in told and (warning := unseen_by_others(folder, made.placement.num_nodes, made.site.scratch)):
            print(f"warning: {key}: {warning}", file=sys.stderr)


def unseen_by_others(
    folder: Path, num_nodes: int, scratch: Path | None = None, mounts: Path = Path("/proc/mounts")
) -> str | None:
    """Return why other nodes may not see a directory, by its file system's type; None: nothing says so, or the site
    does: it lies below its scratch."""
    if num_nodes < 2 or (scratch is not None and folder.is_relative_to(scratch)):
        return None
    best, kind = "", ""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        point = fields[1].replace("\\040", " ") if len(fields) > 2 else "-"
        if folder.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, fields[2]
    if kind not in _LOCAL_FILE_SYSTEMS:
        return None
    return f"{folder} is on {best} ({kind}), a file system of this host alone, and the job has {num_nodes} nodes"


def _queue(loaded: Loaded, made: Submission, ranking: dict[str, Any] | None) -> tuple[str, bool]:
    """Make the run directory and send the job; returns the job id, whether it was there already."""
    run_dir = made.experiment.run_dir.resolve()
    refuse_anothers(run_dir)
    with submitting(run_dir):
        found = resolve_pending_submission(run_dir)
        if found is not None:
            return found.job_id, True
        claim_directory(made.experiment, run_dir)
        write(replace(loaded, experiment=with_micro_batch(loaded.experiment, made.site)[0]), run_dir)
        write_site(made.site, run_dir)
        if ranking is not None:
            write_atomic(run_dir / SHAPES_JSON, json.dumps(ranking, indent=1) + "\n")
        _warn_of_variables()
        job_id = send(
            run_dir,
            made.text,
            token=made.token,
            layout=made.placement.layout,
            command=(read_json(run_dir / LOCK_JSON) or {}).get("command") or masked_command(sys.argv),
            function=local_job,
            other=made.other,
        )
        if (shape := made.experiment.slurm.shape) is not None:
            add_to_record(run_dir, shape=shape)
        if made.how == "successor":
            try:
                queue_successor(run_dir, job_id, is_first=True)
            except (SlurmError, OSError) as error:
                why = error_lines(error.stderr) if isinstance(error, SlurmError) else str(error)
                add_to_record(run_dir, no_successor=why)
                words = "the job asks again when it begins, and every few minutes while it runs"
                print(f"warning: no successor could be queued ({error}); {words}", file=sys.stderr)
    return job_id, False


def _warn_of_variables() -> None:
    """sbatch's own input variables would change the job behind the config's back; ours does not see them."""
    named = sorted(name for name in os.environ if name.startswith("SBATCH_"))
    if named and "SLURM_JOB_ID" not in os.environ:
        print(
            f"warning: {', '.join(named)} of the environment does not count here; state it in the config (slurm.*) or "
            "in the site profile",
            file=sys.stderr,
        )


def _after(run_dir: Path, job_id: str, made: Submission, *, adopted: bool, follow: bool, as_json: bool) -> int:
    """Say what was submitted, and follow it if asked to."""
    trouble, info = "", None
    try:
        info = jobs([job_id], ASK_TIMEOUT_S).get(job_id)
    except SlurmError as error:
        trouble = str(error)
    log = run_dir / "logs" / f"slurm-{job_id}.out"
    if as_json:
        print(json.dumps(describe(run_dir, log, info, adopted=adopted), indent=2, ensure_ascii=False))
    else:
        verb = "the earlier submit had reached Slurm, its answer was lost: found" if adopted else "submitted as"
        shape = f", shape {made.experiment.slurm.shape}" if made.experiment.slurm.shape and not adopted else ""
        kind = f"{made.placement.layout}, {_nodes(made.placement.num_nodes)}{shape}"
        print(f"{verb} job {job_id} ({kind}): {_state(info)}")
        if adopted:
            print("nothing new was sent; the job runs the experiment as it was then")
        print(f"run directory {run_dir}; log {log}")
        name = shlex.quote(str(made.experiment.run_dir))
        print(f"follow it with `prime-hpc logs -f {name}`, look at it with `prime-hpc status {name}`", flush=True)
    if trouble:
        print(f"warning: its state is not known: {trouble}", file=sys.stderr)
    limit = limit_of(info) if info is not None else None
    if info is not None and (info.cannot_start or (limit is not None and limit.is_for_ever)):
        why = (
            limit.words
            if limit is not None
            else "its partition, account or QOS does not have or allow what it asks for, or the job that it depends on "
            "ended otherwise"
        )
        print(
            f"warning: Slurm took the job, but cannot start it as it is ({info.reason}): {why}. "
            f"End it with `prime-hpc cancel {shlex.quote(str(run_dir))}` and ask for something else",
            file=sys.stderr,
        )
    elif made.how == "requeue" and info is not None:
        _warn_if_not_requeued(job_id)
    return follow_job(job_id, log) if follow else 0


def _warn_if_not_requeued(job_id: str) -> None:
    """Say that the job lacks what its script asks for: a site's submit plugin may take it back."""
    try:
        is_requeued = show_job(job_id, ASK_TIMEOUT_S)[0].is_requeued
    except SlurmError:
        return  # the job itself will say so
    if not is_requeued:
        print(
            "warning: Slurm will not requeue this job, though it was asked to (a rule of the site): at its end the job "
            "sends a successor itself; preempted without a warning, or with a lost node, it would not come back. "
            "slurm.restart.how: successor has another job wait from the beginning",
            file=sys.stderr,
        )


def describe(run_dir: Path, log: Path, info: JobInfo | None, *, adopted: bool) -> dict[str, Any]:
    """Return the submit record with what Slurm says, for JSON."""
    return {
        **(read_record(run_dir) or {}),
        "run_dir": str(run_dir),
        "log": str(log),
        "adopted": adopted,
        "slurm_state": info.state if info else None,
        "reason": (info.reason or None) if info else None,
        "start_estimate": info.start if info and info.is_pending else None,
    }


def _nodes(count: int) -> str:
    return f"{count} node" + ("s" if count != 1 else "")


def _state(info: JobInfo | None) -> str:
    if info is None:
        return "state not known"
    if not info.is_pending:
        return f"{info.state} on {info.nodes}" if info.nodes else info.state
    reason = f" ({info.reason})" if info.reason else ""
    when = ""
    if info.start is not None:
        when = f"; Slurm expects it to start at {time.strftime('%Y-%m-%d %H:%M', time.localtime(info.start))}"
    return f"{info.state}{reason}{when}"


def follow_job(job_id: str, log: Path) -> int:
    """Copy a Slurm job's log to the terminal until the job has ended, and its successors' where it has any; Ctrl-C ends
    the showing, not the job. Returns 0: it is COMPLETED; 1: it ended otherwise; 130: interrupted."""
    offset, said, state = 0, "", ""
    asked = float("-inf")
    try:
        while True:
            if time.monotonic() - asked >= ASK_EVERY_S:
                asked = time.monotonic()
                info = _look(job_id, log.parent.parent)
                state = info.state if info else state or "PENDING"
                now = _state(info) if info else said
                if info is not None and info.is_pending and now != said:
                    print(now, flush=True)
                said = now
                over = info is not None and not info.is_active
            offset = copy_new(log, offset)
            if over:
                print(f"job {job_id} has ended: {state}", flush=True)
                if state == "COMPLETED" or (later := _successor_of(job_id, log.parent.parent)) is None:
                    return 0 if state == "COMPLETED" else 1
                print(f"the run goes on as job {later}", flush=True)
                job_id, log, offset, said, state = later, log.with_name(f"slurm-{later}.out"), 0, "", ""
                asked = float("-inf")  # at once: what was told is of the job before
            time.sleep(FOLLOW_POLL_S)
    except KeyboardInterrupt:
        print(f"\nno longer followed; job {job_id} goes on (`prime-hpc cancel {job_id}` ends it)", flush=True)
        return 130


def _successor_of(job_id: str, run_dir: Path) -> str | None:
    """Return the job that has taken over from one that ended ill, or is about to; None: none does. One that Slurm says
    nothing of now may: who follows it asks again."""
    record = read_record(run_dir) or SubmissionRecord()
    later = record.get("successor") if record.get("job_id") == job_id else record.get("job_id")
    info = _look(later, run_dir) if later is not None else None
    return later if info is None or info.is_active else None


def _look(job_id: str, run_dir: Path) -> JobInfo | None:
    """Return the job; one that the controller has forgotten has ended. None: Slurm does not answer now."""
    try:
        found = jobs([job_id], ASK_TIMEOUT_S).get(job_id)
    except SlurmError:
        return None  # the log is still worth showing; asked again soon
    if found is None:
        from prime_hpc.slurm.executors import state_of_forgotten

        ended = state_of_forgotten(job_id, run_dir)
        return JobInfo(job_id, ended if ended in ENDED else "REVOKED")
    return found
