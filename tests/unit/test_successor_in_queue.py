"""A job's record: its successor, which waits behind it from the beginning and goes with it; and a script that is sent
by hand again."""

import shutil
from pathlib import Path

import pytest

from prime_hpc.launch.submission import submit
from prime_hpc.slurm import queue, submission_record
from prime_hpc.slurm.jobs import JobInfo
from prime_hpc.slurm.queue import (
    drop_successor,
    forget_submission_that_is_over,
    jobs_of,
    queue_successor,
    yield_to_twin,
)
from prime_hpc.store.run_dirs import read_record
from tests.support.fake_slurm import FakeSlurm
from tests.support.submissions import ended, load, run_dir


def test_a_successor_waits_from_the_beginning(fake: FakeSlurm, config: Path) -> None:
    submit(load(config, "--slurm.restart.how", "successor"))
    first, second = fake.jobs()
    record = read_record(run_dir(config))
    assert record is not None and (record["job_id"], record["successor"]) == (first["id"], second["id"])
    assert second["dependency"] == f"afternotok:{first['id']}" and second["comment"] == first["comment"]
    assert "--kill-on-invalid-dep=yes" in fake.calls("sbatch")[1]
    # the first ends ill; the second runs, and has the next one queued: once
    fake.change(first["id"], state="TIMEOUT")
    fake.change(second["id"], state="RUNNING", nodes="n1")
    inside = {**second["environ"], "SLURM_JOB_ID": second["id"]}
    assert submission_record.check_in(run_dir(config), inside) is None
    assert read_record(run_dir(config))["job_id"] == second["id"]  # type: ignore[index]
    third = queue_successor(run_dir(config), second["id"])
    assert queue_successor(run_dir(config), second["id"]) == third
    assert [job["dependency"] for job in fake.jobs()][2:] == [f"afternotok:{second['id']}"]
    assert drop_successor(run_dir(config)) == third
    assert fake.jobs()[2]["state"] == "CANCELLED"


def test_the_successor_of_a_run_whose_directory_is_gone_does_not_start_it_over(fake: FakeSlurm, config: Path) -> None:
    submit(load(config, "--slurm.restart.how", "successor"))
    before = read_record(run_dir(config))
    shutil.rmtree(run_dir(config))
    assert drop_successor(run_dir(config)) is None
    assert drop_successor(run_dir(config), before) == fake.jobs()[1]["id"]
    assert fake.jobs()[1]["state"] == "CANCELLED" and not run_dir(config).exists()


