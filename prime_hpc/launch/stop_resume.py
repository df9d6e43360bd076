"""End a run in good order, and start one again from its newest checkpoint.

A running job is asked by the file STOP, which its supervisor obeys: it saves and ends. Slurm is told only where that
does not help, or where nothing runs yet. No job is ended that does not carry the run's own token.
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_hpc.config import ConfigError, Experiment, Loaded, Problem, load_experiment
from prime_hpc.config.child_config import is_parent
from prime_hpc.config.run_files import ATTEMPTS_JSONL, LOCK_JSON, RUN_YAML, STATUS_JSON, STOP
from prime_hpc.runtime.backoff import Backoff
from prime_hpc.slurm.client import ASK_TIMEOUT_S, SlurmError, on_cluster, run_slurm
from prime_hpc.slurm.jobs import JobInfo
from prime_hpc.slurm.queue import jobs_of
from prime_hpc.slurm.sbatch_errors import SlurmRefused
from prime_hpc.slurm.script import command_tail
from prime_hpc.slurm.submission_record import add_to_record, cluster_of, local_controller
from prime_hpc.store.attempts import is_held, read_attempts, saved_claims
from prime_hpc.store.errors import StoreError
from prime_hpc.store.run_dirs import IN_PLACE, AttemptRow, SubmissionRecord, read_json, read_record, read_rows
from prime_hpc.store.tinker_files import adapters_root

if TYPE_CHECKING:
    from prime_hpc.store.run_paths import RunPaths

POLL_S, LONGEST_POLL_S = 1.0, 10.0
ASK_EVERY_S, LONGEST_ASK_S = 5.0, 30.0
GONE_TIMEOUT_S = 120.0
"""After scancel: KillWait is 30 s on most sites, the epilog comes on top."""
_TELL_EVERY_S = 30.0

Say = Callable[[str], None]


@dataclass
class Ended:
    """Result of ending a run."""

    run_dir: str
    ended: bool
    """True if nothing of it waits or runs any more."""
    outcome: str
    """`pending` (never began), `stopped` (saved), `cancelled`, `over` (it ended by itself), or `unknown`."""
    note: str
    job_id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def cancel_run(run_dir: Path, *, now: bool, timeout_s: float, say: Say) -> Ended:
    """End a run and its successor.

    Args:
        run_dir: the run directory.
        now: do not let it save.
        timeout_s: so long it may take to save; then it is ended all the same.
        say: told what goes on meanwhile.

    Raises:
        SlurmRefused: Slurm cannot be asked whether there is a job; nothing was done.
    """
    with on_cluster(cluster_of(run_dir)):
        return _cancel(run_dir, now=now, timeout_s=timeout_s, say=say)


def _cancel(run_dir: Path, *, now: bool, timeout_s: float, say: Say) -> Ended:
    try:
        active = [info for info in jobs_of(run_dir) if info.is_active]
        if not active:
            return _without_job(run_dir, now=now, timeout_s=timeout_s, say=say)
        # a successor takes over whenever the job before it ends otherwise than well: it goes first
        waiting = [info for info in reversed(active) if info.is_pending]
        for info in waiting:
            run_slurm(["scancel", info.job_id], ASK_TIMEOUT_S)
            _note_cancel(run_dir)
        running = [info for info in active if not info.is_pending]
        if not running:  # what began before scancel came is ended like one that ran
            ids, now = {info.job_id for info in waiting}, True
            running = [info for info in jobs_of(run_dir) if info.job_id in ids and info.nodes]
        if not running:
            return Ended(str(run_dir), True, "pending", "it was waiting; taken out of the queue", waiting[-1].job_id)
        return _end_job(run_dir, running[0], now=now, timeout_s=timeout_s, say=say)
    except SlurmError as error:
        stop = (
            f"; `touch {run_dir / STOP}` has one that runs save and end, without Slurm" if error.is_unreachable else ""
        )
        raise SlurmRefused(Problem(f"{run_dir}: {error}{stop}")) from error


def _end_job(run_dir: Path, job: JobInfo, *, now: bool, timeout_s: float, say: Say) -> Ended:
    job_id = job.job_id
    row: AttemptRow | None = None
    if not now:
        say(f"{run_dir}: asked job {job_id} to save and end; waiting up to {timeout_s:.0f} s")
        row = _stop_and_wait(run_dir, job_id, timeout_s, say)
        if row is None:
            say(f"{run_dir}: not ended by itself; ending job {job_id}")
    if row is None:
        run_slurm(["scancel", job_id], ASK_TIMEOUT_S)
    _note_cancel(run_dir)
    gone = _wait_until_gone(run_dir, job_id)
    if not gone and row is not None:  # another attempt began in it
        say(f"{run_dir}: job {job_id} goes on after its attempt ended; ending it")
        run_slurm(["scancel", job_id], ASK_TIMEOUT_S)
        gone = _wait_until_gone(run_dir, job_id)
    if not gone:
        return Ended(
            str(run_dir), False, "unknown", f"job {job_id} still ends after {GONE_TIMEOUT_S:.0f} s; see squeue", job_id
        )
    step = _saved(run_dir, job_id)
    if row is not None:
        return Ended(str(run_dir), True, *_own_end(run_dir, row, step), job_id)
    return Ended(str(run_dir), True, "cancelled", f"ended without a new save{_newest(step)}", job_id)


def _is_well(row: AttemptRow) -> bool:
    """Return whether an attempt saved and ended, as it was asked to; the exit code is that of one that could not."""
    return row.get("outcome") in ("stopped", "completed") and not row.get("exit_code")


def _own_end(run_dir: Path, row: AttemptRow, step: Any) -> tuple[str, str]:
    """Return outcome and note of a run that ended while it was asked to: it need not have obeyed, nor had anything to
    save."""
    if row.get("outcome") == "completed" and step is None:
        return "stopped", "completed meanwhile"
    saved = f"saved{_at(step)}" if step is not None or not _has_checkpoints(run_dir) else "nothing to save yet"
    if _is_well(row):
        return "stopped", f"{saved} and ended" if saved.startswith("saved") else f"ended; {saved}"
    if row.get("next") is not None and row.get("exit_code") == 0:  # at its time limit, or for a preemption
        return "stopped", f"{saved}; taken out of the queue"
    return "over", f"ended by itself: {row.get('outcome')} ({row.get('cause')}){_newest(step)}"


def _at(step: Any) -> str:
    return f" at step {step}" if step is not None else ""


def _newest(step: Any) -> str:
    return f"; the newest checkpoint is step {step}" if step is not None else ""


def _stop_and_wait(
    run_dir: Path, job_id: str | None, timeout_s: float, say: Say, process: AttemptRow | None = None
) -> AttemptRow | None:
    """Ask by file; returns the attempt with which the run has ended. None: it has not in time, or cannot any more.

    The file does not outlive the wait: it would stop the run's next attempt at its first step. The newest attempt may
    be over before it is asked: of a job that was requeued under its id, and has not written its new attempt's line yet.
    After a crash another attempt may follow in the same job, which its line says a moment later.

    Args:
        run_dir: the run directory.
        job_id: of its Slurm job, if it is one.
        timeout_s: of the wait.
        say: told what goes on meanwhile.
        process: without Slurm, the open attempt whose process it is.
    """
    stop, over_before = run_dir / STOP, (_ended_attempt(run_dir, job_id) or {}).get("attempt")
    try:
        stop.touch()
    except OSError as error:
        words = f"{stop} cannot be written: {error.strerror}; `prime-hpc cancel --now {run_dir}` does without"
        raise ConfigError(words) from error
    began = asked = told = time.monotonic()
    pause, ask_pause = Backoff(POLL_S, ASK_EVERY_S), Backoff(ASK_EVERY_S, LONGEST_ASK_S)
    next_ask_s = ask_pause.next()
    try:
        while (passed := time.monotonic() - began) < timeout_s:
            lives = process is None or is_held(process)
            if job_id is not None and time.monotonic() - asked >= next_ask_s:
                asked, next_ask_s = time.monotonic(), ask_pause.next()
                lives = _is_there(run_dir, job_id)  # not: requeued meanwhile, or killed; scancel makes sure
            row = _ended_attempt(run_dir, job_id)  # read last: it may be the last word of a process
            if row is not None and row.get("next") == IN_PLACE:
                stop.touch()  # the attempt that follows is asked as well
            elif (
                row is not None
                and row["attempt"] != over_before
                and (_is_well(row) or row.get("next") is not None or not lives)
            ):
                return row
            if not lives:  # of a row that stood there before: the run had ended, and its job was on its way out
                return row if row is not None and row.get("next") is None else None
            if time.monotonic() - told >= _TELL_EVERY_S:
                told = time.monotonic()
                word = read_json(run_dir / STATUS_JSON) or {}
                say(f"{run_dir}: {word.get('state', 'running')}, step {word.get('step', '?')}, {passed:.0f} s")
            time.sleep(pause.next())
        return None
    finally:
        stop.unlink(missing_ok=True)


def _is_there(run_dir: Path, job_id: str) -> bool:
    """Return whether the job holds nodes, as far as can be told now."""
    try:
        return any(info.job_id == job_id and info.is_active and not info.is_pending for info in jobs_of(run_dir))
    except SlurmError:
        return True  # a controller that restarts ends no job


def _wait_until_gone(run_dir: Path, job_id: str) -> bool:
    """Wait for the job to leave its nodes. Raises SlurmError when Slurm does not answer."""
    began, pause = time.monotonic(), Backoff(POLL_S, LONGEST_POLL_S)
    while time.monotonic() - began < GONE_TIMEOUT_S:
        active = [info for info in jobs_of(run_dir) if info.is_active]
        for info in active:
            if info.is_pending:  # it had requeued itself a moment before, or queued its successor
                run_slurm(["scancel", info.job_id], ASK_TIMEOUT_S)
        if not any(info.job_id == job_id for info in active):
            return True
        time.sleep(pause.next())
    return False


def _last_row(run_dir: Path, job_id: str | None) -> AttemptRow | None:
    """Return the newest attempt, if it is this job's."""
    rows = read_rows(run_dir / ATTEMPTS_JSONL)
    if not rows:
        return None
    theirs = rows[-1].get("job_id")
    return rows[-1] if theirs is None or job_id is None or str(theirs) == job_id else None


