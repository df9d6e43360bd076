"""submitit executors whose script is ours: homogeneous jobs, their arrays, het jobs.

submitit's own SlurmExecutor writes a script for one homogeneous srun and asks sacct for states. Ours sends the text of
`render`, and asks squeue, then sacct, then the run directory. What submitit offers on a job works: `state`, `done()`,
`wait()`, `result()` (the job's exit code), `stdout()`, `cancel()`.

    executor = RunExecutor(run_dir, text)
    job = executor.submit(local_job, str(run_dir), {})
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.core import core, utils
from submitit.slurm import slurm

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import ATTEMPTS_JSONL, JOB_SBATCH
from prime_hpc.config.site import has_accounting
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.slurm.client import SlurmError, on_cluster, run_slurm, sbatch_answer, send_script
from prime_hpc.slurm.jobs import ENDED, history, jobs
from prime_hpc.slurm.submission_record import cluster_of
from prime_hpc.store.run_dirs import read_rows

SUBMITIT_FOLDER = Path("logs") / "submitit"
LOST = "LOST"
"""State of a job of which Slurm, the accounting and the run directory know nothing (any more). Not one of Slurm's."""
_OUTCOMES = {
    "completed": "COMPLETED",
    "stopped": "COMPLETED",
    "interrupted": "CANCELLED",
    "requeued": "TIMEOUT",
    "preempted": "PREEMPTED",
    "node_lost": "NODE_FAIL",
}
"""How an attempt ended -> what Slurm would have said; anything else: FAILED."""


def submitit_folder(directory: Path) -> Path:
    """Return the folder in which submitit keeps its files of a run."""
    return directory / SUBMITIT_FOLDER


class RunWatcher(slurm.SlurmInfoWatcher):
    """States of all jobs of this process in one squeue call; never waits for a job that nobody knows any more."""

    def __init__(self) -> None:
        super().__init__(delay_s=30)
        self.run_dirs: dict[str, Path] = {}
        """Where each job's `attempts.jsonl` is."""

    def update(self) -> None:
        """Ask again about every job that has not ended."""
        open_jobs = self._registered - self._finished
        if not open_jobs:
            return
        self._num_calls += 1
        there: dict[str | None, set[str]] = {}
        for job_id in open_jobs:
            run_dir = self.run_dirs.get(job_id)
            there.setdefault(cluster_of(run_dir) if run_dir else None, set()).add(job_id)
        for cluster, ids in there.items():
            try:
                with on_cluster(cluster):
                    known = jobs(ids)
            except SlurmError as error:
                # states stay as they were: a controller that restarts ends no job
                logging.getLogger("submitit").warning("Slurm cannot be asked: %s", error)
                continue
            for job_id in ids:
                info = known.get(job_id)
                self._info_dict[job_id] = (
                    {"JobID": job_id, "State": info.state, "NodeList": info.nodes, "Reason": info.reason}
                    if info is not None
                    else {"JobID": job_id, "State": state_of_forgotten(job_id, self.run_dirs.get(job_id))}
                )
        self._last_status_check = time.time()
        self._finished |= {job_id for job_id in open_jobs if self.is_done(job_id, mode="cache")}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Return whether the job has ended, preempted ones too (one that is requeued is not PREEMPTED but PENDING)."""
        return self.get_state(job_id, mode=mode).upper() in (*ENDED, LOST)


def state_of_forgotten(job_id: str, run_dir: Path | None) -> str:
    """How a job ended that the controller has forgotten: as the accounting says, else the run directory, else LOST."""
    asked = history(job_id) if run_dir is None or has_accounting(run_dir) else []
    runs = [row for row in asked if row.job_id.partition("+")[0] == job_id]
    if runs:
        last = runs[-1].state
        return last if last in ENDED else LOST
    rows = [row for row in read_rows(run_dir / ATTEMPTS_JSONL) if str(row.get("job_id")) == job_id] if run_dir else []
    if not rows:
        return LOST
    if rows[-1].get("ended") is None:
        return "FAILED"  # it ran, and its batch process was killed before it could write its end
    return _OUTCOMES.get(str(rows[-1].get("outcome")), "FAILED")


class SubmittedPaths(utils.JobPaths):
    """submitit's paths, with the log where ours is: `<run_dir>/logs/slurm-<job id>.out`."""

    @property
    def stdout(self) -> Path:
        """The job's log, standard error included."""
        return self._folder.parent / f"slurm-{self.job_id}.out"

    @property
    def result_pickle(self) -> Path:
        """The file in which the job leaves its exit code; submitit's name for it, but nothing in it is unpickled."""
        return super().result_pickle.with_suffix(".json")


