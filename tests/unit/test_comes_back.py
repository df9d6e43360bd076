"""Whether a job comes back, where Slurm, a newer attempt or the file system was quicker than its end."""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loguru import logger

from prime_hpc.config import Experiment, load_run
from prime_hpc.kubernetes.manifests import FINAL_CODES
from prime_hpc.launch import job
from prime_hpc.launch.pods import COMES_BACK
from prime_hpc.launch.submission import submit
from prime_hpc.slurm import client
from prime_hpc.slurm import requeue as requeue_module
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.client import SlurmError
from prime_hpc.slurm.queue import queue_successor
from prime_hpc.slurm.submission_record import write_record
from prime_hpc.store.attempts import Attempt, begin, read_attempts, write_attempt
from prime_hpc.store.errors import FencedError, StoreError
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.run_dirs import IN_PLACE, read_record
from prime_hpc.supervisor import main
from prime_hpc.supervisor.attempt import in_place, start
from prime_hpc.supervisor.attempt.in_place import begin_in_place
from prime_hpc.supervisor.attempt.restart_policy import EXIT_AGAIN, return_to_queue
from prime_hpc.supervisor.main import _apply_restart_policy, supervise
from prime_hpc.supervisor.stop_requests import Controls, StopRequest
from tests.support.submissions import ended, load, run_dir, use_fake_slurm, write_config

AWAY = SlurmError(["scontrol"], None, "timed out: no answer within 30 s")
JOB = Allocation("100", (("n1",),), "n1", 0)


class Slurm:
    """Answers `scontrol` about one job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: str = "RUNNING", restarts: int = 0) -> None:
        self.state, self.restarts, self.told = state, restarts, list[str]()
        self.at_requeue: Callable[[], None] = self.restart
        self.away = 0
        """So often it does not answer."""
        self.now = 0.0
        self.events: dict[float, Callable[[], None]] = {}
        """What happens so many seconds after it was asked first."""
        for module in (client, requeue_module):
            monkeypatch.setattr(module, "run_slurm", self.run)
        monkeypatch.setattr(requeue_module.signal, "signal", lambda *_: None)

    def restart(self) -> None:
        self.state, self.restarts = "PENDING", self.restarts + 1

    def run(self, argv: list[str], timeout_s: float = 0) -> str:
        if self.away:
            self.away -= 1
            raise AWAY
        if argv[0] == "sinfo":
            return "".join(f"n{i} idle idle (null)\n" for i in (1, 2, 3))
        if argv[1] != "show":
            self.told.append(" ".join([argv[1], *argv[3:]]))
        if argv[1] == "requeue":
            if self.state == "PENDING":
                raise SlurmError(argv, 1, "Job is pending execution for job 7")
            self.at_requeue()
        return f"JobId=7 JobState={self.state} Restarts={self.restarts} NumNodes=1 Partition=gpu ReqNodeList=(null)"

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for when in [when for when in self.events if when <= self.now]:
            self.events.pop(when)()

    def gets_back(self, restarts: int = 0) -> bool:
        return return_to_queue("7", "requeue", 2, ["n3"], restarts=restarts, clock=lambda: self.now, sleep=self.sleep)


CHANGED = ["update NumNodes=2", "update ExcNodeList=n3"]


def test_a_newer_attempt_of_the_job_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(monkeypatch, restarts=1)
    slurm.away = 2  # cut off for a while, in which Slurm gave the job to another node
    assert slurm.gets_back() and slurm.told == []
    assert slurm.gets_back(restarts=1) and slurm.told == ["requeue", *CHANGED]


def test_a_job_that_is_in_the_queue_again_was_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(monkeypatch)

    def is_done_and_says_nothing() -> None:
        slurm.restart()
        raise AWAY

    slurm.at_requeue = is_done_and_says_nothing
    assert slurm.gets_back() and slurm.told == ["requeue", *CHANGED]
    ending = Slurm(monkeypatch, "COMPLETING", restarts=1)
    assert ending.gets_back() and ending.told == CHANGED, "preempted, in a partition that requeues"


def test_a_job_that_slurm_requeues_at_the_same_moment_was_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(monkeypatch)

    def was_quicker() -> None:
        slurm.restart()
        raise SlurmError(["scontrol"], 1, "Job is pending execution for job 7")

    slurm.at_requeue = was_quicker
    assert slurm.gets_back() and slurm.told == ["requeue", *CHANGED]

    def refuses() -> None:
        raise SlurmError(["scontrol"], 1, "Requested operation is presently disabled")

    slurm = Slurm(monkeypatch)
    slurm.at_requeue = refuses
    assert not slurm.gets_back()
    assert return_to_queue("7", "requeue", 2, restarts=0, if_disabled=lambda: True), "otherwise than by a requeue"


def test_a_requeue_that_the_controller_forgets_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before it has written down what it was told: for the next one the job runs on, and has failed once this
    process ends."""
    slurm = Slurm(monkeypatch)

    def is_killed() -> None:
        slurm.state, slurm.restarts, slurm.away = "RUNNING", 0, 3

    slurm.events = {3.0: is_killed}
    assert slurm.gets_back() and slurm.told == 2 * ["requeue", *CHANGED]
    assert (slurm.state, slurm.restarts) == ("PENDING", 1)
    assert slurm.now >= 3.0 + requeue_module.KEPT_S, "the second one may be forgotten as well"