def _ended_attempt(run_dir: Path, job_id: str | None) -> AttemptRow | None:
    """Return the newest attempt, if it is this job's and over."""
    row = _last_row(run_dir, job_id)
    return row if row is not None and row.get("ended") is not None else None


def _note_cancel(run_dir: Path) -> None:
    if read_record(run_dir) is not None:
        add_to_record(run_dir, cancelled=time.time(), successor=None)


def _without_job(run_dir: Path, *, now: bool, timeout_s: float, say: Say) -> Ended:
    """No job of it is in Slurm: a process of this host, of another one, or nothing at all."""
    from prime_hpc.launch.local import end_local

    rows = read_rows(run_dir / ATTEMPTS_JSONL)
    open_row = rows[-1] if rows and rows[-1].get("ended") is None and rows[-1].get("job_id") is None else None
    here = open_row is not None and is_held(open_row)
    controller = local_controller(run_dir)
    if not rows and controller is not None:
        end_local(run_dir, controller)
        return Ended(str(run_dir), True, "cancelled", "the local job had not begun; ended", str(controller))
    if here and open_row is not None:
        if not now:
            say(f"{run_dir}: asked process {open_row['pid']} to save and end; waiting up to {timeout_s:.0f} s")
            row = _stop_and_wait(run_dir, None, timeout_s, say, open_row)
            if row is not None:
                _wait_for_process(run_dir, open_row)
                return Ended(str(run_dir), True, *_own_end(run_dir, row, _saved(run_dir)))
        if not is_held(open_row) and local_controller(run_dir) is None:  # it was killed meanwhile
            return Ended(str(run_dir), True, "over", _how_it_ended(run_dir, read_rows(run_dir / ATTEMPTS_JSONL)))
        end_local(run_dir, local_controller(run_dir))
        ended = _wait_for_process(run_dir, open_row)
        note = "ended without a new save" if ended else f"process {open_row['pid']} still ends; see ps"
        return Ended(str(run_dir), ended, "cancelled" if ended else "unknown", note)
    return Ended(str(run_dir), True, "over", _how_it_ended(run_dir, rows))


