"""One run into Slurm's queue, exactly once: what was sent before is looked for first, what is sent is written first."""

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from prime_hpc.config import ConfigError, Experiment, Loaded, Problem
from prime_hpc.config.run_files import ATTEMPTS_JSONL, JOB_SBATCH, SUBMIT_JOB_JSON, SUBMIT_JSON
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import cluster_name, load_site, other_cluster
from prime_hpc.slurm.allocation import job_argument
from prime_hpc.slurm.client import (
    ASK_TIMEOUT_S,
    COMMENT_PREFIX,
    SBATCH_TIMEOUT_S,
    SlurmError,
    on_cluster,
    run_slurm,
    send_script,
    show_job,
)
from prime_hpc.slurm.jobs import JobInfo, find_by_token, jobs
from prime_hpc.slurm.placement import Placement, place_slurm
from prime_hpc.slurm.sbatch_errors import NothingQueued, SlurmRefused, job_without_answer, jobs_of_cut_off_submit, note
from prime_hpc.slurm.script import command_tail, escape_pattern, interpreter, render_job, restart_mode
from prime_hpc.slurm.submission_record import (
    SUBMISSION_VARIABLE,
    add_to_record,
    cluster_of,
    is_being_sent,
    local_controller,
    new_token,
    open_record,
    submission_environment,
    write_record,
)
from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.run_dirs import SubmissionRecord, known_record, read_record

P = ParamSpec("P")
R = TypeVar("R")
_AT_REST = ("completed", "failed", "stopped", "interrupted")
"""Outcomes after which a run does not come back by itself (as far as its own directory knows)."""
_NO_JOB = ("failed", "local")
"""States of a submission of which Slurm has no job."""


@dataclass(frozen=True)
class Submission:
    """A submission before it is sent."""

    experiment: Experiment
    site: SiteConfig
    placement: Placement
    how: str
    """How the job comes back: requeue, successor or off."""
    token: str
    text: str
    other: str | None = None
    """Cluster of the site that it goes to; None: this one."""


def _where_it_was_sent(ask: Callable[Concatenate[Path, P], R]) -> Callable[Concatenate[Path, P], R]:
    """Have a function of a run directory ask the cluster that the run was sent to."""

    @wraps(ask)
    def asking(run_dir: Path, *args: P.args, **kwargs: P.kwargs) -> R:
        with on_cluster(cluster_of(run_dir, known_record)):
            return ask(run_dir, *args, **kwargs)

    return asking


def render_submission(loaded: Loaded, *, as_rendered: bool = False) -> Submission:
    """Plan and render; asks nobody and writes nothing.
    `as_rendered`: the text without a token, as `render` prints it: the same each time.
    Raises ConfigError: it cannot be placed, or no script can say it."""
    experiment = loaded.experiment
    token = new_token()
    other = other_cluster(experiment.slurm.cluster)
    site = load_site(experiment.slurm.site, cluster=other)
    placement = place_slurm(experiment, site)
    text = render_job(
        placement,
        experiment,
        site,
        python=interpreter(),
        command_tail=command_tail(loaded.argv),
        token=None if as_rendered else token,
        cwd=Path.cwd(),
    )
    how = restart_mode(experiment, site, placement)
    return Submission(experiment, site, placement, how, token, text, other)


@_where_it_was_sent
def jobs_of(run_dir: Path) -> list[JobInfo]:
    """Slurm's jobs of a run that the controller remembers, oldest first: its own, and its successor.

    A job id alone proves nothing, since Slurm can use it again: the job must carry the record's token, or (a script
    that was sent by hand) write its log into the run directory.
    Raises SlurmError: Slurm cannot be asked; OSError: the run's files cannot be read now.
    """
    record = known_record(run_dir)
    if record is None or record.get("state") in _NO_JOB:
        return _sent_by_hand(run_dir)
    tokens = {record.get("token"), record.get("successor_token")} - {None}
    ids = {str(i) for i in (record.get("job_id"), record.get("successor")) if i}
    if is_of_array(record):  # its neighbours carry the token too
        return [info for info in jobs(ids, ASK_TIMEOUT_S).values() if info.token in tokens and info.job_id in ids]
    found = [info for token in tokens for info in find_by_token(str(token))]
    if not found:  # somebody else's run, of which squeue tells by id alone
        found = [info for info in jobs(ids, ASK_TIMEOUT_S).values() if info.token in tokens]
    return found if record.get("command") else [*_sent_by_hand(run_dir), *found]


