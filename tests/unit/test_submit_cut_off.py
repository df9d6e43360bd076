"""A `submit` that is cut off, by a silent Slurm, a kill or another submit (tests/support/fake_slurm.py)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from prime_hpc.config import ConfigError
from prime_hpc.launch import submission
from prime_hpc.launch.submission import submit
from prime_hpc.runtime.process_tree import alive, family
from prime_hpc.slurm import client, sbatch_errors, submission_record
from prime_hpc.slurm.sbatch_errors import SlurmRefused
from prime_hpc.store.run_dirs import read_record
from tests.support import forked
from tests.support.fake_slurm import FakeSlurm
from tests.support.submissions import cancel, cancel_beside, load, run_dir, submit_in_a_process, wait_for


def take_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sbatch take the job and be given up, as if it had hung then for all of its time."""

    def send_script(*given: Any) -> NoReturn:
        client.send_script(*given)
        raise client.SlurmError(["sbatch"], None, f"timed out: no answer within {client.SBATCH_TIMEOUT_S:g} s")

    monkeypatch.setattr("prime_hpc.slurm.executors.send_script", send_script)


def test_a_hanging_sbatch_that_took_the_job(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take_without_an_answer(monkeypatch)
    assert submit(load(config)) == 0
    (job,) = fake.jobs()
    record = read_record(run_dir(config))
    assert record is not None and record["job_id"] == job["id"] and record["state"] == "sent"
    assert "answer was lost" in capsys.readouterr().err


def test_a_hanging_sbatch_and_a_silent_controller_leave_it_open(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take_without_an_answer(monkeypatch)
    down = {"code": 1, "stderr": "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"}
    fake.behave("squeue", **down)
    with pytest.raises(SlurmRefused, match="Whether the job was queued is not known: give the same command again"):
        submit(load(config))
    before = read_record(run_dir(config))
    with pytest.raises(SlurmRefused, match="nothing was changed"):
        submit(load(config))
    assert read_record(run_dir(config)) == before
    fake.behave("squeue")
    capsys.readouterr()
    assert submit(load(config)) == 0
    assert len(fake.jobs()) == 1
    assert "the earlier submit had reached Slurm" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", ["Socket timed out on send/recv operation", "Zero Bytes were transmitted or received"]
)
def test_a_refusal_that_is_none(fake: FakeSlurm, config: Path, words: str) -> None:
    """slurmctld accepted the job, and its answer to sbatch was lost on the way."""
    fake.behave("sbatch", say="")
    assert submit(load(config)) == 0  # no job id in the answer either
    assert len(fake.jobs()) == 1
    assert client.SlurmError(["sbatch"], 1, f"sbatch: error: Batch job submission failed: {words}").is_unreachable


@pytest.mark.parametrize(
    ("how", "jobs_at_kill"),
    [({"hang": "before"}, 0), ({"hang": "after"}, 1), ({"late": 0.5}, 0)],
    ids=["before sbatch's work", "after it", "the controller answers late"],
)
def test_killed_in_the_middle_of_submit(fake: FakeSlurm, config: Path, how: dict[str, Any], jobs_at_kill: int) -> None:
    fake.behave("sbatch", **how)
    process = submit_in_a_process(config, fake)
    wait_for(lambda: fake.calls("sbatch") and len(fake.jobs()) >= jobs_at_kill)
    record = read_record(run_dir(config))
    assert record is not None and record["state"] == "sending" and record["job_id"] is None
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=280)
    if "late" in how:
        wait_for(fake.jobs)
    fake.behave("sbatch")
    assert submit(load(config)) == 0
    (job,) = fake.jobs()
    record = read_record(run_dir(config))
    assert record is not None and record["state"] == "sent" and record["job_id"] == job["id"]
    if jobs_at_kill:
        assert len(fake.calls("sbatch")) == 1, "the job that was there was found, none was sent"


def test_the_killed_clients_sbatch_dies_with_it(fake: FakeSlurm, config: Path) -> None:
    fake.behave("sbatch", hang="before")
    process = submit_in_a_process(config, fake)
    wait_for(lambda: fake.calls("sbatch"))
    children = family(process.pid)[1:]
    assert children
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=280)
    wait_for(lambda: not alive(children))


def test_interrupted_while_sbatch_is_asked(fake: FakeSlurm, config: Path) -> None:
    fake.behave("sbatch", hang="after")
    process = submit_in_a_process(config, fake)
    wait_for(fake.jobs)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=280)
    assert process.returncode == 130 and "whether the job was queued is not known" in err
    assert cancel(config).outcome == "pending" and fake.jobs()[0]["state"] == "CANCELLED"