def _saved(run_dir: Path, job_id: str | None = None) -> Any:
    """Return the step that the last attempt saved; None of a service, whose saves alone are counted."""
    is_service = adapters_root(run_dir).is_dir()
    return None if is_service else (_last_row(run_dir, job_id) or {}).get("saved_step")


def has_saved(run_dir: Path, outcome: str | None) -> bool:
    """Return whether a run that ended so, when it was asked to save and end, left something to go on from."""
    if outcome != "stopped":
        return outcome == "completed"
    return _saved(run_dir) is not None or not _has_checkpoints(run_dir)


def _has_checkpoints(run_dir: Path) -> bool:
    """Return whether what the run saves are steps of training: not episodes, nor what users of a service train."""
    from prime_hpc.config.snapshot import load_run

    try:
        experiment = load_run(run_dir)
    except ConfigError:
        return False
    return experiment.trains and not is_parent(experiment) and not adapters_root(run_dir).is_dir()


def _how_it_ended(run_dir: Path, rows: list[AttemptRow]) -> str:
    record = read_record(run_dir) or SubmissionRecord()
    if rows and rows[-1].get("ended") is not None:
        return f"it is over already: {rows[-1].get('outcome')} ({rows[-1].get('cause')})"
    if rows and rows[-1].get("job_id") is None and rows[-1].get("host"):
        return f"its process {rows[-1].get('pid')} is not on this host ({rows[-1]['host']}) or is gone: nothing to end"
    if record.get("state") == "sending":
        return "its submission never reached Slurm: nothing to end"
    if record.get("state") == "failed":
        return "Slurm refused it: nothing to end"
    return "Slurm has no job of it (any more): nothing to end"