def test_a_requeue_that_slurm_made_itself_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preemption's grace has passed since: it was written down long ago."""
    slurm = Slurm(monkeypatch, "COMPLETING", restarts=1)
    assert slurm.gets_back() and slurm.now == 0.0


def test_a_controller_that_does_not_come_back_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(monkeypatch)

    def is_gone() -> None:
        slurm.away = 10_000

    slurm.events = {3.0: is_gone}
    assert slurm.gets_back() and slurm.told == ["requeue", *CHANGED]


# ------------------------------------------------------------------------------------------------------------ policy


class Run:
    """A run that was submitted, and what its job asks of Slurm."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        use_fake_slurm(tmp_path, monkeypatch)
        self.config = write_config(tmp_path)
        submit(load(self.config))
        self.dir = run_dir(self.config)
        self.rows = self.dir / "attempts.jsonl"
        self.requeued: list[str] = []
        self.is_refused = self.is_disabled = False
        monkeypatch.setattr(main, "return_to_queue", self._requeue)
        monkeypatch.setattr("prime_hpc.supervisor.attempt.early_end.return_to_queue", self._requeue)

    def _requeue(self, job_id: str, *_: object, **more: Any) -> bool:
        self.requeued.append(job_id)
        return bool(more["if_disabled"]()) if self.is_disabled else not self.is_refused

    def end(self, own: Attempt, code: int, controls: Controls | None = None) -> int:
        return _apply_restart_policy(load_run(self.dir), self.dir, JOB, code, own, controls)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


@pytest.mark.parametrize("is_written", [True, False])
def test_an_attempt_that_a_newer_one_has_overtaken_decides_nothing(run: Run, is_written: bool) -> None:
    own = ended(run.config, exit_code=1) if is_written else Attempt(1, 1, time.time() - 600, "first start")
    write_attempt(run.rows, own)
    write_attempt(run.rows, Attempt(2, 2, time.time() - 60, "resumes", job_id="100", restarts=1, host="n9"))
    before = run.rows.read_bytes()
    assert run.end(own, 1) == EXIT_AGAIN
    assert run.requeued == [] and run.rows.read_bytes() == before


def test_a_run_whose_requeue_slurm_refuses_says_so(run: Run) -> None:
    """At a site whose job_submit plugin switches them off; the cause alone named the warning of the time limit."""
    run.is_refused = True
    assert run.end(ended(run.config, exit_code=0), 0) == 1 and run.requeued == ["100"]
    row = read_one(run.rows)
    assert row.next is None and "Slurm did not requeue the job" in (row.cause or "")


def test_a_run_whose_job_slurm_does_not_requeue_goes_on_as_another(run: Run) -> None:
    run.is_disabled = True
    assert run.end(ended(run.config, exit_code=0), 0) == EXIT_AGAIN
    assert read_one(run.rows).next == "successor" and (read_record(run.dir) or {}).get("successor")


def test_pods_are_not_told_that_the_run_is_over_by_an_attempt_that_a_newer_one_has_overtaken(run: Run) -> None:
    write_attempt(run.rows, own := Attempt(1, 1, time.time() - 600, "first start"))
    write_attempt(run.rows, Attempt(2, 2, time.time() - 60, "resumes", host="n9"))
    pod = Allocation("pods", (("p0", "p1"),), "p0", 0, by_slurm=False)
    code = _apply_restart_policy(load_run(run.dir), run.dir, pod, 1, own)
    assert code in COMES_BACK and code not in FINAL_CODES


def test_the_newer_attempts_successor_outlives_the_job_that_it_has_overtaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, config = use_fake_slurm(tmp_path, monkeypatch), write_config(tmp_path)
    submit(load(config, "--slurm.restart.how", "successor"))
    directory = run_dir(config)
    write_attempt(directory / "attempts.jsonl", own := Attempt(1, 1, time.time() - 600, "first start", job_id="100"))
    fake.change("100", state="NODE_FAIL")  # for Slurm, from which its node was cut off
    fake.change("101", state="RUNNING", nodes="n2")
    write_record(directory, job_id="101", successor=None)
    assert queue_successor(directory, "101") == "102"
    write_attempt(directory / "attempts.jsonl", Attempt(2, 2, time.time() - 60, "resumes", job_id="101", host="n2"))
    monkeypatch.setattr(job, "_queue_successor", lambda run: None)  # long ago
    monkeypatch.setattr(main, "supervise", lambda run, in_job: _apply_restart_policy(load_run(run), run, JOB, 1, own))
    assert job.slurm_job([str(directory)]) == EXIT_AGAIN
    assert fake.calls("scancel") == [] and (read_record(directory) or {})["successor"] == "102"


@pytest.mark.parametrize("whose", ["slurm", "slurm.trainer"])
def test_what_the_job_before_has_not_made_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, whose: str
) -> None:
    run, made = Run(tmp_path, monkeypatch), tmp_path / "made"
    flags = ["--name", "second", f"--{whose}.dependency", "afterok:1", "--sft.data.type", "auto"]
    submit(load(run.config, *flags, "--model.name", str(made), "--sft.data.path", str(tmp_path / "rows.jsonl")))
    second = tmp_path / "out" / "second"
    monkeypatch.setattr(main, "await_made", lambda experiment: start.await_made(experiment, within_s=0))
    environ = {**os.environ, "SLURM_JOB_ID": "101", "SLURM_JOB_NODELIST": "n1"}
    assert supervise(second, environ, in_job=True) == 2 and run.requeued == []
    said = capsys.readouterr().err
    assert f"{made} is not there: the job that this one waited for" in said and "rows.jsonl does not exist" in said
    assert "rows.jsonl does not exist" in (second / "logs" / "supervisor.log").read_text(), "what `logs` shows"
    made.mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    start.await_made(load_run(second), within_s=0)


@pytest.mark.parametrize("in_job", [True, False])
def test_an_attempt_that_is_overtaken_while_it_begins_is_no_wrong_config(
    run: Run, monkeypatch: pytest.MonkeyPatch, in_job: bool
) -> None:
    def overtaken(*_: object) -> None:
        raise FencedError("incarnation 2 of this run has begun")

    monkeypatch.setattr(start, "check_incarnation", overtaken)
    monkeypatch.setattr(start, "choose_start", lambda *_: None)
    monkeypatch.setattr(main, "_prepare", lambda experiment, path, *_: start.begin_attempt(experiment, path))
    environ = {**os.environ, "SLURM_JOB_ID": "100", "SLURM_JOB_NODELIST": "n1"}
    assert supervise(run.dir, environ, in_job=in_job) == (EXIT_AGAIN if in_job else 2)
    assert run.requeued == []


def test_the_job_comes_back_where_its_next_attempt_got_no_further_than_its_line(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ended(run.config, exit_code=1, saved_step=5)

    def fail(attempt: Attempt) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def begin_attempt(*_: object, **__: object) -> Attempt:
        return begin(run.rows, incarnation=2, why="resumes at step 5", resume_step=5, job_id="100")

    monkeypatch.setattr(in_place, "begin_attempt", begin_attempt)
    left = SimpleNamespace(end=lambda grace_s: None, hand_over=lambda incarnation: [], held=None, swap={})
    led: Any = SimpleNamespace(left=left, attempt=before, follow=fail)
    assert begin_in_place(led, load_run(run.dir), run.dir, Patience(0.0)) is None
    assert run.end(before, 1) == EXIT_AGAIN and run.requeued == ["100"]
    first, second = read_attempts(run.rows)
    assert (first["next"], second["outcome"], second["next"]) == (IN_PLACE, "failed", "requeue")
    assert second["ended"] is not None and "could not begin" in (second["cause"] or "")


@pytest.mark.parametrize("why", ["a newer attempt of the run has begun", "stopped"])
def test_nothing_goes_on_inside_a_job_whose_run_is_anothers_or_was_stopped(run: Run, why: str) -> None:
    """Though the ledger says otherwise: the newer attempt's line is open, or the end could not be written."""
    write_attempt(run.rows, Attempt(1, 1, time.time() - 600, "first start", job_id="100"))
    own = replace(read_one(run.rows), ended=time.time(), outcome="stopped", cause="a test", exit_code=1)
    if why != "stopped":
        own.outcome = "failed"
        write_attempt(run.rows, Attempt(2, 2, time.time() - 60, "resumes", job_id="101"))
    before, over = run.rows.read_bytes(), list[float]()
    left = SimpleNamespace(end=over.append, hand_over=lambda incarnation: pytest.fail("the servers were handed over"))
    led: Any = SimpleNamespace(left=left, attempt=own)
    said: list[str] = []
    sink = logger.add(said.append, format="{message}")
    try:
        assert begin_in_place(led, load_run(run.dir), run.dir, Patience(0.0)) is None
    finally:
        logger.remove(sink)
    assert f"the run does not go on inside this job: {why}\n" in said
    assert len(over) == 1 and run.rows.read_bytes() == before