def test_a_job_that_arrives_later_than_all_patience_does_not_run(fake: FakeSlurm, config: Path) -> None:
    """The one case in which two jobs can be in the queue: the older one ends at its first line."""
    fake.behave("sbatch", late=3.0)
    process = submit_in_a_process(config, fake)
    wait_for(lambda: fake.calls("sbatch"))
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=280)
    fake.behave("sbatch")
    assert submit(load(config)) == 0
    wait_for(lambda: len(fake.jobs()) == 2)
    record = read_record(run_dir(config))
    assert record is not None
    for job in fake.jobs():
        verdict = submission_record.check_in(run_dir(config), {**job["environ"], "SLURM_JOB_ID": job["id"]})
        assert (verdict is None) == (job["id"] == record["job_id"])
        assert verdict is None or "submitted again" in verdict


def submit_and_die_at(config: Path, fake: FakeSlurm, point: int) -> bool:
    """Submit in a process of its own that dies when it forces the nth file to disk; False: it was done before."""
    done = forked.run(["tests.support.dying_submit", str(config), str(point)], env=fake.environ)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode != 0


@pytest.mark.exhaustive
def test_killed_at_every_write_of_submit(fake: FakeSlurm, config: Path) -> None:
    import shutil

    point = 1
    while submit_and_die_at(config, fake, point):
        had = len(fake.jobs())
        assert submit_again(config) == 0
        (job,) = fake.jobs()
        record = read_record(run_dir(config))
        assert record is not None and (record["state"], record["job_id"]) == ("sent", job["id"])
        assert had in (0, 1)
        fake.forget(job["id"])
        shutil.rmtree(run_dir(config))
        point += 1
    assert point > 8, "the record is written twice, the snapshot has five files"


def submit_again(config: Path) -> int:
    """The next submit of a run whose last one may have gone through or not."""
    try:
        return submit(load(config))
    except ConfigError as error:
        assert "this run is in Slurm as job" in str(error)
        return 0


def test_killed_before_the_record(fake: FakeSlurm, config: Path) -> None:
    """A directory with a config and a dead client's lock, but no record."""
    submit(load(config))
    (run_dir(config) / "submit.json").unlink()
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    lock = {"host": os.uname().nodename, "pid": int(dead.stdout), "time": time.time(), "id": "x"}
    (run_dir(config) / submission_record.LOCK).write_text(json.dumps(lock))
    fake.forget("100")
    assert submit(load(config)) == 0
    assert len(fake.jobs()) == 1 and not (run_dir(config) / submission_record.LOCK).exists()


def test_two_submits_at_once(fake: FakeSlurm, config: Path) -> None:
    fake.behave("sbatch", hang="before", only_once=True)
    process = submit_in_a_process(config, fake)
    wait_for(lambda: fake.calls("sbatch"))
    try:
        with pytest.raises(ConfigError, match="another submit or cancel of this run is under way"):
            submit(load(config))
    finally:
        process.kill()
        process.communicate(timeout=280)
    assert fake.jobs() == []


def test_a_submit_before_this_one_is_found_though_its_directory_was_not_to_be_seen(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made a moment ago, or a network file system's client remembers for a minute that it was not there."""
    look = submission.refuse_anothers

    def meanwhile(directory: Path) -> None:
        monkeypatch.setattr(submission, "refuse_anothers", look)
        submit(load(config))

    monkeypatch.setattr(submission, "refuse_anothers", meanwhile)
    with pytest.raises(ConfigError, match="this run is in Slurm as job 100"):
        submit(load(config))
    assert len(fake.jobs()) == 1


def test_cancel_of_a_job_whose_answer_was_lost(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    submission_record.write_record(run_dir(config), state="sending", job_id=None)
    assert cancel(config).outcome == "pending" and fake.jobs()[0]["state"] == "CANCELLED"


def test_cancel_waits_for_the_job_of_a_submit_that_was_cut_off(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sbatch_errors, "QUEUE_ANSWER_S", 60.0)
    submit(load(config))
    [job] = fake.jobs()
    fake.forget(job["id"])
    submission_record.write_record(run_dir(config), state="sending", job_id=None, time=time.time())

    asked = len(fake.calls("squeue"))

    def arrives() -> None:
        wait_for(lambda: len(fake.calls("squeue")) > asked + 1)  # not there when it was first asked for
        fake.add(comment=job["comment"])

    result = cancel_beside(config, arrives)
    assert result.outcome == "pending" and fake.jobs()[0]["state"] == "CANCELLED"


def test_cancel_of_a_run_that_is_being_submitted_is_refused(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    submission_record.write_record(run_dir(config), state="sending", job_id=None)
    with (
        submission_record.submitting(run_dir(config)),
        pytest.raises(ConfigError, match="is being submitted right now"),
    ):
        cancel(config)
    assert fake.calls("scancel") == []
