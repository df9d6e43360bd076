"""An attempt that ends before any role was started: because something cannot be read, or because somebody asked."""

import errno
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from loguru import logger

from prime_hpc.config import ConfigError, Experiment, load_run
from prime_hpc.config.run_files import RUN_YAML
from prime_hpc.config.sections.supervisor import SupervisorConfig
from prime_hpc.slurm.allocation import job_argument
from prime_hpc.store.attempts import NOT_BEGUN, Attempt, begin, write_attempt
from prime_hpc.store.errors import Unreadable
from prime_hpc.store.io import files
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.run_paths import RunPaths, current_incarnation
from prime_hpc.supervisor.attempt.restart_policy import return_to_queue
from prime_hpc.supervisor.stop_requests import Controls, StopRequest

EXIT_UNREADABLE = 74
"""EX_IOERR (sysexits.h): the file system does not give what the start of an attempt reads. Nothing was changed."""
LOAD_S = SupervisorConfig().read_timeout_s
"""How long to wait for `run.yaml`, which says how long to wait for everything else."""
T = TypeVar("T")
BLIND_RESTARTS = 20
"""How often a job that cannot even read its run directory asks Slurm to start it again."""


class StartEnded(Exception):
    """Somebody wants the attempt to end while it begins."""

    def __init__(self, request: StopRequest) -> None:
        super().__init__(request.reason)
        self.request = request


def check_stop_request(controls: Controls) -> None:
    """Raise StartEnded where a signal, the file STOP or the time limit asks for an end."""
    request = controls.poll()
    if request is not None:
        raise StartEnded(request)


def load_patiently(run_dir: Path) -> Experiment:
    """Load the run's experiment. That its run.yaml is not there is no wrong config here: whoever started this wrote it.

    Raises:
        ConfigError: it is not valid.
        Unreadable: it cannot be read until the deadline.
    """
    return Patience(LOAD_S)(lambda: tell_unreadable_apart(lambda: load_run(run_dir)))


def tell_unreadable_apart(read: Callable[[], T]) -> T:
    """Return what `read` returns; a ConfigError that only means that a file could not be read becomes Unreadable."""
    try:
        return read()
    except ConfigError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno == errno.EISDIR:
            raise
        raise Unreadable.of(cause) from error


def await_run_dir(run_dir: Path, environ: Mapping[str, str]) -> bool:
    """Return whether a job's run directory is prepared. That of a job which lived before is: it is waited for.
    Raises Unreadable: that cannot be told until the deadline."""

    def look() -> bool:
        names = files.list_dir(run_dir)
        if RUN_YAML not in names and int(environ.get("SLURM_RESTART_COUNT") or 0) > 0:
            raise Unreadable(run_dir, "this job lived there before, and it holds no run.yaml: is it mounted here?")
        return RUN_YAML in names

    return Patience(LOAD_S)(look)


def write_early_end(paths: RunPaths, request: StopRequest, job_id: str | None) -> Attempt:
    """Write the line of an attempt that ended so, and return it.
    Raises StoreError, OSError: the directory cannot be read or written."""
    attempt = begin(
        paths.attempts,
        incarnation=current_incarnation(paths),
        why=NOT_BEGUN,
        resume_step=None,
        job_id=job_id,
    )
    attempt.ended, attempt.outcome, attempt.cause = time.time(), request.outcome, request.reason
    attempt.exit_code, attempt.next = request.code, "slurm" if request.by_slurm else None
    attempt.lost_nodes = list(request.lost_nodes)
    write_attempt(paths.attempts, attempt)
    return attempt


def requeue_blindly(environ: Mapping[str, str]) -> bool:
    """Ask Slurm to start a job again that cannot read its own run directory, and so not how it is meant to come back.

    Where a successor waits (afternotok), the exit code lets it start, whatever Slurm answers here.
    """
    job_id, restarts = job_argument(environ), int(environ.get("SLURM_RESTART_COUNT") or 0)
    if job_id is None or restarts >= BLIND_RESTARTS:
        logger.error("the job does not come back by itself: it was started again often enough")
        return False
    return return_to_queue(job_id, "requeue", 0, restarts=restarts)
