"""A scancel that comes while an attempt ends for another reason: the job does not come back."""

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.config import load_run
from prime_hpc.config.run_files import SAVE, STOP
from prime_hpc.launch.submission import submit
from prime_hpc.slurm import client
from prime_hpc.slurm import requeue as requeue_module
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.client import SlurmError
from prime_hpc.slurm.requeue import requeue
from prime_hpc.slurm.termination import Verdict
from prime_hpc.store.attempts import Ended, begin, read_attempts
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor import main, stop_requests, supervisor
from prime_hpc.supervisor.attempt.crash_recovery import close_crashed_attempts
from prime_hpc.supervisor.main import _apply_restart_policy
from prime_hpc.supervisor.stalls.collect import WHY
from prime_hpc.supervisor.status_file import LiveStatus
from prime_hpc.supervisor.stop_requests import CANCELLED_BUDGET_S, Controls
from prime_hpc.supervisor.supervisor import Supervisor
from tests.support.submissions import ended, load, run_dir, use_fake_slurm, write_config

CANCELLED = Verdict("interrupted", "cancelled (scancel)", False)
AT_LIMIT = Verdict("requeued", "the time limit was reached before everything was saved", False)


def controls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict, left_s: float = 115.0) -> Controls:
    monkeypatch.setattr(stop_requests, "why_terminated", lambda *_: verdict)
    job = Allocation("12", (("n1",),), "n1", 0, ("12",), time.time() + left_s)
    return Controls(tmp_path, job, 120.0)


def saving(controls: Controls) -> Any:
    """A supervisor with all roles at work, as far as requests reach."""
    one: Any = object.__new__(Supervisor)
    one._controls, one._saves_asked, one._stop, one._children = controls, 0, None, None
    one.attempt = SimpleNamespace(next=None, attempt=1, lost_nodes=[])
    one._ready_at, one.now, one.left = 1.0, 0.0, None
    one._led = SimpleNamespace(
        roles=[],
        clock=SimpleNamespace(now=lambda: one.now),
        hubs=SimpleNamespace(publish=lambda *_, **__: None),
        pulse=SimpleNamespace(tick=None),
        servers_without=lambda lost: pytest.fail("its servers were kept"),
        kill=lambda role, *, reap: None,
        let_go=lambda *_: False,
    )
    one._run_watch = SimpleNamespace(ask_why=lambda: None, lack_of_room=lambda: "")
    one._console = SimpleNamespace(progress=lambda: {"step": 5, "max_steps": 100}, close=lambda: None)
    return one


@pytest.mark.parametrize("first", ["signal", "limit"])
def test_a_scancel_while_the_run_saves_is_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    asked = controls(tmp_path, monkeypatch, CANCELLED, 115 if first == "signal" else 30)
    one = saving(asked)
    if first == "signal":
        asked._on_signal(signal.SIGUSR1, None)
    one._handle_requests()
    assert one._finished().outcome == "requeued"
    asked._on_signal(signal.SIGTERM, None)
    one._handle_requests()
    end = one._finished()
    assert (end.outcome, end.code) == ("interrupted", 143) and "before that: " in end.cause
    one.now = CANCELLED_BUDGET_S + 1
    with pytest.raises(Ended, match="not saved within") as raised:
        one._handle_requests()
    assert raised.value.outcome == "interrupted"


def test_the_limit_that_strikes_a_run_which_saves_is_no_scancel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = controls(tmp_path, monkeypatch, AT_LIMIT)
    one = saving(asked)
    asked._on_signal(signal.SIGUSR1, None)
    one._handle_requests()
    asked._on_signal(signal.SIGTERM, None)
    one._handle_requests()
    assert one._finished().outcome == "requeued"


def test_a_scancel_while_a_crashed_attempt_is_ended_is_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = controls(tmp_path, monkeypatch, CANCELLED)
    one = saving(asked)
    one._experiment = SimpleNamespace(supervisor=SimpleNamespace(grace_s=0.0))
    one._others = []
    written: list[Ended] = []

    def write_down(ended: Ended) -> Ended:
        written.append(ended)
        return ended

    one._write_down = write_down

    def end_roles(*_: object) -> list[int]:
        asked._on_signal(signal.SIGTERM, None)
        return []

    monkeypatch.setattr(supervisor, "end_roles", end_roles)
    monkeypatch.setattr(supervisor, "reap_roles", lambda *_: [])
    end = one._end(Ended(1, "trainer ended with exit code 1"))
    assert (end.outcome, end.code, written) == ("interrupted", 143, [end])
    assert one._end(Ended(0, "done")).outcome == "completed"


