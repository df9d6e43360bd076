"""The submit record: written before sbatch is called, so that a lost answer never makes two jobs.

`<run_dir>/submit.json` says what was sent: with state `sending` before sbatch, `sent` after it; what the job itself has
to say is in `submit.job.json`, and `read_record` gives both. Its token is in the job's comment (where squeue shows it)
and in the job's environment, where `check_in` compares it. Written by `submit`, `resume`, `cancel` and the job; read by
`status` and many others.
"""

import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Unpack, cast

from prime_hpc.config.errors import ConfigError, Problem
from prime_hpc.config.run_files import SUBMIT_JOB_JSON, SUBMIT_JSON
from prime_hpc.config.site import cluster_name
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.slurm.allocation import job_argument
from prime_hpc.store.attempts import process_token
from prime_hpc.store.io.file_age import file_age_s
from prime_hpc.store.run_dirs import STAMPS, SubmissionRecord, SubmissionState, known_json, known_record, read_record

SUBMISSION_VARIABLE = "PRIMEHPC_SUBMISSION"
"""In a job's environment: its token, a space, its run directory."""
LOCK = ".submitting"
_FOREIGN_LOCK_S = 300.0
"""A submit on another host, whose process cannot be looked at, counts as dead after so long without a sign of life."""
_SIGN_EVERY_S = 30.0


class SubmissionUnderWay(ConfigError):
    """Another command submits (or cancels) the same run or sweep right now. The command line exits with 2."""


def new_token() -> str:
    """Return the name of one submission."""
    return uuid.uuid4().hex


def cluster_of(run_dir: Path, read: Callable[[Path], SubmissionRecord | None] = read_record) -> str | None:
    """Return the other cluster of the site that a run was sent to, for `client.on_cluster`; None: this one.
    `read`: how its record is read, and what that raises."""
    other = (read(run_dir) or SubmissionRecord()).get("other_cluster")
    return None if other is None or other == cluster_name() else str(other)


def write_record(run_dir: Path, *, by_job: bool | None = None, **fields: Unpack[SubmissionRecord]) -> SubmissionRecord:
    """Change fields of the record, on disk when this returns.

    A client and the job may do so at once, each from its own host, where the other's newest word is not seen yet: each
    writes a file of its own, and who reads takes the later word about each field.

    Args:
        by_job: whether this is the job; None: as the environment says.
        fields: of `SubmissionRecord`; others stay as they are.

    Raises:
        OSError: it cannot be read now, or not be written; it is as it was.
    """
    record, now = known_json(run_dir / SUBMIT_JSON) or {}, time.time()
    if by_job is None:  # with `--export=NONE`, and of a script that was sent by hand, the job's id alone tells
        by_job = SUBMISSION_VARIABLE in os.environ or _is_its_job(run_dir)
    if by_job and record:
        job = known_json(run_dir / SUBMIT_JOB_JSON)
        known = job["fields"] if job is not None and job.get("of") == record["token"] else {}
        said = known | {name: [now, value] for name, value in fields.items()}
        _replace(run_dir / SUBMIT_JOB_JSON, {"of": record["token"], "fields": said})
    else:
        record[STAMPS] = record.get(STAMPS, {}) | dict.fromkeys(fields, now)
        _replace(run_dir / SUBMIT_JSON, record | dict(fields))
    return read_record(run_dir) or SubmissionRecord()


def _is_its_job(run_dir: Path) -> bool:
    """Return whether this process is in the job that a record names."""
    here = job_argument()
    return here is not None and here == (known_record(run_dir) or SubmissionRecord()).get("job_id")


def add_to_record(run_dir: Path, **fields: Unpack[SubmissionRecord]) -> None:
    """`write_record` of what Slurm has done already, which a full disk does not undo: it is said on standard error, and
    the next command finds the job by its token."""
    try:
        write_record(run_dir, **fields)
    except OSError as error:
        said = ", ".join(f"{name} = {value}" for name, value in fields.items())
        print(f"warning: {run_dir / SUBMIT_JSON} cannot be written: {error.strerror}; it lacks {said}", file=sys.stderr)


def open_record(
    run_dir: Path,
    *,
    token: str,
    state: SubmissionState,
    command: list[str],
    layout: str,
    cluster: str | None,
    **more: Any,
) -> SubmissionRecord:
    """Return the record of a new submission in place of an earlier one.

    Args:
        state: `sending`, `local`, or `sent` of what needs no sbatch of its own.
        layout: `packed`, `het` or `local`.
        cluster: Slurm's name, where it is known.
    """
    known = {"token": token, "state": state, "job_id": None, "time": time.time(), "command": command, "layout": layout}
    client = {"cluster": cluster, "successor": None, "host": socket.gethostname(), "pid": os.getpid()}
    record = {**known, **client, **more}
    _replace(run_dir / SUBMIT_JSON, record)
    return cast(SubmissionRecord, record)


