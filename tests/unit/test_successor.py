"""Successors that Slurm refuses: asked for again while the job runs, and once more at the attempt's end.

Against a Slurm whose limit is lifted midway (tests/support/fake_slurm.py).
"""

import time
from pathlib import Path

import pytest

from prime_hpc.config import load_run
from prime_hpc.launch import cancel as cancel_module
from prime_hpc.launch import job
from prime_hpc.launch.monitor.status import status_of
from prime_hpc.launch.submission import submit
from prime_hpc.observe.metric_names import is_known
from prime_hpc.runtime.clock import AwakeClock
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.queue import queue_successor
from prime_hpc.slurm.submission_record import write_record
from prime_hpc.store.attempts import read_attempts
from prime_hpc.store.run_dirs import read_record
from prime_hpc.supervisor.alarms import alarm_watch
from prime_hpc.supervisor.alarms.rules import BUILT_IN, Watcher
from prime_hpc.supervisor.attempt import successor
from prime_hpc.supervisor.attempt.lost_batch_host import Return
from prime_hpc.supervisor.attempt.restart_policy import EXIT_AGAIN
from prime_hpc.supervisor.attempt.successor import SuccessorWatch, require_successor, try_successor
from prime_hpc.supervisor.main import _apply_restart_policy
from prime_hpc.supervisor.run_watch import RunWatch
from prime_hpc.supervisor.stop_requests import Controls
from tests.support.fake_slurm import FakeSlurm
from tests.support.submissions import cancel, ended, load, run_dir, use_fake_slurm, wait_for, write_config

LIMIT = "AssocMaxSubmitJobLimit"
BAD_ACCOUNT = {"code": 1, "stderr": "sbatch: error: Batch job submission failed: Invalid account or account/partition"}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return use_fake_slurm(tmp_path, monkeypatch)


@pytest.fixture
def run(fake: FakeSlurm, tmp_path: Path) -> Path:
    """A run whose job (100) runs at a full limit."""
    config = write_config(tmp_path)
    fake.limit(1)
    submit(load(config, "--slurm.restart.how", "successor"))
    fake.change("100", state="RUNNING", nodes="n1")
    return run_dir(config)


def watch(run: Path, every_s: float = 0.05, left: float | None = None) -> SuccessorWatch:
    return SuccessorWatch(run, "100", every_s=every_s, lead_s=120, time_left=lambda: left, tick_s=0.01)


def tries(fake: FakeSlurm) -> int:
    return len([call for call in fake.calls("sbatch") if any("afternotok" in word for word in call)])