@pytest.mark.parametrize("is_warned", [True, False])
def test_a_stop_file_holds_that_comes_after_the_last_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_warned: bool
) -> None:
    asked = controls(tmp_path, monkeypatch, CANCELLED)
    if is_warned:
        asked._on_signal(signal.SIGUSR1, None)
    request = asked.poll()
    assert (request.outcome if request is not None else None) == ("requeued" if is_warned else None)
    for name in (STOP, SAVE):
        (tmp_path / name).touch()
    final = asked.final_request("requeued")
    assert final is not None and final.outcome == "stopped"
    assert not (tmp_path / STOP).exists() and (tmp_path / SAVE).exists(), "that is the next attempt's"


@pytest.mark.parametrize("by", ["signal", "grace"])
def test_who_holds_it_up_can_be_asked_while_a_stop_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    asked = controls(tmp_path, monkeypatch, CANCELLED, 5000)
    monkeypatch.setattr(stop_requests, "granted_until", lambda _: time.time() + 600)
    one, heard = saving(asked), list[str]()
    one._run_watch = SimpleNamespace(ask_why=lambda: heard.append("why"))
    asked.note_warning(signal.SIGUSR1 if by == "signal" else signal.SIGTERM)
    one._handle_requests()
    assert one._stop is not None
    (tmp_path / WHY).touch()
    asked._next_look = 0.0
    one._handle_requests()
    one._handle_requests()
    assert heard == ["why"] and not (tmp_path / WHY).exists()


@pytest.mark.parametrize("by", ["file", "alarm", "interrupt"])
def test_a_stop_while_a_crashed_attempt_saves_is_heeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    asked = controls(tmp_path, monkeypatch, CANCELLED, 5000)
    one = saving(asked)
    one._experiment = SimpleNamespace(
        supervisor=SimpleNamespace(grace_s=0.0),
        slurm=SimpleNamespace(restart=SimpleNamespace(in_place=True, node_timeout_s=9.0)),
    )
    one._plan, one._fence = SimpleNamespace(steps=SimpleNamespace()), SimpleNamespace(is_fenced=False)
    one._ended_by = SimpleNamespace(is_server=False, was_ready=True), []
    one._others = []
    one._write_down = lambda ended: ended
    monkeypatch.setattr(supervisor, "reap_roles", lambda *_: [])  # it would end all children of this process
    if by == "file":
        (tmp_path / STOP).touch()
    elif by == "alarm":
        asked.ask_to_stop("an alarm wants it")
    else:
        asked._on_signal(signal.SIGINT, None)
    assert one._cannot_save() == (by == "interrupt") and not (tmp_path / STOP).exists()
    crash = Ended(1, "orchestrator ended with exit code 1")
    assert one._roles_to_leave(crash) is None
    end = one._end(crash)
    wanted = ("interrupted", 130) if by == "interrupt" else ("stopped", 1)
    assert (end.outcome, end.code) == wanted and end.cause.endswith("before that: orchestrator ended with exit code 1")


def test_a_node_that_is_lost_while_a_stop_saves_brings_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = saving(controls(tmp_path, monkeypatch, CANCELLED, 5000))
    one._plan = SimpleNamespace(steps=SimpleNamespace(no_kill=True))
    (tmp_path / STOP).touch()
    one._handle_requests()
    role: Any = SimpleNamespace(spec=SimpleNamespace(label="trainer", name="trainer"), pid=1, log_file="log")
    role.is_server, role.was_ready, role.state = False, True, "ready"
    role.log_excerpt, role.has_reported = lambda: "", lambda state: False
    with pytest.raises(Ended, match="STOP was found; it did not end in order: node n2 of trainer was lost") as raised:
        one._on_lost_nodes(role, ["n2"])
    assert raised.value.outcome == "stopped" and one.attempt.lost_nodes == ["n2"]
    role.is_server, role.state = True, "ready"
    one._on_lost_nodes(role, ["n3"])
    assert role.state == "done", "nobody asks the servers any more"