def test_a_stop_whose_end_could_not_be_written_holds(run: Run) -> None:
    write_attempt(run.rows, Attempt(1, 1, time.time() - 60, "first start", job_id="100"))
    own = replace(read_one(run.rows), ended=time.time(), outcome="stopped", cause="the file STOP was found")
    own.exit_code = 0
    assert run.end(own, 0) == 0 and run.requeued == []
    crashed = replace(own, outcome="failed", exit_code=1)
    assert run.end(crashed, 1) == EXIT_AGAIN and run.requeued == ["100"]


def read_one(path: Path) -> Attempt:
    [row] = read_attempts(path)
    return Attempt(**row)


def test_a_stop_that_was_found_while_a_crashed_attempt_ended_holds(run: Run) -> None:
    own = ended(run.config, exit_code=1, saved_step=5)
    asked = Controls(run.dir, JOB, 120.0)
    asked.ask_to_stop("an alarm wants the run to stop")
    assert run.end(own, 1, asked) == 1 and run.requeued == []
    row = read_one(run.rows)
    assert (row.outcome, row.next) == ("stopped", None)
    assert (row.cause or "").startswith("an alarm wants the run to stop; before that: ")


def test_a_ledger_that_cannot_be_read_at_once_is_read_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ended(run.config, "stopped", exit_code=0)
    tries: list[Path] = []
    real = main.rows_with

    def stale(path: Path, own: Attempt) -> Any:
        tries.append(path)
        if len(tries) == 1:
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, own)

    monkeypatch.setattr(main, "rows_with", stale)
    assert run.end(own, 0) == 0 and len(tries) == 2


