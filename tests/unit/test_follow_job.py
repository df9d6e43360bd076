"""`submit --follow` of a Slurm job: its log until it ends."""

import threading
from pathlib import Path

import pytest

from prime_hpc.launch import submission
from prime_hpc.launch.submission import submit
from tests.support.fake_slurm import FakeSlurm
from tests.support.submissions import ended, load, run_dir, wait_for


def test_following_a_job(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submission, "FOLLOW_POLL_S", 0.02)
    monkeypatch.setattr(submission, "ASK_EVERY_S", 0.1)
    log = run_dir(config) / "logs" / "slurm-100.out"

    def life() -> None:
        wait_for((run_dir(config) / "submit.json").exists)
        wait_for(lambda: len(fake.calls("squeue")) > 1)
        fake.change("100", state="RUNNING", nodes="n1")
        log.write_text("first words\n")
        fake.behave("squeue", code=1, stderr="Unable to contact slurm controller")  # it restarts
        with log.open("a") as file:
            file.write("last words\n")
        fake.behave("squeue")
        fake.change("100", state="COMPLETED")

    thread = threading.Thread(target=life)
    thread.start()
    assert submit(load(config), follow=True) == 0
    thread.join()
    out = capsys.readouterr().out
    assert out.count("first words") == 1 and out.count("last words") == 1
    assert "job 100 has ended: COMPLETED" in out
    fake.change("100", state="FAILED")
    assert submission.follow_job("100", log) == 1
    fake.forget("100")
    ended(config, "completed")
    assert submission.follow_job("100", log) == 0, "Slurm forgot it; the run directory knows"


def test_a_successor_is_followed_too(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(submission, "FOLLOW_POLL_S", 0.02)
    monkeypatch.setattr(submission, "ASK_EVERY_S", 0.1)
    submit(load(config, "--slurm.restart.how", "successor"))
    log = run_dir(config) / "logs" / "slurm-100.out"
    log.write_text("of the first\n")
    log.with_name("slurm-101.out").write_text("of the second\n")
    fake.change("100", state="FAILED")

    def life() -> None:
        asked = len(fake.calls("squeue"))
        wait_for(lambda: len(fake.calls("squeue")) > asked + 2)
        fake.change("101", state="COMPLETED")

    thread = threading.Thread(target=life)
    thread.start()
    assert submission.follow_job("100", log) == 0
    thread.join()
    said = [line for line in capsys.readouterr().out.splitlines() if "of the" in line or "job 10" in line]
    assert said[-5:-1] == ["of the first", "job 100 has ended: FAILED", "the run goes on as job 101", "of the second"]
    assert said[-1] == "job 101 has ended: COMPLETED"
    fake.change("101", state="FAILED")
    assert submission.follow_job("101", log) == 1


def test_a_successor_of_which_slurm_says_nothing_for_a_moment_is_followed(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "FOLLOW_POLL_S", 0.02)
    monkeypatch.setattr(submission, "ASK_EVERY_S", 0.1)
    submit(load(config, "--slurm.restart.how", "successor"))
    fake.change("100", state="FAILED")
    ask = submission._successor_of

    def silent(job_id: str, folder: Path) -> str | None:
        fake.behave("squeue", code=1, stderr="slurm_load_jobs error: Unable to contact slurm controller")
        found = ask(job_id, folder)
        fake.behave("squeue")
        fake.change("101", state="COMPLETED")
        return found

    monkeypatch.setattr(submission, "_successor_of", silent)
    assert submission.follow_job("100", run_dir(config) / "logs" / "slurm-100.out") == 0


def test_an_interrupted_follower_leaves_the_job_alone(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(log: Path, offset: int) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(submission, "copy_new", interrupt)
    assert submit(load(config), follow=True) == 130
    assert "job 100 goes on" in capsys.readouterr().out
    assert fake.jobs()[0]["state"] == "PENDING"


# --- the directory ----------------------------------------------------------------------------------------------
