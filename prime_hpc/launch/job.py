"""Entry point of a job: the supervisor, as a submitit function on this machine or as a Slurm job's batch process.

    python -m prime_hpc.launch.job RUN_DIR [-- EXPERIMENT_FILE [--KEY VALUE ...]]
    python -m prime_hpc.launch.job --point SWEEP_DIR INDEX

The arguments after `--` are what the script was rendered from: a script that was sent with plain sbatch prepares the
run directory from them. Nothing else of `launch` is imported where the run directory is there already.
"""

import json
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prime_hpc.runtime.atomic_write import write_atomic

if TYPE_CHECKING:
    from prime_hpc.store.run_dirs import SubmissionRecord

USAGE = "usage: python -m prime_hpc.launch.job RUN_DIR [-- FILE [--KEY VALUE ...]] | --point SWEEP_DIR INDEX"


def local_job(run_dir: str, environ: dict[str, str | None]) -> int:
    """Supervise the run in `run_dir`; returns its exit code. `environ`: variables that submitit's LocalExecutor has
    changed, as they were (None: not set): it hides all GPUs from a job that asked for none."""
    from prime_hpc.supervisor.main import supervise

    if os.getsid(0) != os.getpid():
        os.setsid()  # a Ctrl-C at the terminal reaches the follower, which ends the job in good order
    logging.getLogger("submitit").setLevel(logging.WARNING)  # else it calls a job that returned anything successful
    restored = {**os.environ, **environ}
    return supervise(run_dir, {name: value for name, value in restored.items() if value is not None})


def slurm_job(arguments: list[str]) -> int:
    """Run the batch process of a Slurm job; returns the job's exit code.

    Raises:
        ConfigError: the arguments, the sweep or the experiment are wrong.
        Unreadable: the run directory cannot be read until the deadline.
    """
    from prime_hpc.config.errors import ConfigError
    from prime_hpc.slurm.allocation import forget_surrounding_job
    from prime_hpc.store.io.retry_reads import Patience
    from prime_hpc.supervisor.attempt.early_end import LOAD_S, await_run_dir, tell_unreadable_apart

    patience, is_of_array = Patience(LOAD_S), arguments[:1] == ["--point"]
    forget_surrounding_job(os.environ, is_of_array=is_of_array)
    if len(arguments) == 3 and is_of_array:
        from prime_hpc.launch.sweep.state import point_run_dir

        sweep_dir, index = Path(arguments[1]), int(arguments[2])
        run_dir = patience(lambda: tell_unreadable_apart(lambda: point_run_dir(sweep_dir, index)))
    elif len(arguments) >= 1 and (len(arguments) == 1 or arguments[1] == "--"):
        run_dir = Path(arguments[0])
        if not await_run_dir(run_dir, os.environ):
            if len(arguments) < 3:
                raise ConfigError(f"{run_dir} holds no run.yaml, and the script names no experiment after --")
            _prepare(run_dir, arguments[2:])
        from prime_hpc.slurm.queue import forget_submission_that_is_over, yield_to_twin
        from prime_hpc.slurm.submission_record import check_in

        refusal = patience(lambda: yield_to_twin(run_dir.resolve(), os.environ))
        refusal = refusal or patience(lambda: check_in(run_dir.resolve(), os.environ))
        if refusal:
            print(refusal, file=sys.stderr, flush=True)
            return 0  # a duplicate is no failure: it must not come back
        patience(lambda: forget_submission_that_is_over(run_dir.resolve(), os.environ))
    else:
        raise ConfigError(USAGE)
    from prime_hpc.store.run_dirs import read_record
    from prime_hpc.supervisor.attempt.restart_policy import EXIT_AGAIN, mode_of_run
    from prime_hpc.supervisor.main import supervise

    mode = patience(lambda: tell_unreadable_apart(lambda: mode_of_run(run_dir)))
    if mode == "successor":
        _queue_successor(run_dir)
    record = read_record(run_dir)
    code = supervise(run_dir, in_job=True)
    # it would start all the same: this end is none that is well
    if mode == "successor" and code not in (0, EXIT_AGAIN):
        _drop_successor(run_dir, record)
    # a result under an id that comes back would call it done
    if code != EXIT_AGAIN or mode == "successor" or _is_succeeded(run_dir):
        _leave_result(run_dir, code)
    return code


def _queue_successor(run_dir: Path) -> None:
    """Queue the job that takes over should this one end ill; where Slurm refuses, the run goes on and asks again."""
    from loguru import logger

    from prime_hpc.slurm.allocation import job_argument
    from prime_hpc.supervisor.attempt.successor import FIRST_TRY_S, try_successor

    refusal = try_successor(run_dir, job_argument() or "", FIRST_TRY_S)
    if refusal is not None:
        logger.warning(f"no successor waits behind this job yet: {refusal.words}")


def _is_succeeded(run_dir: Path) -> bool:
    """Return whether another job follows this one, which Slurm would not requeue."""
    from prime_hpc.store.run_dirs import read_record

    return bool((read_record(run_dir) or {}).get("successor"))


def _drop_successor(run_dir: Path, record: "SubmissionRecord | None") -> None:
    """Take it out of the queue again. `record`: as it was, where the run directory is gone."""
    from loguru import logger

    from prime_hpc.slurm.client import SlurmError
    from prime_hpc.slurm.queue import drop_successor

    try:
        drop_successor(run_dir, record)
    except SlurmError as error:
        logger.warning(f"the successor may start: {error}")


def _prepare(run_dir: Path, argv: list[str]) -> None:
    """Make the run directory that `submit` would have made.
    Raises ConfigError: the experiment is wrong, or names another run directory than the script does."""
    from prime_hpc.config import ConfigError, load_experiment
    from prime_hpc.config.site import load_site, write_site
    from prime_hpc.launch.prepare import prepare_run

    loaded = load_experiment(argv, "submit", is_begun=True)  # whoever rendered the script has checked it
    if loaded.experiment.run_dir.resolve() != run_dir.resolve():
        raise ConfigError(
            f"the script says {run_dir}, but the experiment, read in {Path.cwd()}, says {loaded.experiment.run_dir}: "
            "render the script again"
        )
    site = load_site(loaded.experiment.slurm.site)
    made = prepare_run(loaded, site)
    write_site(site, made)


def _leave_result(run_dir: Path, code: int) -> None:
    """Write the result where submitit looks for it, so that `job.result()` works for a job of ours."""
    from prime_hpc.slurm.allocation import job_argument

    folder = run_dir / "logs" / "submitit"
    job_id = job_argument()
    if job_id is None or not folder.is_dir():
        return
    final = folder / f"{job_id}_0_result.json"
    write_atomic(final, json.dumps(["success", code]), sync=False)


def main() -> None:
    """Entry point of the batch script."""
    from prime_hpc.config.errors import ConfigError
    from prime_hpc.runtime.failures import missing_home
    from prime_hpc.store.errors import Unreadable
    from prime_hpc.supervisor.attempt.early_end import EXIT_UNREADABLE, requeue_blindly
    from prime_hpc.supervisor.attempt.restart_policy import EXIT_AGAIN

    try:
        sys.exit(slurm_job(sys.argv[1:]))
    except Unreadable as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_AGAIN if requeue_blindly(os.environ) else EXIT_UNREADABLE)
    except (ConfigError, RuntimeError) as error:
        if not (reason := str(error) if isinstance(error, ConfigError) else missing_home(error)):
            raise
        print(f"error: {reason}", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
