"""submitit's jobs over our scripts: what it reads back, with a Slurm that forgets, hangs and lies."""

import errno
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from submitit.core.utils import UncompletedJobError

from prime_hpc.config import ConfigError
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import write_site
from prime_hpc.launch.job import local_job
from prime_hpc.slurm.client import SlurmError, sbatch_answer
from prime_hpc.slurm.executors import LOST, RunExecutor, RunJob, state_of_forgotten, submitit_folder
from prime_hpc.store.attempts import Attempt, write_attempt
from tests.support.fake_slurm import FakeSlurm

SCRIPT = "#!/bin/bash\n#SBATCH --job-name=x --comment=prime-hpc:t\ntrue\n"
HET = "#!/bin/bash\n#SBATCH --comment=prime-hpc:t\n#SBATCH hetjob\n#SBATCH --comment=prime-hpc:t\ntrue\n"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    RunJob.watcher.clear()
    RunJob.watcher._registered.clear()
    monkeypatch.setattr(RunJob, "_results_timeout_s", 0)
    return fake


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "out dir" / "r"
    path.mkdir(parents=True)
    return path


def submitted(run_dir: Path, text: str = SCRIPT) -> RunJob:
    job = RunExecutor(run_dir, text).submit(local_job, str(run_dir), {})
    assert isinstance(job, RunJob)
    return job


def leave_result(job: RunJob, code: int) -> None:
    job.paths.result_pickle.write_text(json.dumps(["success", code]))


@pytest.mark.parametrize("text", [SCRIPT, HET])
def test_from_waiting_to_the_result(fake: FakeSlurm, run_dir: Path, text: str) -> None:
    job = submitted(run_dir, text)
    assert (job.job_id, job.num_tasks, job.state) == ("100", 1, "PENDING")
    assert (run_dir / "job.sbatch").read_text() == text
    assert job.submission().args == (str(run_dir), {})
    assert not job.done(force_check=True) and job.stdout() is None
    fake.change("100", state="RUNNING", nodes="n[1-2]")
    time.sleep(0.01)  # submitit ignores a forced look within a millisecond of the last
    assert job.get_info()["NodeList"] == ("n[1-2],n[1-2]" if text is HET else "n[1-2]")
    job.paths.stdout.write_text("hello\n")
    assert job.paths.stdout == run_dir / "logs" / "slurm-100.out" and job.stdout() == "hello\n"
    leave_result(job, 0)
    assert job.done() and job.result() == 0
    assert RunJob(submitit_folder(run_dir), "100").result() == 0, "from another process"


def test_a_run_that_failed_has_a_result_too(fake: FakeSlurm, run_dir: Path) -> None:
    job = submitted(run_dir)
    leave_result(job, 1)
    assert job.result() == 1 and job.exception() is None


@pytest.mark.parametrize("state", ["FAILED", "NODE_FAIL", "CANCELLED", "TIMEOUT", "PREEMPTED", "OUT_OF_MEMORY"])
def test_a_killed_batch_process_is_done(fake: FakeSlurm, run_dir: Path, state: str) -> None:
    job = submitted(run_dir)
    fake.change("100", state=state)
    job.paths.stdout.write_text("last words\n")
    assert job.done(force_check=True) and job.state == state
    with pytest.raises(UncompletedJobError, match=r"(?s)has not produced any output.*last words"):
        job.result()


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUE_HOLD"])
def test_what_has_not_ended(fake: FakeSlurm, run_dir: Path, state: str) -> None:
    job = submitted(run_dir)
    fake.change("100", state=state)
    assert not job.done(force_check=True) and job.state == state


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (None, LOST),
        ({}, "FAILED"),
        ({"ended": 2.0, "outcome": "completed"}, "COMPLETED"),
        ({"ended": 2.0, "outcome": "failed"}, "FAILED"),
        ({"ended": 2.0, "outcome": "interrupted"}, "CANCELLED"),
        ({"ended": 2.0, "outcome": "completed", "job_id": "99"}, LOST),
    ],
)
def test_a_job_that_slurm_forgot(fake: FakeSlurm, run_dir: Path, row: dict[str, Any] | None, state: str) -> None:
    job = submitted(run_dir)
    fake.forget("100")
    if row is not None:
        write_attempt(run_dir / "attempts.jsonl", Attempt(1, 1, 1.0, "first start", **{"job_id": "100", **row}))
    assert job.done(force_check=True) and job.state == state


def test_a_controller_that_restarts_ends_no_job(fake: FakeSlurm, run_dir: Path) -> None:
    job = submitted(run_dir)
    fake.change("100", state="RUNNING")
    assert not job.done(force_check=True)
    fake.behave("squeue", code=1, stderr="Unable to contact slurm controller")
    assert not job.done(force_check=True) and job.state == "RUNNING"


def test_many_jobs_are_one_question(fake: FakeSlurm, tmp_path: Path) -> None:
    made = []
    for name in "abc":
        (tmp_path / name).mkdir()
        made.append(submitted(tmp_path / name))
    RunJob.watcher.clear()
    before = len(fake.calls("squeue"))
    assert [job.state for job in made] == ["PENDING"] * 3
    assert len(fake.calls("squeue")) == before + 1