def is_of_array(record: SubmissionRecord) -> bool:
    """Return whether a record is of a task of a job array: a point of a sweep."""
    return "_" in str(record.get("job_id")) or bool(record.get("array"))


def _sent_by_hand(run_dir: Path) -> list[JobInfo]:
    rows = [row for row in read_attempts(run_dir / ATTEMPTS_JSONL) if row.get("job_id")]
    if not rows:  # of one whose attempt has ended, Slurm may not be done with the job
        return []
    info = jobs([str(rows[-1]["job_id"])], ASK_TIMEOUT_S).get(str(rows[-1]["job_id"]))
    if info is None or not info.is_active:
        return []
    return [info] if logs_into(info.job_id, run_dir) else []


def logs_into(job_id: str, *folders: Path) -> bool:
    """Return whether a job's log is in `logs` of one of these: its id alone may be that of another one by now. Raises
    SlurmError."""
    output = show_job(job_id, ASK_TIMEOUT_S)[0].output
    logs = [f"{folder / 'logs'}/" for folder in folders]
    return output.startswith((*logs, *map(escape_pattern, logs)))


def refuse_if_queued(run_dir: Path) -> None:
    """Raise where a job of this run waits or runs, in Slurm or on this machine.

    Raises:
        ConfigError: one does; naming it.
        SlurmRefused: a job was sent, and Slurm cannot say whether it still lives.
        OSError: whether one was sent cannot be read now.
    """
    controller = local_controller(run_dir)
    if controller is not None:
        raise ConfigError(
            f"{run_dir}: this run is a local job here (process {controller}); end it first "
            f"(prime-hpc cancel {shlex.quote(str(run_dir))}), or choose another --name",
            "name",
        )
    active = [info for info in _ask(run_dir) if info.is_active]
    if active:
        info = active[0]
        where = f" on {info.nodes}" if info.nodes else f" ({info.reason})" if info.reason else ""
        # after scancel, say, until its processes are gone
        ending = "Slurm still ends it: try again in a minute; if it comes back, " if info.state == "COMPLETING" else ""
        raise ConfigError(
            f"{run_dir}: this run is in Slurm as job {info.job_id}, {info.state}{where}; {ending}end it first "
            f"(prime-hpc cancel {shlex.quote(str(run_dir))}), or choose another --name",
            "name",
        )


def _ask(run_dir: Path) -> list[JobInfo]:
    """`jobs_of`, where there is a doubt at all."""
    record = known_record(run_dir)
    if record is None and not any(row.get("job_id") for row in read_attempts(run_dir / ATTEMPTS_JSONL)):
        return []
    try:
        return jobs_of(run_dir)
    except SlurmError as error:
        if record is None or record.get("state") in _NO_JOB or _is_at_rest(run_dir, record):
            return []  # a run from another place, or over by its own word: Slurm's is not needed
        raise SlurmRefused(
            Problem(
                f"{run_dir} was sent to Slurm ({record.get('job_id') or 'no answer was written down'}), and whether "
                f"its job still lives cannot be asked; nothing was changed. {error}",
                "name",
            )
        ) from error


def _is_at_rest(run_dir: Path, record: SubmissionRecord) -> bool:
    rows = read_attempts(run_dir / ATTEMPTS_JSONL)
    if not rows or record.get("state") == "sending":
        return False
    last = rows[-1]
    return str(last.get("job_id")) == str(record.get("job_id")) and last.get("outcome") in _AT_REST


