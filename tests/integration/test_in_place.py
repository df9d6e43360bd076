"""A crash that costs no place in the queue: the next attempt begins in the same job, the server serves on. Real
supervisor, agents and roles, a stand-in for srun."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from prime_hpc.runtime.process_tree import family, send
from prime_hpc.store.attempts import read_attempts
from tests.support.forked import so_far

WAIT_S = 280.0
RESTART = {"how": "requeue", "node_timeout_s": 4, "fence_s": 15, "max_crashes": 9}


class Job:
    """A led job whose trainer follows `actions`, and its orchestrator, if it has one, others; node n3 is spare."""

    def __init__(
        self, folder: Path, actions: list[str], orchestrator: Sequence[str] = (), spare: bool = True, **restart: Any
    ) -> None:
        self.dir, self.log = folder / "run", (folder / "log").open("wb+")
        self.dir.mkdir()
        roles = {"trainer": actions, "orchestrator": [*orchestrator], "spares": ["n3"] if spare else []}
        facts = json.dumps({**roles, "restart": RESTART | restart})
        command = [sys.executable, "-m", "tests.support.led_job", str(self.dir), facts]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True)

    def said(self) -> str:
        return so_far(self.log).decode()

    def wait(self, holds: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < end and self.process.poll() is None, f"{what}: {self.said()}"
            time.sleep(0.05)

    def let_go(self) -> None:
        """Touch the file `go`, once all roles are ready."""
        self.wait(lambda: "all roles are ready" in self.said(), "all roles are ready")
        (self.dir.parent / "go").touch()

    def ended(self) -> list[dict[str, Any]]:
        """Its attempts, once it is over."""
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.said()) from None
        return self.attempts()

    def attempts(self) -> list[dict[str, Any]]:
        return [dict(row) for row in read_attempts(self.dir / "attempts.jsonl")]

    def processes(self, *words: str) -> list[psutil.Process]:
        """Of all roles and agents, those whose command line has these words in a row."""
        found = []
        for process in family(self.process.pid):
            try:
                line = process.cmdline()
            except psutil.Error:
                continue
            if any(tuple(line[i : i + len(words)]) == words for i in range(len(line))) and "-m" in line[:3]:
                found.append(process)
        return found

    def server(self) -> list[psutil.Process]:
        return self.processes("tests.support.scripted_role", "inference")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(actions: list[str], orchestrator: Sequence[str] = (), spare: bool = True, **restart: Any) -> Job:
        jobs.append(Job(tmp_path, actions, orchestrator, spare, **restart))
        return jobs[-1]

    yield make
    for job in jobs:
        send(family(job.process.pid), signal.SIGKILL)
        job.process.wait()


def test_after_a_crash_the_trainer_starts_again_and_the_server_serves_on(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    crashed, over = tmp_path / "crashed", tmp_path / "over"
    job = start(["beat:0.5", "ready", f"await:{tmp_path}/go", f"once:{crashed}:exit:1", f"await:{over}", "done"])
    job.let_go()
    job.wait(lambda: len(job.attempts()) == 2, "a second attempt")
    (server,) = job.server()
    created = server.create_time()
    time.sleep(8)  # longer than agents take to look for a newer attempt: those of the server must not end it
    assert [process.create_time() for process in job.server()] == [created], job.said()
    assert (job.dir / "logs" / "attempt_2" / "inference" / "inference.log").exists()
    over.touch()
    first, second = job.ended()
    assert job.process.returncode == 0, job.said()
    assert (first["outcome"], first["next"], second["outcome"], second["next"]) == (
        *("failed", "in_place"),
        *("completed", None),
    )
    assert second["incarnation"] == first["incarnation"] + 1 and second["nodes"]["inference[0]"] == ["n2"]
    assert job.said().count("started inference[0]") == 1 and not server.is_running()


@pytest.mark.exhaustive
def test_the_second_time_in_a_row_the_job_goes_back_to_the_queue(start: Callable[..., Job], tmp_path: Path) -> None:
    crash = [f"await:{tmp_path}/go", f"once:{tmp_path}/crashed:exit:3", f"await:{tmp_path}/again", "exit:3"]
    job = start(["beat:0.5", "ready", *crash])
    job.let_go()
    job.wait(lambda: job.said().count("trainer is ready") == 2, "the trainer is ready again")
    (tmp_path / "again").touch()
    first, second = job.ended()
    assert job.process.returncode == 1
    assert [first["next"], second["next"]] == ["in_place", None]
    assert "2 attempts in a row saved nothing new" in job.said()
    assert not job.processes("tests.support.scripted_role")


def test_a_spare_node_takes_the_place_of_the_trainers_lost_one(start: Callable[..., Job], tmp_path: Path) -> None:
    over = tmp_path / "over"
    job = start(["beat:0.5", "ready", f"await:{over}", "done"])
    job.let_go()
    (server,) = job.server()
    for process in job.processes("prime_hpc.supervisor.agent", str(job.dir), "trainer"):
        os.kill(process.pid, signal.SIGSTOP)  # its node says nothing any more
    job.wait(lambda: len(job.attempts()) == 2, "a second attempt")
    job.wait(lambda: job.said().count("trainer is ready") == 2, "the trainer is ready again")
    assert server.is_running()
    over.touch()
    first, second = job.ended()
    assert (first["outcome"], first["lost_nodes"], second["outcome"]) == ("node_lost", ["n1"], "completed")
    assert second["nodes"] == {"inference[0]": ["n2"], "trainer": ["n3"]}


@pytest.mark.exhaustive
def test_a_spare_node_takes_the_place_of_the_only_servers_lost_one(start: Callable[..., Job], tmp_path: Path) -> None:
    over = tmp_path / "over"
    job = start(["beat:0.5", "ready", f"await:{over}", "done"])
    job.let_go()
    for process in job.processes("prime_hpc.supervisor.agent", str(job.dir), "inference[0]"):
        os.kill(process.pid, signal.SIGSTOP)  # its node says nothing any more
    job.wait(lambda: job.said().count("inference[0] is ready") == 2, "the server is ready again")
    assert "its server is started on the spare node n3" in job.said()
    over.touch()
    (only,) = job.ended()
    assert (only["outcome"], only["lost_nodes"]) == ("completed", ["n2"]), job.said()
    assert job.said().count("started trainer") == 1


@pytest.mark.exhaustive
def test_a_trainer_that_is_well_saves_before_the_loss_of_another_node_ends_the_attempt(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    job = start([f"saves:{saved}", "beat:0.5", "ready", "sleep:600"], spare=False)
    job.let_go()
    for process in job.processes("prime_hpc.supervisor.agent", str(job.dir), "inference[0]"):
        os.kill(process.pid, signal.SIGSTOP)  # its node says nothing any more
    (only,) = job.ended()
    assert (only["outcome"], only["lost_nodes"]) == ("node_lost", ["n2"]) and saved.exists(), job.said()


def crash_once(start: Callable[..., Job], folder: Path, *orchestrator: str) -> tuple[Job, list[float], list[float]]:
    """An RL job whose trainer crashes once: the job, and when its orchestrator's processes began before and after."""
    over = folder / "over"
    trains = ["beat:0.5", "ready", f"await:{folder}/go", f"once:{folder}/crashed:exit:1", f"await:{over}", "done"]
    job = start(trains, [*orchestrator, "beat:0.5", "ready", f"await:{over}", "done"])
    job.wait(lambda: "all roles are ready" in job.said(), "all roles are ready")
    before = began(job)
    job.let_go()
    job.wait(lambda: job.said().count("trainer is ready") == 2, "the trainer is ready again")
    job.wait(lambda: began(job), "an orchestrator")
    return job, before, began(job)


