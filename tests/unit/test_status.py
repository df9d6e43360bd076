"""`prime-hpc status`: every state from its evidence, Slurm's answers as `JobInfo`."""

import errno
import os
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.launch.monitor.logs import find_source
from prime_hpc.launch.monitor.run_facts import Queue, RunStatus
from prime_hpc.launch.monitor.run_progress import tail_rows
from prime_hpc.launch.monitor.status import PatientAsk, collect, status_of
from prime_hpc.observe.console import Console
from prime_hpc.slurm.jobs import JobInfo
from prime_hpc.store.run_dirs import list_runs
from tests.support.metric_rows import trainer_row, write_rows
from tests.support.status_run import Run, answering, job

NOW = time.time()


@pytest.fixture(autouse=True)
def _now() -> None:
    """Ages count from the test's own beginning: pytest may have read this file half an hour before."""
    global NOW
    NOW = time.time()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_prepared_only(run: Run) -> None:
    status = run.status()
    assert (status.state, status.is_under_way, status.is_final) == ("not started", False, False)
    assert "nothing has started it" in status.note


def test_roles_started_by_hand(tmp_path: Path) -> None:
    for role in ("trainer", "orchestrator"):
        (tmp_path / "hand" / "roles" / role).mkdir(parents=True)
        (tmp_path / "hand" / "roles" / role / "run.yaml").write_text("max_steps: 4\n")
    write_rows(tmp_path / "hand" / "metrics" / "trainer.jsonl", [{"step": 3, "time/step": 1.0, "loss": 0.5}])
    status = status_of(*list_runs(tmp_path), ask=answering())  # the only one
    assert (status.state, status.step, status.max_steps, status.is_under_way) == ("by hand", 3, 4, False)
    assert "nobody supervises what was started here: trainer, orchestrator" in status.note


@pytest.mark.parametrize(
    ("record", "jobs", "trouble", "state", "note"),
    [
        ({}, [job("PENDING", reason="Resources")], None, "pending", "Resources"),
        ({}, [job("PENDING", reason="JobHeldUser")], None, "pending", "scontrol release"),
        ({}, [job("PENDING", reason="launch failed requeued held")], None, "pending", "scontrol release"),
        ({}, [job("RESV_DEL_HOLD", reason="ReservationDeleted")], None, "pending", "scontrol release"),
        ({}, [job("PENDING", reason="JobHeldAdmin")], None, "pending", "staff alone"),
        ({}, [job("PENDING", reason="AssocMaxWallDurationPerJobLimit")], None, "pending", "prime-hpc cancel"),
        ({}, [job("CONFIGURING")], None, "starting", "nodes are being started"),
        ({}, [job("RUNNING")], None, "starting", ""),
        ({}, [job("FAILED")], None, "lost", "ended (FAILED) before an attempt began"),
        ({}, [job("CANCELLED")], None, "stopped", "cancelled before an attempt began"),
        ({"cancelled": "now"}, [], None, "stopped", "cancelled before an attempt began"),
        ({"cancelled": "now"}, [], "no controller", "stopped", "cancelled before an attempt began"),
        ({"cancelled": 1.0}, [], None, "lost", "began no attempt"),
        ({}, [], None, "lost", "gone from Slurm"),
        ({}, [], "no controller", "pending", "no controller"),
        ({"state": "failed", "error": "sbatch: error: Invalid partition"}, [], None, "failed", "Invalid partition"),
        ({"state": "sending", "job_id": None, "age": 5}, [], None, "submitting", "not answered"),
        ({"state": "sending", "job_id": None, "age": 5, "pid": 2**22 + 1}, [], None, "lost", "submit it again"),
        ({"state": "sending", "job_id": None}, [], None, "lost", "submit it again"),
        ({"state": "sending", "job_id": None}, [], "no controller", "submitting", "no controller"),
        (
            {"state": "sending", "job_id": None},
            [job("PENDING", "31", comment="prime-hpc:tok mine", reason="Priority")],
            None,
            "pending",
            "Priority",
        ),
        ({"state": "local", "job_id": "4711", "host": "elsewhere", "age": 3}, [], None, "starting", "local"),
        ({"state": "local", "job_id": "4711", "host": "elsewhere"}, [], None, "lost", "began no attempt"),
        ({"state": "local", "job_id": str(2**22 + 1), "age": 3}, [], None, "lost", "(logs --role slurm)"),
        ({"state": "local", "job_id": None, "age": 3}, [], None, "starting", "local"),  # a sweep's, being started
        ({"state": "local", "job_id": None}, [], None, "lost", "began no attempt"),
    ],
)
def test_before_the_first_attempt(
    run: Run, record: dict[str, Any], jobs: list[JobInfo], trouble: str | None, state: str, note: str
) -> None:
    if record.get("cancelled") == "now":  # of this test: when the cases were collected is long ago
        record = {**record, "cancelled": NOW}
    status = run.sent(**{"host": socket.gethostname(), **record}).status(*jobs, trouble=trouble)
    assert (status.state, status.attempt) == (state, None)
    assert note in status.note