def test_a_script_sent_by_hand_gets_a_successor_too(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    (run_dir(config) / "submit.json").unlink()
    fake.change("100", comment="prime-hpc", state="RUNNING")
    successor = queue_successor(run_dir(config), "100")
    record = read_record(run_dir(config))
    assert record is not None and record["successor"] == successor and record["job_id"] == "100"
    assert queue_successor(run_dir(config), "100") == successor


def test_of_two_that_wait_one_is_left_behind_the_job_that_runs(fake: FakeSlurm, config: Path) -> None:
    """`submit` and the job that began meanwhile each queued one, or one came later than its sbatch was waited for."""
    submit(load(config, "--slurm.restart.how", "successor"))
    first, second = fake.jobs()
    late = fake.add(comment=first["comment"], dependency=f"afternotok:{first['id']}")
    fake.change(first["id"], state="TIMEOUT")
    fake.change(second["id"], state="RUNNING", nodes="n1")
    assert queue_successor(run_dir(config), second["id"]) == late
    assert ["scontrol", "update", f"JobId={late}", f"Dependency=afternotok:{second['id']}"] in fake.calls("scontrol")
    other = fake.add(comment=first["comment"], reason="Dependency")
    fake.change(late, reason="Dependency")
    asked = len(fake.calls("scontrol"))
    assert queue_successor(run_dir(config), second["id"]) == late
    assert {job["id"]: job["state"] for job in fake.jobs()}[other] == "CANCELLED"
    assert len(fake.calls("scontrol")) == asked


@pytest.mark.parametrize("layout", ["packed", "het"])
def test_of_two_that_are_released_at_once_one_goes_on(fake: FakeSlurm, config: Path, layout: str) -> None:
    """The job that they waited for died before it had left one: the later one fenced the earlier one, whose own
    successor fenced the later one."""
    submit(load(config, "--slurm.restart.how", "successor"))
    first, second = fake.jobs()
    more = {"state": "RUNNING", "nodes": "n1", "size": 1 if layout == "packed" else 2}
    third = fake.add(comment=first["comment"], start="2026-01-01T10:00:01", **more)
    fake.change(first["id"], state="COMPLETING")
    fake.change(second["id"], start="2026-01-01T10:00:01", **more)

    def end(job_id: str) -> str | None:
        het = {"SLURM_HET_SIZE": "2", "SLURM_JOB_ID_HET_GROUP_0": job_id} if layout == "het" else {}
        return yield_to_twin(run_dir(config), {**second["environ"], "SLURM_JOB_ID": job_id, **het})

    assert end(second["id"]) is None
    assert end(third) == f"job {second['id']} has this run already; this one ({third}) ends here"
    assert end("7") is None, "of another run, from a shell inside a job of this one"
    fake.change(third, start="2026-01-01T10:00:00")
    assert end(third) is None and f"job {third} has" in str(end(second["id"]))
    fake.behave("squeue", code=1, stderr="Unable to contact slurm controller (connect failure)")
    assert end(second["id"]) is None


def test_a_script_that_is_sent_by_hand_again_is_no_job_of_a_submission_that_is_over(
    fake: FakeSlurm, config: Path
) -> None:
    """Its own job was told as lost, not found by `cancel`, and `resume` made a second one beside it."""
    submit(load(config))
    log = run_dir(config) / "logs" / "slurm-101.out"
    job = fake.add(state="RUNNING", nodes="n1", comment="prime-hpc", stdout=str(log))
    inside = {"SLURM_JOB_ID": job}
    forget_submission_that_is_over(run_dir(config), inside)
    assert (read_record(run_dir(config)) or {})["job_id"] == "100", "which waits"
    fake.change("100", state="COMPLETED")
    forget_submission_that_is_over(run_dir(config), {**inside, "SLURM_JOB_ID": "100"})
    forget_submission_that_is_over(run_dir(config), {**inside, "PRIMEHPC_SUBMISSION": "t /x"})
    fake.behave("squeue", code=1, stderr="Unable to contact slurm controller (connect failure)")
    forget_submission_that_is_over(run_dir(config), inside)
    assert read_record(run_dir(config)) is not None
    fake.behave("squeue")
    forget_submission_that_is_over(run_dir(config), inside)
    assert read_record(run_dir(config)) is None
    for outcome in ("failed", "stopped"):  # Slurm is not done with it: `cancel` waits, nothing is sent beside it
        ended(config, outcome, job_id=job)
        assert [info.job_id for info in jobs_of(run_dir(config))] == [job]
    fake.change(job, state="COMPLETED")
    assert jobs_of(run_dir(config)) == []


def test_a_submission_that_began_while_slurm_was_asked_keeps_its_record(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(load(config))
    fake.change("100", state="COMPLETED")
    inside = {"SLURM_JOB_ID": fake.add(state="RUNNING", nodes="n1", comment="prime-hpc")}
    with submission_record.submitting(run_dir(config)):
        forget_submission_that_is_over(run_dir(config), inside)
    assert (read_record(run_dir(config)) or {})["job_id"] == "100"

    def ask(folder: Path) -> list[JobInfo]:
        found = jobs_of(folder)
        submission_record.open_record(
            folder, token="newer", state="sent", command=["resume"], layout="packed", cluster=None
        )
        return found

    monkeypatch.setattr(queue, "jobs_of", ask)
    forget_submission_that_is_over(run_dir(config), inside)
    assert (read_record(run_dir(config)) or {})["token"] == "newer"


def test_a_second_successor_that_somebody_else_has_taken_out_already(fake: FakeSlurm, config: Path) -> None:
    submit(load(config, "--slurm.restart.how", "successor"))
    first, second = fake.jobs()
    fake.add(comment=first["comment"], dependency=f"afternotok:{first['id']}")
    fake.behave("scancel", code=1, stderr="scancel: error: Kill job error on job id 102: Invalid job id specified")
    assert queue_successor(run_dir(config), first["id"]) == second["id"]