def began(job: Job) -> list[float]:
    return [process.create_time() for process in job.processes("tests.support.scripted_role", "orchestrator")]


def test_an_orchestrator_that_holds_goes_on_beside_the_servers(start: Callable[..., Job], tmp_path: Path) -> None:
    job, before, after = crash_once(start, tmp_path, "hold:0:1:2")
    assert before == after and len(after) == 1, job.said()
    time.sleep(8)  # longer than its agent takes to look for a newer attempt
    assert began(job) == before
    (tmp_path / "over").touch()
    first, second = job.ended()
    assert job.process.returncode == 0, job.said()
    assert (first["next"], second["outcome"]) == ("in_place", "completed")
    assert second["nodes"] == {"inference[0]": ["n2"], "trainer": ["n1"], "orchestrator": ["n1"]}
    assert (first["kept"], second["kept"]) == ([], ["inference[0]", "orchestrator"])
    assert "its servers and its orchestrator go on" in job.said()
    assert job.said().count("started orchestrator") == 1 and job.said().count("orchestrator is done") == 1
    assert (job.dir / "logs" / "attempt_2" / "orchestrator" / "orchestrator.log").exists()


@pytest.mark.exhaustive
def test_one_that_lacks_a_batch_of_the_steps_to_take_again_starts_again(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job, before, after = crash_once(start, tmp_path, "hold:3:4:5")
    assert len(before) == len(after) == 1 and before != after, job.said()
    (tmp_path / "over").touch()
    assert [row["outcome"] for row in job.ended()] == ["failed", "completed"]
    assert (
        "it has batches 4 to 5, and 1 is the next one" in job.said() and job.said().count("started orchestrator") == 2
    )


@pytest.mark.exhaustive
def test_one_that_does_not_answer_starts_again(start: Callable[..., Job], tmp_path: Path) -> None:
    job, before, after = crash_once(start, tmp_path)
    assert len(before) == len(after) == 1 and before != after, job.said()
    (tmp_path / "over").touch()
    assert [row["outcome"] for row in job.ended()] == ["failed", "completed"]
    assert "the orchestrator did not answer" in job.said()


@pytest.mark.exhaustive
def test_one_that_crashes_itself_after_it_has_gone_on_starts_again(start: Callable[..., Job], tmp_path: Path) -> None:
    job, before, after = crash_once(start, tmp_path, "hold:0:1:2")
    assert before == after
    for process in job.processes("tests.support.scripted_role", "orchestrator"):
        process.kill()
    first, second = job.ended()
    assert (first["next"], second["outcome"], second["next"]) == ("in_place", "failed", None)
    assert "orchestrator was killed by signal 9" in second["cause"] and not job.server()


@pytest.mark.exhaustive
def test_it_can_be_switched_off(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(["beat:0.5", "ready", f"await:{tmp_path}/go", "exit:3"], in_place=False)
    job.let_go()
    (life,) = job.ended()
    assert (life["outcome"], life["next"]) == ("failed", None)