def test_an_array(fake: FakeSlurm, tmp_path: Path) -> None:
    text = SCRIPT.replace("--job-name=x", "--job-name=x --array=0-2%2")
    points = {index: tmp_path / f"p{index}" for index in range(3)}
    for path in points.values():
        submitit_folder(path).mkdir(parents=True)
    executor = RunExecutor(tmp_path / "sweep", text)
    (tmp_path / "sweep").mkdir()
    made = executor.submit_points(points)
    assert [job.job_id for job in made] == ["100_0", "100_1", "100_2"] and len(fake.calls("sbatch")) == 1
    assert [job.state for job in made] == ["PENDING"] * 3
    leave_result(made[1], 0)
    assert [job.done() for job in made] == [False, True, False]


def test_arrays_of_functions_are_refused(fake: FakeSlurm, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="submit_points"):
        RunExecutor(run_dir, SCRIPT).map_array(local_job, ["a", "b"], [{}, {}])
    assert fake.jobs() == []


def test_options_and_environment_reach_sbatch(fake: FakeSlurm, run_dir: Path) -> None:
    executor = RunExecutor(
        run_dir, SCRIPT, options=["--dependency=afterany:7"], environment={"PRIMEHPC_SUBMISSION": "t /d"}
    )
    executor.submit(local_job, str(run_dir), {})
    (job,) = fake.jobs()
    assert job["dependency"] == "afterany:7" and job["environ"]["PRIMEHPC_SUBMISSION"] == "t /d"


def test_what_a_site_says_of_a_job_that_it_takes_is_shown_once(
    fake: FakeSlurm, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = f"sbatch: Your project {tmp_path.name} has used 95 % of its hours.\nsbatch: The job goes to partition all."
    fake.behave("sbatch", stderr=words)
    for name in ("one", "two"):
        RunExecutor(tmp_path / name, SCRIPT).submit(local_job, str(tmp_path / name), {})
    assert len(fake.jobs()) == 2
    assert capfd.readouterr().err == f"{words}\n"


def test_a_reader_that_is_gone_costs_no_job_its_id(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.behave("sbatch", stderr=f"sbatch: words for {tmp_path.name}")

    def write(_: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "nobody reads this")

    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=lambda: None))
    job = RunExecutor(tmp_path / "one", SCRIPT).submit(local_job, str(tmp_path / "one"), {})
    assert job.job_id == fake.jobs()[0]["id"]


@pytest.mark.parametrize(
    ("answer", "job_id"),
    [("12", "12"), ("12;cluster", "12"), ("site: hello\n12\n", "12")],
)
def test_answers_of_sbatch(answer: str, job_id: str) -> None:
    assert RunExecutor._get_job_id_from_submission_command(answer) == job_id


def test_an_answer_that_is_none() -> None:
    with pytest.raises(SlurmError, match="holds no job id: 'queued, thanks'"):
        RunExecutor._get_job_id_from_submission_command(b"queued, thanks\n")


def test_cancel(fake: FakeSlurm, run_dir: Path) -> None:
    job = submitted(run_dir)
    job.cancel()
    assert job.done(force_check=True) and job.state == "CANCELLED"
    fake.behave("scancel", code=1, stderr="scancel: error: no")
    job.cancel(check=False)
    with pytest.raises(SlurmError):
        job.cancel()


@pytest.mark.parametrize(
    "answer", ["12\n", "12;cluster\n", "Welcome!\n12\n", "12;c\nThank you for using this site\n\n"]
)
def test_the_job_id_in_whatever_a_site_says_around_it(answer: str) -> None:
    assert sbatch_answer(answer)[0] == "12"


def test_an_answer_without_a_job_id_is_an_error() -> None:
    with pytest.raises(SlurmError, match="holds no job id"):
        sbatch_answer("Submitted\n")


def test_accounting_that_the_profile_denies_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    assert state_of_forgotten("77", tmp_path) == LOST
    assert len(fake.calls("sacct")) == 1
    write_site(SiteConfig(name="x", sacct=False), tmp_path)
    assert state_of_forgotten("77", tmp_path) == LOST
    assert len(fake.calls("sacct")) == 1


def test_a_result_that_is_a_pickle_is_not_run(fake: FakeSlurm, run_dir: Path) -> None:
    job, mark = submitted(run_dir), run_dir / "mark"
    code = f"cos\nsystem\n(S'touch {mark}'\ntR."
    job.paths.result_pickle.write_text(code)
    fake.change("100", state="COMPLETED")
    with pytest.raises(ValueError, match="JSON|Expecting"):
        job.result()
    job.paths.result_pickle.unlink()
    job.paths.result_pickle.with_suffix(".pkl").write_text(code)
    job._results_timeout_s = 0
    with pytest.raises(UncompletedJobError):
        job.result()
    assert not mark.exists()