@_where_it_was_sent
def resolve_pending_submission(run_dir: Path) -> JobInfo | None:
    """Find out what became of the submission before this one.

    Returns:
        its job, if sbatch's answer had been lost and the job is there (the record now has it): nothing is to be sent.
        None: the way is free.

    Raises:
        ConfigError: the run waits or runs, and that was known.
        SlurmRefused: Slurm cannot be asked; nothing was changed.
    """
    record = known_record(run_dir)
    if record is None or record.get("state") != "sending":
        refuse_if_queued(run_dir)
        return None
    token, sent = str(record["token"]), float(record["time"])
    if found := jobs_of_cut_off_submit(token, sent, run_dir, "name"):
        successor = found[1].job_id if len(found) > 1 else None
        write_record(run_dir, state="sent", job_id=found[0].job_id, successor=successor)
        return next((info for info in found if info.is_active), None)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(sent))
    note(f"the submit of {when} never reached Slurm; submitting now")
    return None


def send(
    directory: Path,
    text: str,
    *,
    token: str,
    layout: str,
    command: list[str],
    function: Callable[[str, dict[str, str | None]], int],
    options: Sequence[str] = (),
    other: str | None = None,
) -> str:
    """Submit a rendered script through submitit; the caller holds `submitting`.

    Args:
        text: of `render_job`, with the token.
        layout: `packed` or `het`.
        function: that the job is for submitit: (run directory, environment) -> exit code.
        options: of sbatch, over the script's.
        other: cluster of the site that it goes to; None: this one.

    Raises:
        NothingQueued: sbatch refused, or is missing; the record says so.
        SlurmRefused: it did not answer.
        ConfigError: the run directory cannot be written.
    """
    from prime_hpc.slurm.executors import RunExecutor

    more = {"cluster": cluster_name(), "other_cluster": other}
    try:
        open_record(directory, token=token, state="sending", command=command, layout=layout, **more)
        executor = RunExecutor(directory, text, options=options, environment=submission_environment(directory, token))
        with on_cluster(other):
            job_id = str(executor.submit(function, str(directory), {}).job_id)
        if executor.cluster is not None:
            add_to_record(directory, other_cluster=executor.cluster)
    except SlurmError as error:
        try:
            with on_cluster(other):
                job_id = job_without_answer(token, error, layout).job_id
        except NothingQueued as refused:
            write_record(directory, state="failed", error=str(refused))
            raise
    except KeyboardInterrupt:
        note(
            "interrupted while sbatch was asked; whether the job was queued is not known: `prime-hpc cancel "
            f"{shlex.quote(str(directory))}` takes it out, the same command again finds it"
        )
        raise
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}", "output_dir") from error
    add_to_record(directory, state="sent", job_id=job_id)
    return job_id


@_where_it_was_sent
def forget_submission_that_is_over(run_dir: Path, environ: Mapping[str, str]) -> None:
    """At the beginning of a job that was sent by hand: remove the record of a submission whose jobs are over, which
    would be taken for this job's."""
    record, job_id = known_record(run_dir), job_argument(environ)
    if record is None or not record.get("command") or job_id is None or SUBMISSION_VARIABLE in environ:
        return
    if job_id in (record.get("job_id"), record.get("successor")):
        return
    with suppress(SlurmError):  # it cannot be asked: all stays as it is
        if any(info.is_active for info in jobs_of(run_dir)) or is_being_sent(run_dir):
            return
        now = known_record(run_dir) or SubmissionRecord()  # Slurm's answer took its time
        if now.get("token") == record.get("token"):
            for name in (SUBMIT_JSON, SUBMIT_JOB_JSON):
                (run_dir / name).unlink(missing_ok=True)


@_where_it_was_sent
def yield_to_twin(run_dir: Path, environ: Mapping[str, str]) -> str | None:
    """At the beginning of a job: of two successors that waited for the same one, and were released at once when it died
    before it had left one, that which started first goes on. Returns why this job ends here; None: it goes on."""
    record, job_id = known_record(run_dir), job_argument(environ)
    if record is None or job_id is None or job_id == record.get("job_id") or "SLURM_ARRAY_TASK_ID" in environ:
        return None
    token = environ.get(SUBMISSION_VARIABLE, "").partition(" ")[0] or record.get("successor_token") or record["token"]
    with suppress(SlurmError):  # it cannot be asked: the newer attempt ends the older one
        running = {info.job_id: info for info in find_by_token(token) if info.state == "RUNNING"}
        first = min(running, key=lambda other: running[other].start or 0.0, default=job_id)
        if job_id in running and first != job_id:
            return f"job {first} has this run already; this one ({job_id}) ends here"
    return None