class RunJob(slurm.SlurmJob[Any]):
    """One run as a Slurm job. Can be made again from `<run_dir>/logs/submitit` and the job id."""

    watcher = RunWatcher()

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        """As submitit's.

        Args:
            folder: `<run_dir>/logs/submitit`.
            job_id: Slurm's, of an array's task `ID_k`.
            tasks: always the one process that runs the supervisor.
        """
        super().__init__(folder, job_id, tasks)
        self._paths = SubmittedPaths(folder, job_id=job_id, task_id=0)
        self.watcher.run_dirs[job_id] = Path(folder).parent.parent

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        """As submitit's, from JSON: the run directory may be a group's."""
        path, end = self.paths.result_pickle, time.monotonic() + self._results_timeout_s
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.2)
        if not path.exists():
            return super()._get_outcome_and_result()  # raises, with the end of the log
        outcome, code = json.loads(path.read_bytes())
        return str(outcome), int(code)

    def stdout(self) -> str | None:
        """Return the job's log so far, None where it has none."""
        path = self.paths.stdout
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None

    def cancel(self, check: bool = True) -> None:
        """End the job at once. Raises SlurmError, if `check`."""
        try:
            with on_cluster(cluster_of(self.watcher.run_dirs[self.job_id])):
                run_slurm(["scancel", self.job_id])
        except SlurmError:
            if check:
                raise


class RunExecutor(slurm.SlurmExecutor):
    """Sends one rendered script, of whichever layout."""

    job_class = RunJob

    def __init__(
        self,
        directory: Path,
        text: str,
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Make ready to send.

        Args:
            directory: the run's; a sweep's for an array. The script is kept there as `job.sbatch`.
            options: of sbatch, over those in the script, e.g. `--dependency=afternotok:12`.
            environment: variables that the job gets besides this process's.
        """
        super().__init__(submitit_folder(directory))
        self._directory = directory
        self._text = text
        self._options = list(options)
        self._extra = dict(environment or {})
        self.cluster: str | None = None
        """Name of the cluster that took the job, where it is another than this one."""

    @classmethod
    def affinity(cls) -> int:
        """Slurm is preferred wherever there is an executor of this kind: a missing sbatch is sbatch's own error."""
        return 2

    def _num_tasks(self) -> int:
        return 1

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._text

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        """Return the job id in sbatch's answer."""
        return sbatch_answer(string if isinstance(string, str) else string.decode())[0]

    def _submit_command(self, command: str) -> core.Job[Any]:
        return self.job_class(folder=self.folder, job_id=self._send())

    def _send(self) -> str:
        """Write the script and hand it to sbatch; returns the job id. Raises SlurmError."""
        script = self._directory / JOB_SBATCH
        write_atomic(script, self._make_submission_file_text("", ""))
        Path(self.folder).mkdir(parents=True, exist_ok=True)  # also `logs`, without which Slurm has no log
        job_id, self.cluster = send_script(script, self._options, self._extra)
        return job_id

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[core.Job[Any]]:
        if len(delayed_submissions) != 1:
            raise ConfigError("one script is one job; an array is made by `submit_points`")
        return core.PicklingExecutor._internal_process_submissions(self, delayed_submissions)

    def submit_points(self, points: Mapping[int, Path]) -> list[RunJob]:
        """Submit a homogeneous script with `--array` (Slurm has no arrays of het jobs); one job an index.

        submitit's `submit_array` pickles a function a task; here the task's index alone says what it runs, so that
        thousands of points cost one file.

        Args:
            points: array index -> run directory.

        Returns:
            jobs `ID_k`, in the order of `points`.

        Raises:
            SlurmError: sbatch refuses, hangs or is missing.
        """
        job_id = self._send()
        return [RunJob(submitit_folder(run_dir), f"{job_id}_{index}") for index, run_dir in points.items()]