def test_a_local_job_that_is_slow_to_begin_is_not_lost(run: Run) -> None:
    words = [sys.executable, "-c", "input()", "submitit", str(run.path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as controller:
        run.sent(str(controller.pid), "local", host=socket.gethostname())
        assert run.status().state == "starting"
        controller.kill()


@pytest.mark.parametrize(
    "record",
    [
        {"state": "sending", "job_id": None},
        {"state": "failed", "job_id": None, "error": "no partition"},
        {"state": "local", "job_id": "4711"},
    ],
)
@pytest.mark.parametrize(("outcome", "state"), [("completed", "completed"), ("stopped", "stopped"), ("failed", None)])
def test_a_run_that_was_over_stays_so_where_slurm_got_no_job_of_its_resume(
    run: Run, record: dict[str, Any], outcome: str, state: str | None
) -> None:
    run.sent(**{"age": 300, "host": socket.gethostname(), **record}).attempt(ended=400, outcome=outcome)
    status = run.status()
    assert status.state == (state or ("failed" if record["state"] == "failed" else "lost"))
    assert ("submitted again since, in vain" in status.note) == (state is not None)
    words = {
        "sending": "submit it again",
        "failed": "no partition",
        "local": "the local job ended before an attempt began",
    }
    assert words[record["state"]] in status.note


def test_the_config_is_not_read_for_steps_that_are_known(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand runs that are over each would cost the file server more than the rest."""
    read: list[str] = []
    monkeypatch.setattr("prime_hpc.launch.monitor.run_progress.line_of", lambda path, *_, **__: read.append(path))
    run.sent().attempt(ended=100, outcome="completed").word(state="ended", step=10, max_steps=10, reward=0.5)
    assert run.status().roles == {}, "its servers were ready when it ended"
    (status,), _ = collect([run.path], run.path.parent, ask=answering())
    assert (status.max_steps, read) == (10, [])


def test_an_evaluation_has_no_step_before_its_first_episodes(run: Run) -> None:
    (run.path / "run.yaml").write_text("kind: eval\nname: x\nmax_steps: 100\n")
    console = Console(run.path, 100, kind="eval")
    assert console.progress()["max_steps"] is None
    run.sent().attempt().word("starting", step=None, max_steps=None)
    status = status_of(run.path, ask=answering(job("RUNNING")))
    assert (status.state, status.step, status.max_steps) == ("starting", None, None)
    run.metrics("eval", [{"step": 3, "total": 8, "version": "base", "episodes_per_s": 1.0, "eta_s": None}])
    console.tick({})
    assert (console.progress()["step"], console.progress()["max_steps"]) == (3, 8)


def test_a_file_that_cannot_be_read_is_not_taken_for_an_absent_one_in_silence(run: Run) -> None:
    run.sent().attempt().word()
    (run.path / "metrics").mkdir()
    file = run.path / "metrics" / "trainer.jsonl"
    file.symlink_to(file)
    status = status_of(run.path, ask=answering(job("RUNNING")))
    assert status.state == "running" and status.note.endswith(f"{file} cannot be read: {os.strerror(errno.ELOOP)}")


def test_a_pending_job_carries_slurms_estimate(run: Run) -> None:
    status = run.sent().status(job("PENDING", start=NOW + 3600, reason="Resources"))
    assert status.starts == NOW + 3600
    assert status.time_left_s is None


@pytest.mark.parametrize(
    ("word", "state"),
    [("preflight", "starting"), ("starting", "starting"), ("running", "running"), ("saving", "saving")],
)
def test_alive_by_its_own_word(run: Run, word: str, state: str) -> None:
    status = run.sent().attempt().word(word).status(job("RUNNING", time_left_s=900.0, nodes="n[1-3]"))
    assert (status.state, status.step, status.max_steps, status.attempt) == (state, 7, 40, 1)
    assert (status.time_left_s, status.job_id) == (pytest.approx(900.0, abs=60), "12")
    assert status.nodes == {"trainer": ["n1"]} and status.roles == {"trainer": "ready"}


def test_alive_but_silent_is_said(run: Run) -> None:
    status = run.sent().attempt().word(age=400).status(job("RUNNING"))
    assert status.state == "running" and "no word from the supervisor for 7 min" in status.note


def test_the_word_of_an_earlier_attempt_is_not_taken_for_this_ones(run: Run) -> None:
    run.sent().attempt(1, ended=300, outcome="requeued", next="requeue").attempt(2, began=NOW - 20).word("running")
    status = run.status(job("RUNNING"))
    assert (status.state, status.attempt, status.roles) == ("starting", 2, {})
    assert status.nodes == {"trainer": ["n1", "n2"], "inference[0]": ["n3"]}


@pytest.mark.parametrize(
    ("jobs", "age", "trouble", "state", "note"),
    [
        ([], 30, None, "lost", "job 12 is gone, and attempt 1 wrote no end"),
        ([], 3, None, "running", ""),  # a word this fresh outweighs a queue that was asked a moment before
        ([job("NODE_FAIL")], 30, None, "lost", "Slurm says NODE_FAIL"),
        ([job("CANCELLED")], 30, None, "stopped", "cancelled, and attempt 1 wrote no end"),
        ([job("PENDING", reason="BeginTime", restarts=1)], 30, None, "requeued", "wrote no end; BeginTime"),
        ([job("RUNNING", restarts=1)], 30, None, "starting", "a new attempt of job 12 (restart 1)"),
        ([job("COMPLETING", restarts=1)], 30, None, "requeued", "minutes, a process there cannot be killed"),
        ([job("SUSPENDED")], 300, None, "running", "suspended by Slurm"),
        ([job("NODE_FAIL"), job("PENDING", "13", reason="Resources")], 30, None, "requeued", "Resources"),
        ([job("NODE_FAIL"), job("RUNNING", "13")], 30, None, "starting", "a new attempt of job 13"),
        ([job("NODE_FAIL"), job("PENDING", "13", reason="DependencyNeverSatisfied")], 30, None, "lost", "NODE_FAIL"),
        ([], 100, "timed out", "running", "no word from the supervisor"),
        ([], 1000, "timed out", "lost", "Slurm cannot be asked (timed out)"),
    ],
)
def test_an_attempt_that_wrote_no_end(
    run: Run, jobs: list[JobInfo], age: float, trouble: str | None, state: str, note: str
) -> None:
    status = run.sent(successor="13").attempt(began=NOW - 2000).word(age=age).status(*jobs, trouble=trouble)
    assert status.state == state
    assert note in status.note


def test_a_job_that_is_gone_was_cancelled_where_the_run_says_so(run: Run) -> None:
    """Slurm forgets; a job that it had suspended wrote no end."""
    run.sent(cancelled=NOW - 600).attempt(began=NOW - 2000).word(age=900)
    assert (run.status().state, run.status(trouble="timed out").state) == ("stopped", "lost")
    run.attempt(2, began=NOW - 500)
    assert run.status().state == "lost", "it came back since"


@pytest.mark.parametrize(
    ("outcome", "fields", "jobs", "state", "note"),
    [
        ("completed", {}, [job("COMPLETING")], "completed", ""),
        ("stopped", {"cause": "the file STOP was found"}, [], "stopped", "STOP"),
        ("interrupted", {"cause": "interrupted by SIGTERM"}, [], "stopped", "SIGTERM"),
        ("failed", {"cause": "trainer rank 1: OOM"}, [], "failed", "trainer rank 1: OOM"),
        ("failed", {"cause": "OOM"}, [job("COMPLETING")], "failed", "OOM"),
        ("failed", {"cause": "OOM"}, [job("FAILED"), job("PENDING", "13", reason="Priority")], "requeued", "by: OOM"),
        ("failed", {"cause": "OOM"}, [job("PENDING", "13", reason="DependencyNeverSatisfied")], "failed", "OOM"),
        ("preempted", {"next": "requeue"}, [job("PENDING", reason="BeginTime")], "requeued", "BeginTime"),
        ("preempted", {"next": "requeue"}, [job("COMPLETING")], "requeued", "preempted"),
        (
            "preempted",
            {"next": "slurm"},
            [job("COMPLETING", restarts=1)],
            "requeued",
            "still ends the last attempt; ended",
        ),
        ("requeued", {"next": "requeue"}, [job("RUNNING", restarts=1)], "starting", ""),
        ("failed", {"next": "in_place", "cause": "OOM"}, [job("RUNNING")], "starting", "OOM"),
        ("requeued", {"next": "requeue", "cause": "USR1"}, [], "lost", "was to come back (USR1), but job 12 is gone"),
        ("requeued", {"next": "requeue", "cause": "USR1"}, [job("CANCELLED")], "stopped", "cancelled before it came"),
        ("requeued", {"next": "requeue", "cause": "USR1"}, [job("FAILED")], "lost", "Slurm has forgotten the requeue"),
        ("failed", {"next": "successor"}, [job("FAILED"), job("NODE_FAIL", "13")], "lost", "13 is over (NODE_FAIL); `"),
        (
            "requeued",
            {"next": "successor", "cause": "USR1"},
            [job("FAILED"), job("CANCELLED", "13")],
            "stopped",
            "cancelled before it came",
        ),
        ("requeued", {"next": None, "cause": "USR1"}, [], "failed", "USR1"),
    ],
)
def test_an_attempt_that_ended(
    run: Run, outcome: str, fields: dict[str, Any], jobs: list[JobInfo], state: str, note: str
) -> None:
    status = run.sent(successor="13").attempt(ended=60, outcome=outcome, **fields).word("ended").status(*jobs)
    assert status.state == state
    assert note in status.note
    assert status.outcome == outcome


def test_coming_back_with_slurm_out_of_reach(run: Run) -> None:
    run.sent().attempt(ended=60, outcome="requeued", next="requeue", cause="USR1")
    status = run.status(trouble="no controller")
    assert status.state == "requeued" and "no controller" in status.note


def asked_before(jobs: dict[str, JobInfo], wanted: set[str], by_token: bool) -> Queue:
    return Queue(jobs, asked=NOW - 9)


def test_an_attempt_that_began_after_slurm_was_asked(run: Run) -> None:
    run.sent().attempt(began=NOW - 2).word("starting", age=1)
    for jobs in ({}, {"12": job("PENDING", reason="BeginTime")}):
        status = status_of(run.path, ask=partial(asked_before, jobs), details=False)
        assert (status.state, status.note) == ("starting", "")
    assert run.status(job("PENDING", reason="BeginTime")).state == "requeued"  # asked just now: it was killed


def test_a_job_id_that_slurm_used_again_is_not_this_run(run: Run) -> None:
    run.sent().attempt().word(age=30)
    assert run.status(job("RUNNING")).state == "running"
    for comment in ("prime-hpc:another", "somebody else's", ""):
        status = run.status(job("RUNNING", comment=comment))
        assert status.state == "lost" and "job 12 is gone" in status.note


def test_a_script_sent_by_hand_has_no_token(run: Run) -> None:
    assert run.attempt().word(age=30).status(job("RUNNING", comment="prime-hpc")).state == "running"
    run.sent(command=[], successor="13")  # its successor has
    assert run.status(job("RUNNING", comment="prime-hpc")).state == "running"


def test_submitted_again_after_its_end(run: Run) -> None:
    run.sent("20", age=10).attempt(ended=60, outcome="failed", cause="OOM")
    status = run.status(job("PENDING", "20", reason="Priority"))
    assert (status.state, status.job_id, status.cause) == ("pending", "20", "OOM")
    assert (status.attempt, status.attempt_text) == (1, "after attempt 1")


def test_more_steps_than_before_are_those_of_the_config(run: Run) -> None:
    """`resume RUN --max-steps 40` of a run that had come to its end."""
    run.attempt(ended=60, outcome="completed").word("ended", step=20, max_steps=20)
    assert status_of(run.path, ask=answering()).progress == "20/20", "as it ended"
    assert status_of(run.sent("20", age=10).path, ask=answering(job("PENDING", "20"))).progress == "20/40"
    assert status_of(run.attempt(2, job_id="20").path, ask=answering(job("RUNNING", "20"))).progress == "20/40"


def test_an_evaluation_shows_its_reward_while_it_runs_and_alone(run: Run) -> None:
    (run.path / "run.yaml").write_text("kind: eval\nname: x\n")
    run.sent().attempt().word(step=3, max_steps=8, reward=0.25)
    status = status_of(run.path, ask=answering(job("RUNNING")))
    assert (status.progress, status.figure, status.value) == ("3/8", "reward", 0.25)


@pytest.mark.parametrize("way", ["resumed", "requeued"])
def test_between_two_attempts_nothing_is_said_of_the_one_that_is_over(run: Run, way: str) -> None:
    stall = {"step": 4, "seconds": 90, "headline": "rank 3 is stopped", "file": "x"}
    servers = {"inference[0]": {"running": 9}}
    facts: dict[str, Any] = {"stall": stall, "servers": servers, "gpus": {"n1": {"num_gpus": 8}}}
    run.sent("12" if way == "requeued" else "20", age=10 if way == "resumed" else 600)
    run.attempt(ended=60, outcome="failed", next="requeue").word("ended", **facts)
    status = run.status(job("PENDING", "12" if way == "requeued" else "20"))
    assert (status.stall, status.servers, status.gpus) == (None, {}, {})
    assert status.attempt_text == "after attempt 1"
    status = run.attempt(2).word(attempt=2, **facts).status(job("RUNNING"), job("RUNNING", "20"))
    assert (status.attempt_text, bool(status.stall)) == ("attempt 2 (first start)", True)


def test_without_slurm_the_process_decides(run: Run) -> None:
    run.sent(None, "local").attempt(job_id=None, host=socket.gethostname(), pid=os.getpid(), began=time.time()).word()
    assert run.status().state == "running"


def test_without_slurm_a_killed_process_is_lost(run: Run) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run.attempt(job_id=None, host=socket.gethostname(), pid=child.pid, began=time.time()).word()
    assert run.status().state == "running"
    child.kill()
    child.wait()
    status = run.status()
    assert status.state == "lost" and f"process {child.pid} is gone" in status.note
    assert status.roles == {}, "they were ready when it was last heard of"
    words = [sys.executable, "-c", "input(1)", "submitit", str(run.path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe) as controller:  # of its resume, which has not begun yet
        assert controller.stdout is not None and controller.stdout.read(1), "its words are there a moment after it is"
        run.sent(str(controller.pid), "local", host=socket.gethostname(), age=-600)
        assert run.status().state == "starting"
        controller.kill()


def test_a_local_run_of_another_host(run: Run) -> None:
    run.attempt(job_id=None, host="elsewhere", pid=1).word(age=20)
    assert run.status().state == "running"
    run.word(age=900)
    status = run.status()
    assert status.state == "lost" and "no word from elsewhere for 8 min" in status.note


def test_slurm_is_asked_once_and_only_in_doubt(tmp_path: Path) -> None:
    Run(tmp_path / "done").sent("1").attempt(ended=60, outcome="completed", job_id="1")
    Run(tmp_path / "old").sent("2").attempt(ended=10**6, outcome="failed", job_id="2")
    Run(tmp_path / "live").sent("3").attempt(job_id="3").word()
    Run(tmp_path / "waits").sent("4", successor="5")
    Run(tmp_path / "local").sent("4711", "local", age=2)
    asked: list[tuple[set[str], bool]] = []

    def ask(wanted: set[str], by_token: bool) -> Queue:
        asked.append((wanted, by_token))
        return Queue({"3": job("RUNNING", "3"), "4": job("PENDING", "4")})

    paths = [path for path in tmp_path.iterdir() if path.is_dir()]
    runs, more = collect(paths, tmp_path, ask=ask)
    assert asked == [({"3", "4", "5"}, False)]
    assert {status.name: status.state for status in runs} == {
        **{"done": "completed", "old": "failed", "live": "running", "waits": "pending", "local": "starting"}
    }
    assert more == 0


def test_all_done_asks_nobody(tmp_path: Path) -> None:
    Run(tmp_path / "done").sent("1").attempt(ended=60, outcome="completed", job_id="1")

    def ask(wanted: set[str], by_token: bool) -> Queue:
        raise AssertionError("Slurm was asked")

    assert collect([tmp_path / "done"], tmp_path, ask=ask)[0][0].state == "completed"


def test_those_under_way_come_first_and_are_never_left_out(tmp_path: Path) -> None:
    for number in range(6):
        Run(tmp_path / f"over{number}").sent(age=100 * number).attempt(
            ended=5, outcome="completed", began=NOW - 100 * number
        )
    for number in range(3):
        Run(tmp_path / f"live{number}").sent(age=9000 + number)
    paths = sorted(tmp_path.iterdir())
    runs, more = collect(paths, tmp_path, ask=answering(job("PENDING")), limit=2)
    assert [status.name for status in runs] == ["live0", "live1", "live2"] and more == 6
    runs, more = collect(paths, tmp_path, ask=answering(job("PENDING")), limit=5)
    assert [status.name for status in runs] == ["live0", "live1", "live2", "over0", "over1"] and more == 4


def test_a_waiting_squeue_is_not_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[set[str]] = []
    clock = [0.0]

    def ask_slurm(wanted: set[str], by_token: bool) -> Queue:
        calls.append(wanted)
        clock[0] += 2.0
        return Queue()

    monkeypatch.setattr("prime_hpc.launch.monitor.status.ask_slurm", ask_slurm)
    monkeypatch.setattr("prime_hpc.launch.monitor.status.time", SimpleNamespace(monotonic=lambda: clock[0]))
    ask = PatientAsk(every_s=1000)
    for wanted in ({"1"}, {"1"}, {"1", "2"}, {"1", "2"}):
        ask(wanted, False)
    assert calls == [{"1"}, {"1", "2"}]
    eager = PatientAsk(every_s=1.0)
    eager({"1"}, False)
    clock[0] += 30.0
    eager({"1"}, False)
    assert len(calls) == 3, "the controller took 2 s to answer: it is left alone for longer"
    clock[0] += 20.0
    eager({"1"}, False)
    assert len(calls) == 4


def test_figures_of_a_live_run_and_of_a_second_life(run: Run) -> None:
    rows = [{"step": s, "reward/mean": s / 10} for s in range(1, 9)]
    run.metrics("orchestrator", rows).metrics(
        "trainer", [{"step": s, "loss": 1.0, "time/step": 2.0} for s in (6, 7, 8)]
    )
    # the second attempt went back to step 5; an evaluation of version 5 came late
    again = [{"step": 6, "reward/mean": 0.9}, {"step": 5, "eval/x/mean_reward": 0.1}]
    run.metrics("orchestrator", again).metrics("trainer", [{"step": 6, "loss": 0.5, "time/step": 3.0}])
    status = status_of(run.sent().attempt().word().path, ask=answering(job("RUNNING")))
    assert (status.step, status.figure, status.value) == (6, "reward", 0.9)
    assert status.trend == [0.1, 0.2, 0.3, 0.4, 0.5, 0.9]
    assert status.eta_s == 3.0 * 34


@pytest.mark.parametrize(
    ("step", "last", "shown"), [(None, None, "-"), (None, 9, "0/9"), (3, 9, "3/9"), (206, None, "206")]
)
def test_a_last_step_that_nobody_knows_is_not_shown(step: int | None, last: int | None, shown: str) -> None:
    """The trainer of many runs has none."""
    assert RunStatus("many", "", "running", step=step, max_steps=last).progress == shown


def test_figures_of_sft_and_a_torn_line(run: Run) -> None:
    run.metrics("trainer", [{"step": 1, "loss": 2.5, "time/step": 1.0}, {"step": 2, "loss": "nan", "time/step": 1.0}])
    with (run.path / "metrics" / "trainer.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 1')
    status = status_of(run.path, ask=answering())
    assert (status.step, status.max_steps, status.figure, status.trend) == (2, 40, "loss", [2.5])


def test_only_the_end_of_a_long_metrics_file_is_read(run: Run) -> None:
    run.metrics("trainer", [{"step": s, "time/step": 1.0, "loss": 0.0} for s in range(1, 3001)])
    rows = tail_rows(run.path / "metrics" / "trainer.jsonl", num_bytes=4000)
    assert rows[-1]["step"] == 3000 and 20 < len(rows) < 100
    assert tail_rows(run.path / "absent") == []
    wide = {f"env/dataset_{i}/metric": 0.5 for i in range(200)}
    write_rows(run.path / "metrics" / "wide.jsonl", [trainer_row(step) | wide for step in (1, 2)])
    assert [row["step"] for row in tail_rows(run.path / "metrics" / "wide.jsonl", num_bytes=4000)][-1:] == [2]


def test_checkpoint_and_logs(run: Run) -> None:
    for step in (5, 10):
        (run.path / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (run.path / "checkpoints" / f"step_{step}" / "manifest.json").write_text("{}")
    for file in ("supervisor.log", "slurm-12.out", "attempt_1/trainer/trainer.log", "attempt_1/trainer/rank_0.log"):
        (run.path / "logs" / file).parent.mkdir(parents=True, exist_ok=True)
        (run.path / "logs" / file).touch()
    status = status_of(run.attempt().path, ask=answering(job("RUNNING")))
    assert status.checkpoint == 10 and status.checkpoint_time is not None
    assert set(status.logs) == {"supervisor", "slurm", "trainer"}


def test_a_point_that_was_moved_out_of_its_sweep_has_no_output_of_its_job(run: Run) -> None:
    (run.path / "logs").mkdir()
    (run.path / "logs" / "slurm-7_1.out").symlink_to("../../logs/slurm-7_1.out")
    assert status_of(run.attempt().path, ask=answering()).logs == {}
    assert find_source(run.path, "slurm") is None
    (run.path / "logs" / "slurm-12.out").touch()
    assert status_of(run.path, ask=answering()).logs == {"slurm": str(run.path / "logs" / "slurm-12.out")}