@_where_it_was_sent
def queue_successor(run_dir: Path, job_id: str, *, is_first: bool = False, timeout_s: float = SBATCH_TIMEOUT_S) -> str:
    """Queue the job that takes over when `job_id` ends otherwise than well; one that waits already is kept.

    For the job itself at the beginning of each attempt, and for `submit`. Safe to call twice.

    Args:
        run_dir: the run directory, with its `job.sbatch`.
        is_first: no other can be there yet: nobody is asked.
        timeout_s: of sbatch.

    Raises:
        SlurmError: Slurm refuses it or cannot be reached.
    """
    record = known_record(run_dir)
    if record is None:  # a script that was sent by hand
        record = open_record(
            run_dir, token=new_token(), state="sent", command=[], layout="", cluster=cluster_name(), job_id=job_id
        )
    # the token in the script's comment is of the submission, unless that was an array's or there was none
    has_own = bool(record.get("command")) and not is_of_array(record)
    token = str(record["token"] if has_own else record.get("successor_token") or new_token())
    if not has_own:
        write_record(run_dir, successor_token=token)
    if not is_first and (kept := _keep_one(run_dir, token, job_id)):
        return kept
    options = [f"--dependency=afternotok:{job_id}", "--kill-on-invalid-dep=yes"]
    options += [] if has_own else [f"--comment={COMMENT_PREFIX}{token}"]
    script = run_dir / JOB_SBATCH
    if not script.exists():
        run_slurm(["scontrol", "write", "batch_script", job_id, str(script)], ASK_TIMEOUT_S)
    successor, _ = send_script(script, options, submission_environment(run_dir, token), timeout_s)
    add_to_record(run_dir, successor=successor, no_successor=None)
    with suppress(SlurmError):  # asked again at the attempt's end
        return _keep_one(run_dir, token, job_id) or successor
    return successor


def _keep_one(run_dir: Path, token: str, job_id: str) -> str | None:
    """Of a run's successors in the queue leave the first, behind this job; return its id. None: there is none.

    `submit` and the job that begins meanwhile may each queue one, and one of which sbatch's answer was lost may come
    later; two would run at once. One that was to follow another job would not wait for this one.
    Raises SlurmError: Slurm cannot be asked.
    """
    waiting = [info for info in find_by_token(token) if info.is_pending and info.job_id != job_id]
    if not waiting:
        return None
    kept, *others = waiting
    for info in others:
        try:
            run_slurm(["scancel", info.job_id], ASK_TIMEOUT_S)
        except SlurmError as error:
            if error.is_unreachable:
                raise  # else whoever queued the other was quicker
    if kept.reason != "Dependency":
        change = f"Dependency=afternotok:{job_id}"
        with suppress(SlurmError):  # it waits all the same
            run_slurm(["scontrol", "update", f"JobId={kept.job_id}", change], ASK_TIMEOUT_S)
    add_to_record(run_dir, successor=kept.job_id, no_successor=None)
    return kept.job_id


def drop_successor(run_dir: Path, before: SubmissionRecord | None = None) -> str | None:
    """Take the successor out of the queue: for a job that ends ill and is not to come back.

    Args:
        before: its record as it was, should the directory be gone, or not be read now.

    Returns:
        its job id; None: there was none.

    Raises:
        SlurmError: Slurm cannot be asked.
    """
    now = read_record(run_dir)
    record = now or before or SubmissionRecord()
    successor = record.get("successor")
    if not successor:
        return None
    with on_cluster(cluster_of(run_dir, lambda _: record)):
        info = jobs([str(successor)], ASK_TIMEOUT_S).get(str(successor))
        if info is not None and info.is_pending and _is_ours(info, record):
            run_slurm(["scancel", str(successor)], ASK_TIMEOUT_S)
    if now is not None:
        add_to_record(run_dir, successor=None)
    return str(successor)


def _is_ours(info: JobInfo, record: SubmissionRecord) -> bool:
    return info.token is not None and info.token in (record.get("token"), record.get("successor_token"))