def test_the_submit_says_that_none_waits(fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    fake.limit(1)
    assert submit(load(config, "--slurm.restart.how", "successor")) == 0 and len(fake.jobs()) == 1
    assert "no successor could be queued" in (said := capsys.readouterr().err) and "while it runs" in said
    assert LIMIT in (status_of(run_dir(config)).no_successor or "")


def test_it_is_queued_as_soon_as_the_limit_allows(fake: FakeSlurm, run: Path) -> None:
    refusal = try_successor(run, "100")
    assert refusal is not None and not refusal.is_final and LIMIT in refusal.words
    keeper = watch(run)
    wait_for(lambda: tries(fake) >= 4)
    assert keeper.missing_s > 0 and LIMIT in (status_of(run).no_successor or "")
    fake.limit(2)
    wait_for(lambda: len(fake.jobs()) == 2)
    wait_for(lambda: keeper.missing_s == 0)
    keeper.close()
    record = read_record(run) or {}
    assert (record["successor"], record["no_successor"]) == ("101", None)
    assert fake.jobs()[1]["dependency"] == "afternotok:100" and status_of(run).no_successor is None
    asked = tries(fake)
    time.sleep(0.2)
    assert tries(fake) == asked, "one that waits is not asked for again"


def test_what_time_does_not_mend_is_not_asked_for_again_and_again(fake: FakeSlurm, run: Path) -> None:
    fake.behave("sbatch", **BAD_ACCOUNT)
    keeper = watch(run)
    wait_for(lambda: "slurm.account: Invalid account" in (status_of(run).no_successor or ""))
    wait_for(lambda: not keeper._thread.is_alive())
    assert tries(fake) == 2, "by the submit, which met the limit, and by the watch"
    assert keeper.missing_s > 0, "the alarm stays"


def test_a_controller_that_is_away_is_asked_again(fake: FakeSlurm, run: Path) -> None:
    fake.limit(None)
    fake.behave("squeue", code=1, stderr="slurm_load_jobs error: Unable to contact slurm controller", only_once=True)
    refusal = try_successor(run, "100")
    assert refusal is not None and not refusal.is_final
    keeper = watch(run)
    wait_for(lambda: keeper.missing_s == 0 and len(fake.jobs()) == 2)


def test_one_that_waits_is_not_forgotten_while_nobody_answers(fake: FakeSlurm, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    submit(load(config, "--slurm.restart.how", "successor"))
    fake.behave("squeue", code=1, stderr="slurm_load_jobs error: Unable to contact slurm controller")
    assert try_successor(run_dir(config), "100") is None
    record = read_record(run_dir(config)) or {}
    assert record["successor"] == "101" and record.get("no_successor") is None


@pytest.mark.parametrize(("left", "comes"), [(200.0, True), (5000.0, False), (None, False)])
def test_before_the_time_limit_it_is_asked_for_often(
    fake: FakeSlurm, run: Path, monkeypatch: pytest.MonkeyPatch, left: float | None, comes: bool
) -> None:
    monkeypatch.setattr(successor, "NEAR_END_S", 0.05)
    fake.limit(2)
    keeper = watch(run, every_s=3600, left=left)
    if comes:
        wait_for(lambda: len(fake.jobs()) == 2)
    else:
        time.sleep(0.3)
    keeper.close()
    assert (len(fake.jobs()) == 2) is comes


def test_at_the_end_a_slot_is_waited_for(fake: FakeSlurm, run: Path) -> None:
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            fake.limit(2)

    assert require_successor(run, "100", None, sleep=sleep) is None
    assert len(slept) == 2 and (read_record(run) or {})["successor"] == "101"
    assert require_successor(run, "100", None) is None and len(fake.jobs()) == 2, "it waits"


def test_one_that_somebody_took_out_of_the_queue_is_queued_again_at_the_end(fake: FakeSlurm, run: Path) -> None:
    fake.limit(None)
    assert try_successor(run, "100") is None
    fake.change("101", state="CANCELLED")
    assert require_successor(run, "100", None) is None
    assert (read_record(run) or {})["successor"] == "102"
    fake.behave("squeue", code=1, stderr="slurm_load_jobs error: Unable to contact slurm controller")
    assert require_successor(run, "100", None) is None, "as far as anybody can tell"


def test_a_successor_is_not_given_bad_nodes_either(fake: FakeSlurm, run: Path) -> None:
    fake.limit(None)
    nodes = "".join(f"echo n{i} idle idle x;" for i in range(1, 6))
    (fake.bin / "sinfo").write_text(f"#!/bin/sh\n{nodes}\n")
    own = ended(run.parents[1] / "exp.yaml", "node_lost", exit_code=1, saved_step=5, lost_nodes=["n1"])
    experiment = load_run(run)
    restart = experiment.slurm.restart.model_copy(update={"exclude_bad_nodes": True})
    slurm = experiment.slurm.model_copy(update={"restart": restart})
    experiment = experiment.model_copy(update={"slurm": slurm})
    assert _apply_restart_policy(experiment, run, Allocation("100", (("n1",),), "n1", 0), 1, own) == EXIT_AGAIN
    assert ["scontrol", "update", "JobId=101", "ExcNodeList=n1"] in fake.calls("scontrol")


def test_at_the_end_without_room_the_run_is_over(fake: FakeSlurm, run: Path) -> None:
    refusal = require_successor(run, "100", time.time() + successor.LEAVE_S - 1)
    assert refusal is not None and LIMIT in refusal.words
    fake.behave("sbatch", **BAD_ACCOUNT)
    refusal = require_successor(run, "100", None, sleep=lambda seconds: pytest.fail("it is not waited for"))
    assert refusal is not None and refusal.is_final
    fake.behave("sbatch")
    fake.limit(None)
    assert require_successor(run, "100", None) is None, "once more, whatever was said before"


def test_a_full_queue_is_not_waited_for_beyond_the_time_limit(
    fake: FakeSlurm, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
    fake.behave("sbatch", code=1, stderr=full)
    refusal = try_successor(run, "100")
    assert refusal is not None and not refusal.is_final and "MaxJobCount" in refusal.words
    fake.behave("sbatch", hang="before", stderr=full)  # as Slurm's does: two minutes
    monkeypatch.setattr(successor, "LEAST_TRY_S", 0.5)
    refusal = require_successor(run, "100", time.time() + successor.LEAVE_S - 1)
    assert refusal is not None and "no answer within 0.5 s" in refusal.words


def test_a_job_does_not_begin_late_for_a_full_queue(
    fake: FakeSlurm, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying"
    fake.behave("sbatch", hang="before", stderr=full)
    monkeypatch.setattr(successor, "FIRST_TRY_S", 0.5)
    job._queue_successor(run)
    assert "no answer within 0.5 s" in ((read_record(run) or {})["no_successor"] or "")


def test_a_cancelled_run_gets_none(fake: FakeSlurm, run: Path) -> None:
    write_record(run, cancelled=time.time())
    fake.limit(None)
    keeper = watch(run)
    wait_for(lambda: not keeper._thread.is_alive())
    assert len(fake.jobs()) == 1


def test_cancel_takes_out_one_that_was_queued_meanwhile(
    fake: FakeSlurm, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.limit(None)
    ask = cancel_module.run_slurm

    def between(argv: list[str], *others: float) -> str:
        if argv == ["scancel", "100"]:
            queue_successor(run, "100")
        return ask(argv, *others)

    monkeypatch.setattr(cancel_module, "run_slurm", between)
    assert cancel(run.parents[1] / "exp.yaml", now=True).ended
    assert [job["state"] for job in fake.jobs()] == ["CANCELLED"] * 2


def test_an_alarm_tells_of_it_once() -> None:
    [rule] = [rule for rule in BUILT_IN if rule.name == "successor"]
    assert is_known(rule.metric)
    watcher = Watcher(rule)
    fired = [watcher.take(value, None) for value in (None, 0.0, 60.0, 240.0, 0.0)]
    assert [alarm is not None for alarm in fired] == [False, False, True, False, False]


def test_a_jobs_supervisor_keeps_asking_and_its_alarm_is_written(
    fake: FakeSlurm, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarm_watch, "TICK_S", 0.05)
    experiment = load_run(run)
    environment = {"SLURM_JOB_ID": "100", **Return("100", ["100"], "n1", "n1", "successor", 1).to_env()}
    restart = experiment.slurm.restart.model_copy(update={"successor_retry_s": 0.5})
    slurm = experiment.slurm.model_copy(update={"restart": restart})
    experiment = experiment.model_copy(update={"slurm": slurm})
    watched = RunWatch(
        experiment, run, 1, AwakeClock(), environment, True, {}, [], lambda *a, **k: None, Controls(run, None, 120)
    )
    try:
        path = run / "alarms.jsonl"
        wait_for(lambda: path.exists() and '"rule": "successor"' in path.read_text(), 60)
        fake.limit(2)
        wait_for(lambda: len(fake.jobs()) == 2)
    finally:
        watched.close()
    assert "no_successor_s is" in path.read_text()


@pytest.mark.parametrize("room", [1, 2])
def test_the_end_of_an_attempt_says_whether_the_run_goes_on(
    fake: FakeSlurm, run: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(successor, "LAST_TRIES_S", 0.0)
    own = ended(run.parents[1] / "exp.yaml", "requeued", exit_code=0, saved_step=5)
    fake.limit(room)
    code = _apply_restart_policy(load_run(run), run, Allocation("100", (("n1",),), "n1", 0), 0, own)
    [row] = read_attempts(run / "attempts.jsonl")
    if room == 2:
        assert (code, row["next"]) == (EXIT_AGAIN, "successor") and len(fake.jobs()) == 2
    else:
        assert (code, row["next"]) == (1, None) and len(fake.jobs()) == 1
        assert (row["cause"] or "").startswith("a test; no successor waited: ") and LIMIT in (row["cause"] or "")
        fake.change("100", state="FAILED")
        status = status_of(run)
        assert (status.state, status.no_successor) == ("failed", None) and LIMIT in status.note
