"""A sweep without Slurm: its points as local jobs, so many at a time, in the foreground."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prime_hpc.config.run_files import ATTEMPTS_JSONL, STOP
from prime_hpc.config.secret import masked_command
from prime_hpc.launch.local import end_local, start_job
from prime_hpc.launch.sweep.state import PointRow, Sweep, new_submit
from prime_hpc.slurm.submission_record import open_record, write_record
from prime_hpc.store.attempts import read_attempts

POLL_S = 0.5
END_TIMEOUT_S = 60.0


def run_here(sweep: Sweep, rows: Sequence[PointRow], throttle: int) -> int:
    """Run prepared points to their ends; a point that fails stops no other.

    Ctrl-C ends those that run in good order; they and those that wait are left for `sweep resume`.
    Returns 0, 1 where a point failed, 130 where it was interrupted.
    """
    stop = sweep.dir / STOP
    stop.unlink(missing_ok=True)
    waiting = list(rows)
    running: dict[str, tuple[PointRow, Any]] = {}
    failed = 0
    try:
        while waiting or running:
            while waiting and len(running) < throttle:
                row = waiting.pop(0)
                job = _start(sweep, row)
                running[row.name] = (row, job)
                _say(f"{row.name}: started as local job {job.job_id}, {len(waiting)} points wait")
            for name, (row, job) in list(running.items()):
                if job.done():
                    del running[name]
                    (sweep.run_dir(row) / STOP).unlink(missing_ok=True)  # it ended by itself meanwhile
                    code = _exit_code(job)
                    failed += code != 0
                    _say(f"{name}: {_ending(sweep, row, code)}")
            if stop.exists():
                _say(f"{stop} is there: the points that run save and end, no other begins")
                _stop(sweep, running, waiting)
                waiting = []
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        _say("interrupted: ending the points that run; `sweep resume` goes on with them")
        _end_all(sweep, running)
        return 130
    return 1 if failed else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _start(sweep: Sweep, row: PointRow) -> Any:
    """Start a point as a local job of submitit's."""
    run_dir = sweep.run_dir(row)
    submit = new_submit("local", [row.index])
    sweep.record(submit)
    open_record(
        run_dir, token=submit.token, state="local", command=masked_command(sys.argv), layout="local", cluster=None
    )
    job = start_job(run_dir)
    write_record(run_dir, job_id=str(job.job_id))
    sweep.update(submit, state="sent", job_id=str(job.job_id))
    return job


def _exit_code(job: Any) -> int:
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        return int(job.result())
    except (FailedJobError, UncompletedJobError):  # killed, or it raised: its log says which
        return 1


def _ending(sweep: Sweep, row: PointRow, code: int) -> str:
    rows = read_attempts(sweep.run_dir(row) / ATTEMPTS_JSONL)
    if rows and rows[-1].get("outcome"):
        return f"{rows[-1]['outcome']} ({rows[-1].get('cause')})"
    return f"exit code {code} before an attempt began; see {sweep.run_dir(row) / 'logs'}"


def _stop(sweep: Sweep, running: Mapping[str, tuple[PointRow, Any]], waiting: Sequence[PointRow]) -> None:
    """Do what `sweep cancel` asks for: those that run save and end, those that wait never begin."""
    rows = [row for row, _ in running.values()]
    sweep.update(new_submit("cancel", [row.index for row in (*rows, *waiting)]), state="sent")
    for row in rows:
        (sweep.run_dir(row) / STOP).touch()
    (sweep.dir / STOP).unlink(missing_ok=True)


def _end_all(sweep: Sweep, running: Mapping[str, tuple[PointRow, Any]]) -> None:
    """Ask the supervisors to end, and wait until they have."""
    for row, job in running.values():
        end_local(sweep.run_dir(row), controller=int(job.job_id))
    deadline = time.monotonic() + END_TIMEOUT_S
    while not all(job.done() for _, job in running.values()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if running:
        sweep.update(new_submit("cancel", [row.index for row, _ in running.values()]), state="sent")
