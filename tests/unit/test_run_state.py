"""What a run's files and Slurm's answer come to, at a given time."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prime_hpc.launch.monitor.run_facts import Queue, RunStatus, read_evidence
from prime_hpc.launch.monitor.run_state import judge
from prime_hpc.launch.monitor.who_hangs import _ask_supervisor, why_idle
from prime_hpc.runtime.atomic_write import write_atomic
from tests.support.runs import wait_until
from tests.support.status_run import Run, job


@pytest.mark.parametrize(("state", "left_s"), [("RUNNING", 890.0), ("SUSPENDED", 900.0)])
def test_the_time_left_is_that_of_now_not_of_slurms_answer(tmp_path: Path, state: str, left_s: float) -> None:
    run = Run(tmp_path / "run")
    queue = Queue({"12": job(state, time_left_s=900.0)}, asked=run.now - 10)
    evidence = read_evidence(run.sent().attempt().word("running").path)
    assert judge(evidence, queue, run.now).time_left_s == left_s


def test_a_nodes_clock_that_is_behind_makes_no_silence(tmp_path: Path) -> None:
    run = Run(tmp_path / "run").sent().attempt().word(age=90)
    assert run.status(job("RUNNING")).note == "no word from the supervisor for 90 s"
    os.utime(run.path / "status.json")
    assert not run.status(job("RUNNING")).note


@pytest.mark.parametrize(
    ("age", "cancelled", "state", "words"),
    [
        (5, False, "running", []),
        (100, False, "running", ["no word from the supervisor for 100 s", "Slurm cannot be asked (timed out)"]),
        (100, True, "running", ["cancelled", "no word", "Slurm cannot be asked (timed out)"]),
        (400, False, "lost", ["Slurm cannot be asked (timed out)"]),
    ],
)
def test_a_run_of_which_a_silent_slurm_says_nothing(
    tmp_path: Path, age: float, cancelled: bool, state: str, words: list[str]
) -> None:
    run = Run(tmp_path / "run")
    run.sent(cancelled=run.now - age if cancelled else None).attempt().word(age=age)
    status = run.status(trouble="timed out")
    assert status.state == state and all(word in status.note for word in words)
    assert words or not status.note


def test_nobody_is_looked_for_on_nodes_that_are_being_started(tmp_path: Path) -> None:
    run = Run(tmp_path / "run").sent()
    assert "being started" in why_idle(run.status(job("CONFIGURING", nodes="n1")))
    run.attempt(ended=60, outcome="preempted", next="slurm")
    assert "being started" in why_idle(run.status(job("CONFIGURING", nodes="n1", restarts=1)))
    assert not why_idle(run.status(job("RUNNING", nodes="n1", restarts=1)))


def test_whoever_asks_a_supervisor_takes_the_answer_that_comes_whatever_its_clock(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "attempt_1" / "stalls"
    folder.mkdir(parents=True)
    (folder / "asked_7.json").write_text('{"headline": "an earlier answer"}')

    def answer() -> None:
        wait_until(lambda: (tmp_path / "WHY").exists(), 30, "the question")
        write_atomic(folder / "asked_3.json", '{"headline": "nobody hangs"}')

    with ThreadPoolExecutor() as pool:
        pool.submit(answer)
        status = RunStatus("run", str(tmp_path), "running", attempt=1)
        assert _ask_supervisor(tmp_path, status, 30.0) == {"headline": "nobody hangs"}