def _wait_for_process(run_dir: Path, row: AttemptRow, timeout_s: float = 60.0) -> bool:
    """Wait for the supervisor, and for submitit's process that watches it."""
    began = time.monotonic()
    while is_held(row | {"ended": None}) or local_controller(run_dir) is not None:
        if time.monotonic() - began > timeout_s:
            return False
        time.sleep(0.2)
    return True


def load_to_resume(run_dir: Path, overrides: list[str]) -> Loaded:
    """Return the run's experiment as it was, with overrides, set to go on from its newest (or the named) whole
    checkpoint.

    Relative paths count from the directory in which the run was first submitted: this process goes there.

    Args:
        run_dir: the run directory.
        overrides: command line, e.g. `--ckpt.resume-step 40 --max-steps 200`.

    Raises:
        ConfigError: it holds no run, has no checkpoint, is done, or the overrides are wrong.
    """
    from prime_hpc.config.snapshot import load_run

    run_dir = run_dir.resolve()
    tail = command_tail(overrides)
    before = load_run(run_dir)
    first = (read_json(run_dir / LOCK_JSON) or {}).get("cwd")
    if first and Path(first).is_dir():
        os.chdir(first)
    # where checkpoints are off, one that a signal asked for may lie there all the same: the supervisor finds it
    switch_on = ["--ckpt.resume-step=latest"] if before.ckpt is not None else []
    home = [f"--output-dir={run_dir.parent}", f"--name={run_dir.name}", "--no-clean"]
    loaded = load_experiment([str(run_dir / RUN_YAML), *switch_on, *home, *tail], "submit", is_begun=True)
    experiment = loaded.experiment
    if experiment.run_dir.resolve() != run_dir:
        raise ConfigError(
            Problem("a run goes on in its own directory; to start another from its config: submit RUN/run.yaml", "name")
        )
    if experiment.clean:
        raise ConfigError(Problem("resume and clean contradict each other", "clean"))
    last, key = experiment.num_steps, "max_steps"
    if last is None:  # of the same data: what the trainer counted
        key, word = "sft.data.num_epochs", (read_json(run_dir / STATUS_JSON) or {}).get("max_steps")
        last = word if isinstance(word, int) and experiment.sft.data == before.sft.data else None
    _check_checkpoint(experiment, run_dir, last, key)
    return loaded


def _check_checkpoint(experiment: Experiment, run_dir: Path, last: int | None, key: str) -> None:
    """Raise a ConfigError where there is nothing to go on from."""
    from prime_hpc.store.checkpoint.checkpoints import newest_first, resolve_resume
    from prime_hpc.supervisor.attempt.start import run_paths

    if is_parent(experiment) or not experiment.trains:  # its runs have their own; an evaluation has its episodes
        return
    again = f"start over with `prime-hpc submit {run_dir}/run.yaml --clean`"
    paths = run_paths(experiment, run_dir)
    try:  # sizes alone: a login node is no place to read a checkpoint
        newest = next(newest_first(paths.checkpoints), None)
    except (StoreError, OSError) as error:
        words = f"{paths.checkpoints}: {error}; nothing was changed: try again when the file system answers"
        raise ConfigError(Problem(words, "ckpt.resume_step")) from error
    if newest is None:
        _refuse_unmounted(paths)
        why = "holds no whole checkpoint"
        why += "" if experiment.ckpt else " (the run has checkpoints off, and no signal or file asked for one)"
        raise ConfigError(Problem(f"{paths.checkpoints} {why}; {again}", "ckpt.resume_step"))
    asked = experiment.ckpt.resume_step if experiment.ckpt else "latest"
    if asked is None or isinstance(asked, Path):
        return
    try:
        step = newest.step if asked == "latest" else resolve_resume(paths.checkpoints, asked, deep=False).step
    except (StoreError, OSError) as error:
        raise ConfigError(Problem(str(error), "ckpt.resume_step")) from error
    if last is not None and step >= last:
        past = "is the last one" if step == last else "lies beyond the end"
        raise ConfigError(Problem(f"checkpoint {step} {past} (of {last} steps): raise it", key))


def _refuse_unmounted(paths: "RunPaths") -> None:
    """Raise a ConfigError where checkpoints are missing that were saved."""
    from prime_hpc.store.checkpoint.newest import expected_step, read_pointer

    try:
        step = expected_step(paths, saved_claims(read_attempts(paths.attempts)))
        known = read_pointer(paths)
    except (StoreError, OSError) as error:
        raise ConfigError(Problem(str(error), "ckpt.resume_step")) from error
    if step:
        where = f" (the run's checkpoints lie in {known})" if known not in (None, paths.checkpoints) else ""
        words = (
            f"{paths.checkpoints} holds no whole checkpoint, but the run saved one of step {step}{where}: is its file "
            "system mounted here? Nothing was changed"
        )
        raise ConfigError(Problem(words, "ckpt.resume_step"))