@pytest.mark.parametrize("by", ["deadline", "trainer"])
def test_a_stop_for_which_there_is_no_room_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    asked = controls(tmp_path, monkeypatch, CANCELLED, 5000)
    one, held = saving(asked), "the checkpoint of step 7 cannot be written now: c: disk full"
    one._run_watch.lack_of_room = lambda: held
    (tmp_path / STOP).touch()
    one._handle_requests()
    if by == "deadline":
        one.now = 1e4
        with pytest.raises(Ended, match=f"STOP was found; not saved within 600 s: {held}") as raised:
            one._handle_requests()
    else:
        role: Any = SimpleNamespace(spec=SimpleNamespace(name="trainer", max_restarts=0), restarts=0, log_file="log")
        role.is_server, role.was_ready, role.state, role.silent_hosts = False, True, "ready", lambda wait_s: []
        role.log_excerpt, role.has_reported = lambda: "", lambda state: False
        one._led.replicas = SimpleNamespace(awaiting_recovery=lambda role: False)
        with pytest.raises(Ended, match="STOP was found; it did not end in order: c: disk full") as raised:
            one._on_unexpected_exit(role, "c: disk full", False, 74)
    assert (raised.value.code, raised.value.outcome) == (74, "stopped")


@pytest.mark.parametrize("lost", [["n2"], []])
def test_a_worker_that_says_it_is_done_while_its_nodes_are_waited_for_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: list[str]
) -> None:
    one = saving(controls(tmp_path, monkeypatch, CANCELLED, 5000))
    (tmp_path / STOP).touch()
    one._handle_requests()
    said: list[str] = []

    def silent_hosts(wait_s: float) -> list[str]:
        said.append("done")
        return lost

    role: Any = SimpleNamespace(spec=SimpleNamespace(label="trainer", name="trainer"), state="ready")
    role.is_server, role.was_ready, role.silent_hosts = False, True, silent_hosts
    role.has_reported = said.__contains__
    one._on_unexpected_exit(role, "trainer ended with exit code 1")
    assert role.state == "done"


def test_slurms_requeue_of_a_run_that_saves_already_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = controls(tmp_path, monkeypatch, Verdict("preempted", "preempted by a job of higher priority", True))
    one = saving(asked)
    asked._on_signal(signal.SIGUSR1, None)
    one._handle_requests()
    assert one.attempt.next is None
    asked._on_signal(signal.SIGTERM, None)
    one._handle_requests()
    assert one.attempt.next == "slurm" and one._finished().outcome == "requeued"


def test_a_scancel_before_the_end_is_written_down_keeps_the_job_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_slurm(tmp_path, monkeypatch)
    config = write_config(tmp_path)
    submit(load(config))
    own = ended(config, "requeued", exit_code=0, saved_step=5)
    asked = controls(tmp_path, monkeypatch, CANCELLED)
    asked._on_signal(signal.SIGTERM, None)
    monkeypatch.setattr(main, "return_to_queue", lambda *_, **__: pytest.fail("the job was requeued"))
    run, job = run_dir(config), Allocation("100", (("n1",),), "n1", 0)
    assert _apply_restart_policy(load_run(run), run, job, 0, own, asked) == 143
    row = read_attempts(run / "attempts.jsonl")[-1]
    assert (row["outcome"], row["next"]) == ("interrupted", None)


def test_a_cancelled_job_is_not_requeued(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def run_slurm(argv: list[str], timeout_s: float) -> str:
        told.append(argv[1])
        return "JobId=12 JobState=CANCELLED Restarts=0 NumNodes=2"

    for module in (client, requeue_module):
        monkeypatch.setattr(module, "run_slurm", run_slurm)
    monkeypatch.setattr(requeue_module.signal, "signal", lambda *_: None)
    with pytest.raises(SlurmError, match="it was cancelled"):
        requeue("12", 2, 0)
    assert told == ["show"]


def test_an_attempt_that_is_killed_as_it_saves_was_preempted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no accounting says so it counted as a crash: a run that is preempted often stayed down."""
    fake, config = use_fake_slurm(tmp_path, monkeypatch), write_config(tmp_path)
    submit(load(config))
    run = run_dir(config)
    own = begin(run / "attempts.jsonl", incarnation=1, why="first start", resume_step=None, job_id="100")
    asked = controls(tmp_path, monkeypatch, Verdict("preempted", "preempted by a job of higher priority", True))
    one = saving(asked)
    one.attempt.nodes, one._run_watch.facts = {}, dict
    asked._on_signal(signal.SIGTERM, None)
    one._handle_requests()
    LiveStatus(run, attempt=own.attempt).write(now=True, **one._facts())
    fake.change("100", state="RUNNING", nodes="n1", restarts=1)
    job = Allocation("100", (("n1",),), "n1", 1, ("100",))
    close_crashed_attempts(load_run(run), run, RunPaths(run), job)
    (row,) = read_attempts(run / "attempts.jsonl")
    assert row["outcome"] == "preempted" and "killed before everything was saved" in str(row["cause"])
