"""`cancel` against a Slurm that fails as it is told to (tests/support/fake_slurm.py)."""

import errno
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import ConfigError
from prime_hpc.config.site import load_site
from prime_hpc.launch import cancel as cancel_module
from prime_hpc.launch import local
from prime_hpc.launch.monitor.status import status_of
from prime_hpc.launch.monitor.where_to import NotThereError, way_to
from prime_hpc.launch.monitor.who_hangs import find_target
from prime_hpc.launch.prepare import prepare_run
from prime_hpc.launch.submission import submit
from prime_hpc.slurm import submission_record
from prime_hpc.slurm.queue import queue_successor
from prime_hpc.store.attempts import Attempt, process_token, write_attempt
from prime_hpc.store.run_dirs import read_record
from tests.support.fake_slurm import FakeSlurm
from tests.support.submissions import cancel, cancel_beside, ended, load, run_dir, wait_for


def test_cancel_of_a_waiting_job_and_its_successor(fake: FakeSlurm, config: Path) -> None:
    submit(load(config, "--slurm.restart.how", "successor"))
    result = cancel(config)
    assert result.ended and result.outcome == "pending"
    assert [job["state"] for job in fake.jobs()] == ["CANCELLED"] * 2
    assert [call[1] for call in fake.calls("scancel")] == ["101", "100"], "the successor first: it would start"
    assert not (run_dir(config) / "STOP").exists()


@pytest.mark.parametrize("once", [True, False])
def test_a_scancel_that_does_nothing_has_ended_nothing(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, once: bool
) -> None:
    monkeypatch.setattr(cancel_module, "GONE_TIMEOUT_S", 60.0 if once else 0.1)
    submit(load(config))
    fake.behave("scancel", code=0, only_once=once)
    result = cancel(config)
    assert (result.ended, result.outcome) == ((True, "pending") if once else (False, "unknown")), result.note
    assert fake.jobs()[0]["state"] == ("CANCELLED" if once else "PENDING")