class Ends:
    """In a supervisor's place: an attempt that has ended."""

    left = None

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt

    def run(self) -> int:
        return self.attempt.exit_code or 0


@pytest.mark.parametrize(
    ("outcome", "how", "successor", "code"),
    [
        ("failed", "requeue", None, EXIT_AGAIN),
        ("stopped", "requeue", None, 1),
        ("failed", "off", None, 1),
        ("failed", "successor", None, EXIT_AGAIN),
        ("failed", "auto", "101", EXIT_AGAIN),
    ],
)
def test_a_run_that_cannot_be_read_at_its_end_comes_back_all_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch, outcome: str, how: str, successor: str | None, code: int
) -> None:
    own = ended(run.config, outcome, exit_code=1)
    write_record(run.dir, successor=successor)

    def stale(*_: object) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    def experiment(path: Path) -> Experiment:
        one = load_run(path)
        restart = one.slurm.restart.model_copy(update={"how": how})
        waits = one.supervisor.model_copy(update={"read_timeout_s": 0.0})
        slurm = one.slurm.model_copy(update={"restart": restart})
        return one.model_copy(update={"slurm": slurm, "supervisor": waits})

    monkeypatch.setattr(main, "load_patiently", experiment)
    monkeypatch.setattr(main, "_prepare", lambda *_: Ends(own))
    for name in ("write_report", "read_attempts", "rows_with"):
        monkeypatch.setattr(main, name, stale)
    job = {"SLURM_JOB_ID": "100", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_END_TIME": f"{time.time() + 9999:.0f}"}
    assert supervise(run.dir, {**os.environ, **job}, in_job=True) == code
    assert run.requeued == (["100"] if how == "requeue" and code == EXIT_AGAIN else []), "a successor is released"


def test_an_early_end_that_cannot_be_written_comes_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StoreError("no space left on device")

    monkeypatch.setattr(main, "write_early_end", full)
    environ = {"SLURM_JOB_ID": "100", "SLURM_JOB_NODELIST": "n1"}
    for outcome, code in (("preempted", 0), ("stopped", 0)):
        request = StopRequest("warned by SIGUSR1", outcome, code, True, 1.0)
        ended_with = main._end_early(run.dir, environ, True, request, None)
        assert ended_with == (EXIT_AGAIN if outcome == "preempted" else 0)
    assert run.requeued == ["100"]