def _replace(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record, and its name, to the disk before sbatch is called."""
    write_atomic(path, json.dumps(record, indent=1) + "\n", sync_name=True)


@contextmanager
def submitting(run_dir: Path) -> Iterator[None]:
    """Hold a run directory while it is submitted: two submits at once would make two jobs.

    A lock that a killed submit left behind is taken over.

    Raises:
        SubmissionUnderWay: another submit, or a cancel, is.
        ConfigError: the directory cannot be written.
    """
    lock = run_dir / LOCK
    me = {"host": socket.gethostname(), "pid": os.getpid(), "process": process_token(os.getpid())}
    mine = json.dumps({**me, "time": time.time(), "id": new_token()})
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        while not _take(lock, mine):
            found = _text_of(lock)
            if _is_held(lock, found):
                raise SubmissionUnderWay(
                    Problem(
                        f"{run_dir}: another submit or cancel of this run is under way ({_in_words(found)})", "name"
                    )
                )
            _move_aside(lock, found)
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be written: {error.strerror}", "output_dir") from error
    over = threading.Event()
    threading.Thread(target=_show_life, args=(lock, over), name="submitting", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        # --clean may have deleted it; that of another one is not ours to remove
        if _text_of(lock) == mine:
            lock.unlink(missing_ok=True)


def is_being_sent(run_dir: Path) -> bool:
    """Return whether a command that submits this run (or sweep) is at work."""
    return _is_held(run_dir / LOCK, _text_of(run_dir / LOCK))


def _show_life(lock: Path, over: threading.Event) -> None:
    """Touch a lock that is held: a large sweep takes longer to be sent, and to be ended, than a dead client's lock
    counts."""
    while not over.wait(_SIGN_EVERY_S):
        with suppress(OSError):
            os.utime(lock)


def _text_of(lock: Path) -> str:
    try:
        return lock.read_text(encoding="utf-8")
    except FileNotFoundError:  # its holder is done
        return ""


def _take(lock: Path, text: str) -> bool:
    try:
        descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return True


def _is_held(lock: Path, text: str) -> bool:
    """Return whether the client that wrote this lock may still be at work."""
    try:
        holder = json.loads(text)
        host, pid, since = holder["host"], int(holder["pid"]), float(holder["time"])  # by its own clock
    except (ValueError, KeyError, TypeError):
        # it was killed between creating the file and writing into it, or is about to
        with suppress(FileNotFoundError):
            return abs(file_age_s(lock)) < 5  # the file server's clock may have been set back
        return False
    if host != socket.gethostname():
        with suppress(FileNotFoundError):
            return abs(file_age_s(lock)) < _FOREIGN_LOCK_S
        return False
    if holder.get("process"):
        return process_token(pid) == holder["process"]
    from prime_hpc.runtime.process_tree import runs_since

    return runs_since(pid, since)


def _in_words(text: str) -> str:
    """Name the client that wrote this lock."""
    try:
        holder = json.loads(text)
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):  # about to be written
        return "it has just begun"


def _move_aside(lock: Path, text: str) -> None:
    """Remove a dead client's lock: of several that try, a rename has one winner."""
    aside = lock.with_name(f"{LOCK}.{new_token()}")
    try:
        lock.rename(aside)
    except FileNotFoundError:
        return
    if aside.read_text(encoding="utf-8") != text:  # somebody was quicker, and this is the new one's
        aside.rename(lock)
        return
    aside.unlink()


def local_controller(run_dir: Path) -> int | None:
    """Process of submitit that watches a run's local job, if it lives, and on this host."""
    record = read_record(run_dir) or SubmissionRecord()
    if record.get("state") != "local" or record.get("host") != socket.gethostname():
        return None
    import psutil

    try:
        pid = int(record["job_id"] or "")
        words = psutil.Process(pid).cmdline()
    except (psutil.Error, ValueError, TypeError):
        return None
    is_ours = any("submitit" in word for word in words) and any(str(run_dir) in word for word in words)
    return pid if is_ours else None


def submission_environment(run_dir: Path, token: str) -> dict[str, str]:
    """Return the variables that sbatch is given and hands on to the job, for `check_in`."""
    return {SUBMISSION_VARIABLE: f"{token} {run_dir}"}


def check_in(run_dir: Path, environ: Mapping[str, str]) -> str | None:
    """At the beginning of a Slurm job: may it run?

    A job of a submission that was replaced (its answer came so late that the run was submitted again) may not. The
    record of one that may learns its job id, if sbatch's answer was lost.
    Returns why not; None: it may. Raises OSError: the record cannot be read now, or not be written.
    """
    token, _, folder = environ.get(SUBMISSION_VARIABLE, "").partition(" ")
    record = known_record(run_dir)
    job_id = environ.get("SLURM_JOB_ID")
    is_of_array = "SLURM_ARRAY_TASK_ID" in environ
    if record is not None and not token and job_id is not None and record.get("successor") == job_id:
        # of an array's task: its script knows no token, and `--export=NONE` keeps the environment from it
        token, folder = record.get("successor_token") or "", str(run_dir)
    if record is None or not token or job_id is None or is_of_array or Path(folder) != run_dir:
        return None
    if record.get("successor_token") == token:  # after a script sent by hand, or an array's task
        write_record(
            run_dir, by_job=True, token=token, state="sent", job_id=job_id, successor=None, successor_token=None
        )
        return None
    if record.get("token") != token:
        return (
            f"this job ({job_id}) is of a submission whose answer came too late: the run was submitted again, as job "
            f"{record.get('job_id') or 'yet unknown'}; this one ends here"
        )
    if record.get("job_id") != job_id:
        successor = None if record.get("successor") == job_id else record.get("successor")
        write_record(run_dir, by_job=True, state="sent", job_id=job_id, successor=successor)
    return None