def test_cancel_of_a_job_that_begins_before_scancel_comes(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(load(config))
    scancel = cancel_module.run_slurm

    def between(argv: list[str], *others: float) -> str:
        fake.change("100", state="RUNNING", nodes="n1")
        return scancel(argv, *others)

    monkeypatch.setattr(cancel_module, "run_slurm", between)
    result = cancel(config)
    assert (result.ended, result.outcome, result.note) == (True, "cancelled", "ended without a new save")


def test_cancel_waits_for_no_node_that_is_still_being_started(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="CONFIGURING", nodes="n1")
    result = cancel(config)
    assert (result.ended, result.outcome) == (True, "cancelled") and fake.jobs()[0]["state"] == "CANCELLED"
    assert not (run_dir(config) / "STOP").exists()


@pytest.mark.parametrize(("state", "more"), [("COMPLETED", ""), ("COMPLETING", "; Slurm still cleans up its nodes")])
def test_cancel_of_a_running_job_lets_it_save(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, state: str, more: str
) -> None:
    monkeypatch.setattr(cancel_module, "GONE_TIMEOUT_S", 200.0 if state == "COMPLETED" else 0.1)  # of a long epilog
    submit(load(config))
    fake.change("100", state="RUNNING", nodes="n1")

    def supervisor() -> None:
        wait_for((run_dir(config) / "STOP").exists)
        (run_dir(config) / "STOP").unlink()
        if state == "COMPLETING":
            fake.change("100", state=state)
        ended(config, "stopped", saved_step=15)
        fake.change("100", state=state)

    result = cancel_beside(config, supervisor)
    assert (result.ended, result.note, fake.calls("scancel")) == (True, f"saved at step 15 and ended{more}", [])


@pytest.mark.parametrize(
    ("kind", "saved", "note"),
    [
        ("sft", None, "ended; nothing to save yet"),
        ("eval", None, "ended; nothing to save yet"),
        ("synthesize", 37, "ended; 37 episodes are kept"),
    ],
)
def test_cancel_says_saved_of_a_run_that_saved(
    fake: FakeSlurm, config: Path, kind: str, saved: int | None, note: str
) -> None:
    submit(load(config))
    run_yaml = run_dir(config) / "run.yaml"
    run_yaml.write_text(run_yaml.read_text().replace("kind: sft", f"kind: {kind}"))
    fake.change("100", state="RUNNING", nodes="n1")

    def supervisor() -> None:
        wait_for((run_dir(config) / "STOP").exists)
        ended(config, "stopped", exit_code=0, saved_step=saved)
        fake.change("100", state="COMPLETED")

    assert cancel_beside(config, supervisor).note == note


def test_cancel_says_so_of_a_run_that_was_done_before_it_could_obey(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="RUNNING", nodes="n1")

    def supervisor() -> None:
        wait_for((run_dir(config) / "STOP").exists)
        ended(config, "completed", exit_code=0)
        fake.change("100", state="COMPLETED")

    assert cancel_beside(config, supervisor).note == "completed meanwhile"


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_cancel_of_a_job_whose_run_has_just_ended(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """Its attempt is over and its job is not yet: nobody is going to obey, and nobody has to."""
    monkeypatch.setattr(cancel_module, "GONE_TIMEOUT_S", 200.0 if state == "RUNNING" else 0.1)
    submit(load(config))
    fake.change("100", state=state, nodes="n1")
    ended(config, "completed", exit_code=0, saved_step=50)

    def slurm() -> None:
        wait_for((run_dir(config) / "STOP").exists)
        fake.change("100", state="COMPLETED")

    result = cancel(config) if state == "COMPLETING" else cancel_beside(config, slurm)
    assert (result.ended, fake.calls("scancel")) == (True, []) and result.note.startswith("saved at step 50 and ended")


def test_cancel_of_a_requeued_job_waits_for_its_new_attempt(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="RUNNING", nodes="n1")
    ended(config, "preempted", saved_step=40, next="slurm")  # before it was requeued

    def supervisor() -> None:
        wait_for((run_dir(config) / "STOP").exists)
        path, new = run_dir(config) / "attempts.jsonl", Attempt(2, 2, time.time(), "preempted", job_id="100")
        write_attempt(path, new)
        wait_for(lambda: len(fake.calls("squeue")) > asked)
        assert (run_dir(config) / "STOP").exists(), "nobody has obeyed it"
        (run_dir(config) / "STOP").unlink()
        new.ended, new.outcome, new.saved_step = time.time(), "stopped", 45
        write_attempt(path, new)
        fake.change("100", state="COMPLETED")

    asked = len(fake.calls("squeue"))
    result = cancel_beside(config, supervisor)
    assert (result.note, fake.calls("scancel")) == ("saved at step 45 and ended", [])


def test_cancel_waits_for_the_attempt_that_follows_a_crash_in_the_same_job(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="RUNNING", nodes="n1")

    def supervisor() -> None:
        stop, path = run_dir(config) / "STOP", run_dir(config) / "attempts.jsonl"
        wait_for(stop.exists)
        stop.unlink()
        ended(config, "failed", saved_step=10)
        asked = len(fake.calls("squeue"))
        wait_for(lambda: len(fake.calls("squeue")) > asked + 1)  # its line does not say yet that another follows
        ended(config, "failed", saved_step=10, next="in_place")
        wait_for(stop.exists)
        stop.unlink()
        write_attempt(path, Attempt(2, 2, time.time(), "resumes", job_id="100"))
        row = {"ended": time.time(), "outcome": "stopped", "saved_step": 20}
        write_attempt(path, Attempt(2, 2, time.time(), "resumes", job_id="100", **row))  # type: ignore[arg-type]
        fake.change("100", state="COMPLETED")

    result = cancel_beside(config, supervisor)
    assert (result.outcome, result.note) == ("stopped", "saved at step 20 and ended")
    assert fake.calls("scancel") == [] and not (run_dir(config) / "STOP").exists()


def test_cancel_ends_a_job_in_which_an_attempt_follows_that_does_not_save(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="RUNNING", nodes="n1")
    ended(config, "failed", next="in_place", saved_step=10)
    result = cancel(config, timeout_s=1.5)
    assert (result.ended, result.outcome, fake.calls("scancel")) == (True, "cancelled", [["scancel", "100"]])
    assert result.note == "ended without a new save; the newest checkpoint is step 10"


@pytest.mark.parametrize(
    ("row", "outcome", "said"),
    [
        ({"outcome": "failed", "cause": "trainer: out of memory"}, "over", "failed (trainer: out of memory)"),
        ({"outcome": "preempted", "next": "slurm"}, "over", "preempted (a test)"),
        ({"outcome": "stopped", "exit_code": 1, "cause": "STOP; not saved"}, "over", "stopped (STOP; not saved)"),
        ({"outcome": "requeued", "exit_code": 0, "next": "requeue"}, "stopped", "saved at step 4"),
    ],
)
def test_cancel_of_a_job_that_ends_otherwise_meanwhile_says_so(
    fake: FakeSlurm, config: Path, row: dict[str, Any], outcome: str, said: str
) -> None:
    submit(load(config))
    fake.change("100", state="RUNNING", nodes="n1")

    def supervisor() -> None:
        wait_for((run_dir(config) / "STOP").exists)
        ended(config, saved_step=4, **row)
        fake.change("100", state="FAILED")

    result = cancel_beside(config, supervisor)
    assert (result.ended, result.outcome) == (True, outcome)
    by_itself = f"ended by itself: {said}; the newest checkpoint is step 4"
    assert result.note == (by_itself if outcome == "over" else f"{said}; taken out of the queue")


def test_cancel_of_a_job_that_does_not_save(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="RUNNING", nodes="n1")
    result = cancel(config, timeout_s=1.5)
    assert result.outcome == "cancelled" and fake.jobs()[0]["state"] == "CANCELLED"
    assert not (run_dir(config) / "STOP").exists(), "it would stop the next attempt"


def test_cancel_of_a_suspended_job_says_what_it_waits_for(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    for now in (True, False):
        told: list[str] = []
        fake.change("100", state="SUSPENDED", nodes="n1")
        assert cancel_module.cancel_run(run_dir(config), now=now, timeout_s=0.5, say=told.append).outcome == "cancelled"
        assert any("it saves when it goes on; --now ends it at once" in words for words in told) != now


def test_a_stop_that_came_after_the_end_stops_no_run_that_is_started_again(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    stop = run_dir(config) / "STOP"
    stop.touch()
    with pytest.raises(ConfigError, match="PENDING"):
        submit(load(config))
    assert stop.exists(), "it is meant for the job in the queue"
    fake.change("100", state="COMPLETED")
    submit(load(config))
    assert len(fake.jobs()) == 2 and not stop.exists()


def test_a_stop_for_a_job_sent_by_hand_that_waits_is_left_by_what_prepares_the_run_in_it(
    fake: FakeSlurm, config: Path
) -> None:
    stop = run_dir(config) / "STOP"
    stop.parent.mkdir(parents=True)
    stop.touch()
    prepare_run(load(config), load_site(None))
    assert stop.exists()
    prepare_run(load(config))
    assert not stop.exists()


def test_cancel_now(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="RUNNING", nodes="n1")
    assert cancel(config, now=True).outcome == "cancelled"
    assert fake.calls("scancel") == [["scancel", "100"]]


def test_cancel_on_a_full_disk(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(load(config))
    fake.change("100", state="RUNNING", nodes="n1")

    def full(*_: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", full)
        with pytest.raises(ConfigError, match=r"STOP cannot be written: Disk quota exceeded; .*cancel --now"):
            cancel(config)
    assert fake.calls("scancel") == []
    monkeypatch.setattr(submission_record, "_replace", full)
    assert cancel(config, now=True).outcome == "cancelled"
    assert "Disk quota exceeded; it lacks cancelled = " in capsys.readouterr().err


def test_cancel_never_ends_anothers_job(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="RUNNING", comment="prime-hpc:of-another-run")
    result = cancel(config, now=True)
    assert result.ended and result.outcome == "over" and fake.calls("scancel") == []


@pytest.mark.parametrize("comment", ["", "charged to project 7"])
def test_a_site_that_rewrites_comments_takes_no_job_from_its_run(fake: FakeSlurm, config: Path, comment: str) -> None:
    fake.set_comments(comment)
    submit(load(config))
    assert fake.jobs()[0]["comment"] == comment
    fake.add(state="RUNNING", name="r", script=str(config.parent / "elsewhere" / "job.sbatch"), text="#!/bin/bash")
    fake.change("100", state="RUNNING", nodes="n1")
    assert status_of(run_dir(config)).state == "starting"
    with pytest.raises(ConfigError, match="in Slurm as job 100, RUNNING on n1"):
        submit(load(config))
    assert cancel(config, now=True).outcome == "cancelled"
    assert fake.calls("scancel") == [["scancel", "100"]]


def test_there_too_a_lost_answer_makes_no_second_job(fake: FakeSlurm, config: Path) -> None:
    fake.set_comments("")
    submit(load(config, "--slurm.restart.how", "successor"))
    submission_record.write_record(run_dir(config), state="sending", job_id=None, successor=None)
    submit(load(config, "--slurm.restart.how", "successor"))
    assert len(fake.jobs()) == 2
    record = read_record(run_dir(config))
    assert record is not None and (record["job_id"], record["successor"]) == ("100", "101")
    assert queue_successor(run_dir(config), "100") == "101", "the one that waits is kept"
    assert cancel(config).outcome == "pending"
    assert [job["state"] for job in fake.jobs()] == ["CANCELLED"] * 2


def test_there_too_anothers_job_of_the_same_id_is_let_alone(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change(
        "100", state="RUNNING", comment="", script="/home/other/job.sbatch", text="#SBATCH --comment=prime-hpc:x"
    )
    assert cancel(config, now=True).outcome == "over"
    fake.change("100", script="/home/other/train.sh")
    assert cancel(config, now=True).outcome == "over" and fake.calls("scancel") == []


@pytest.mark.parametrize("by", ["config", "environment"])
def test_a_run_on_another_cluster_of_the_site_is_asked_about_and_ended_there(
    fake: FakeSlurm, config: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "environment":
        monkeypatch.setenv("SLURM_CLUSTERS", "other")
    submit(load(config, *(["--slurm.cluster", "other"] if by == "config" else [])))
    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
    record = read_record(run_dir(config))
    assert record is not None and (record["job_id"], record["other_cluster"], record["cluster"]) == (
        "100",
        "other",
        "fake",
    )
    fake.add(state="RUNNING", comment="prime-hpc:of-another-run")  # on this cluster
    fake.change("100", state="RUNNING", nodes="n1")
    assert status_of(run_dir(config)).state == "starting"
    target = find_target(str(run_dir(config)))
    assert target.job is None, "srun does not reach it"
    with pytest.raises(NotThereError, match="on cluster other: log in there"):
        way_to(target, "supervisor", 0, [], terminal=False, environ={})
    assert all(call[1] == "--clusters=other" for call in fake.calls("squeue")[-2:])
    with pytest.raises(ConfigError, match="in Slurm as job 100, RUNNING"):
        submit(load(config))
    assert cancel(config, now=True).outcome == "cancelled"
    assert fake.calls("scancel") == [["scancel", "--clusters=other", "100"]]
    assert [job["state"] for job in fake.jobs()] == ["CANCELLED", "RUNNING"]


def test_this_cluster_by_its_own_name_is_no_other(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "fake")
    submit(load(config))
    assert not any("--clusters=fake" in call for call in fake.calls())
    assert cancel(config).outcome == "pending"


def test_cancel_of_a_finished_run(fake: FakeSlurm, config: Path) -> None:
    submit(load(config))
    fake.change("100", state="COMPLETED")
    ended(config, "completed")
    result = cancel(config)
    assert result.ended and "over already: completed" in result.note


SUPERVISOR = """
import signal, sys, time
from pathlib import Path
from prime_hpc.store.attempts import Attempt, process_token, write_attempt

run_dir, obeys = Path(sys.argv[1]), sys.argv[2] == "obeys"
attempt = Attempt(1, 1, time.time(), "first start")
asked = []
signal.signal(signal.SIGINT, lambda number, frame: asked.append("interrupted"))
write_attempt(run_dir / "attempts.jsonl", attempt)
while not asked:
    time.sleep(0.02)
    if obeys and (run_dir / "STOP").exists():
        asked.append("stopped")
attempt.ended, attempt.outcome, attempt.saved_step = time.time(), asked[0], 5 if asked[0] == "stopped" else None
write_attempt(run_dir / "attempts.jsonl", attempt)
"""


@pytest.mark.parametrize(
    ("obeys", "now", "outcome", "row"),
    [
        (True, False, "stopped", "stopped"),
        (True, True, "cancelled", "interrupted"),
        (False, False, "cancelled", "interrupted"),
    ],
)
def test_cancel_of_a_run_on_this_machine(
    fake: FakeSlurm, config: Path, obeys: bool, now: bool, outcome: str, row: str
) -> None:
    from prime_hpc.store.run_dirs import read_rows

    run_dir(config).mkdir(parents=True)
    (run_dir(config) / "run.yaml").write_text("")
    words = [sys.executable, "-c", SUPERVISOR, str(run_dir(config)), "obeys" if obeys else "is deaf"]
    supervisor = subprocess.Popen(words)
    # waited for, since a zombie still counts as a process
    reaper = threading.Thread(target=supervisor.wait)
    reaper.start()
    wait_for((run_dir(config) / "attempts.jsonl").exists)
    result = cancel(config, now=now, timeout_s=0.5 if not obeys else 20.0)
    reaper.join(timeout=280)
    assert (result.ended, result.outcome) == (True, outcome)
    assert read_rows(run_dir(config) / "attempts.jsonl")[-1]["outcome"] == row
    assert not (run_dir(config) / "STOP").exists()
    assert cancel(config).outcome == "over"
    assert fake.calls() == []


@pytest.mark.parametrize("word", [None, "failed"])
def test_cancel_of_a_run_on_this_machine_whose_supervisor_dies_meanwhile(
    fake: FakeSlurm, config: Path, monkeypatch: pytest.MonkeyPatch, word: str | None
) -> None:
    """Killed it leaves no word; its number may be another process's by then: nobody is sent a signal."""
    run_dir(config).mkdir(parents=True)
    (run_dir(config) / "run.yaml").write_text("")
    process = subprocess.Popen(["sleep", "600"])
    mine = {"pid": process.pid, "process": process_token(process.pid), "saved_step": 4}
    path = run_dir(config) / "attempts.jsonl"
    write_attempt(path, Attempt(1, 1, time.time(), "first start", **mine))  # type: ignore[arg-type]

    def die() -> None:
        wait_for((run_dir(config) / "STOP").exists)
        if word is not None:
            row = {**mine, "ended": time.time(), "outcome": word, "cause": "out of memory"}
            write_attempt(path, Attempt(1, 1, time.time(), "first start", **row))  # type: ignore[arg-type]
        process.kill()
        process.wait()

    monkeypatch.setattr(local, "end_local", lambda *arguments: pytest.fail("there is nothing to end"))
    thread = threading.Thread(target=die)
    thread.start()
    result = cancel(config, timeout_s=30.0)
    thread.join()
    said = "is gone: nothing to end" if word is None else "ended by itself: failed (out of memory); the newest"
    assert (result.ended, result.outcome) == (True, "over") and said in result.note
    assert not (run_dir(config) / "STOP").exists()


def test_what_ends_by_itself_while_it_is_ended_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    local.end_local(tmp_path, process.pid)
    local.end_local(tmp_path, None)
    write_attempt(tmp_path / "attempts.jsonl", Attempt(1, 1, time.time(), "first start", pid=process.pid))
    monkeypatch.setattr(local, "is_held", lambda row: True)  # it was, a moment ago
    local.end_local(tmp_path, None)
