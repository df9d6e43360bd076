"""Agents without a supervisor: when, and by whom, a job is given back that nobody leads any more."""

import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from prime_hpc.slurm import client, requeue
from prime_hpc.slurm.allocation import read_allocation
from prime_hpc.slurm.client import SlurmError, parse_shown
from prime_hpc.slurm.options import Mode
from prime_hpc.supervisor.attempt import lost_batch_host, restart_policy
from prime_hpc.supervisor.attempt.early_end import requeue_blindly
from prime_hpc.supervisor.attempt.lost_batch_host import (
    LOOK_S,
    MAX_TURNS,
    SLURM_SILENCE_S,
    TURN_S,
    OrphanedAgent,
    Return,
    batch_host_state,
    requeue_orphaned_job,
)
from prime_hpc.supervisor.main import _how_agents_return
from prime_hpc.supervisor.roles import slurm_step
from prime_hpc.supervisor.roles.slurm_step import StepContext, StepRole, StepSpec

LINE = "JobId=7 JobState={state} Restarts={restarts} NodeList={nodes} BatchHost=n1 NumNodes=2"
WHOLE = LINE.format(state="RUNNING", restarts=1, nodes="n[1-3]")
SHRUNK = LINE.format(state="RUNNING", restarts=1, nodes="n[2-3]")
AGAIN = LINE.format(state="PENDING", restarts=2, nodes="(null)")
OF_JOB = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
JOB = Return("7", ["7", "8"], "n[1-3]", "n1", "requeue", 3)
AWAY = SlurmError(["scontrol"], 1, "Unable to contact slurm controller")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (WHOLE, "kept"),
        (WHOLE + "\n" + WHOLE.replace("JobId=7", "JobId=8").replace("n[1-3]", "n[4-5]"), "kept"),
        (SHRUNK, "dropped"),
        (AGAIN, "over"),
        (WHOLE.replace("Restarts=1", "Restarts=2"), "over"),
        (SHRUNK.replace("RUNNING", "COMPLETING"), "over"),
        (WHOLE.replace("RUNNING", "SUSPENDED"), "suspended"),
    ],
)
def test_what_slurm_says_of_the_job(lines: str, said: str) -> None:
    assert batch_host_state(parse_shown(lines, "7")[0], 1) == said


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def wait(host: str, says: Callable[[float], str], led_at: float = 1e9) -> tuple[bool, float]:
    """The verdict of `host`, and after how long; from `led_at` on the supervisor is heard again."""
    clock = Clock()
    one = OrphanedAgent(
        JOB,
        1,
        host,
        lambda: clock() >= led_at,
        lambda job: parse_shown(says(clock()), job),
        clock=clock,
        sleep=clock.sleep,
    )
    return one.wait(SLURM_SILENCE_S), clock()


def test_the_first_node_gives_it_back_when_slurm_says_nothing_for_so_long() -> None:
    assert wait("n2", lambda now: WHOLE) == (True, SLURM_SILENCE_S)
    assert wait("n3", lambda now: WHOLE) == (True, SLURM_SILENCE_S + TURN_S)  # had the first one failed to
    assert wait("n3", lambda now: AGAIN if now >= SLURM_SILENCE_S + LOOK_S else WHOLE)[0] is False


def test_at_once_when_slurm_has_dropped_the_batch_host() -> None:
    assert wait("n2", lambda now: WHOLE if now < 25 else SHRUNK) == (True, 30)
    assert wait("n3", lambda now: WHOLE if now < 25 else SHRUNK) == (True, 30 + TURN_S)


def test_while_the_controller_is_away_it_is_asked_again() -> None:
    def says(now: float) -> str:
        if now < 300:
            raise AWAY
        return WHOLE

    verdict, after = wait("n2", says)
    assert verdict and 300 <= after <= 300 + LOOK_S


def test_a_suspended_job_is_nobodys_fault_and_a_supervisor_that_is_back_leads() -> None:
    verdict, after = wait("n2", lambda now: WHOLE.replace("RUNNING", "SUSPENDED") if now < 1000 else WHOLE)
    assert verdict and after >= 1000 + SLURM_SILENCE_S - LOOK_S
    assert wait("n2", lambda now: WHOLE, led_at=40) == (False, 40)


def test_turns_end_and_a_stand_in_has_nothing_to_give_back() -> None:
    many = Return("7", ["7"], "n[1-500]", "n1", "requeue", 0)
    assert [many.turn(host) for host in ("n2", "n4", "n300", "elsewhere")] == [0, 2, MAX_TURNS, MAX_TURNS]
    environ = {**JOB.to_env(), "SLURM_JOB_ID": "8"}
    assert Return.from_env(environ) == JOB, "a het component's step"
    assert Return.from_env({**environ, "SLURM_JOB_ID": "9"}) is None
    assert Return.from_env({"SLURM_JOB_ID": "7"}) is None


LAST_TASK = {
    "SLURM_JOB_ID": "100",  # of the task that is started last: the array's own
    "SLURM_ARRAY_JOB_ID": "100",
    "SLURM_ARRAY_TASK_ID": "9",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURMD_NODENAME": "n1",
    "SLURM_JOB_END_TIME": "1000",
    "SLURM_RESTART_COUNT": "1",
}


class Slurm:
    """Answers `scontrol show job`, and refuses what it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *refuses: SlurmError) -> None:
        self.refuses = list(refuses)
        self.done: list[str] = []
        self.clock = Clock()
        for module in (client, lost_batch_host):
            monkeypatch.setattr(module, "run_slurm", self.run)
        monkeypatch.setattr(requeue, "requeue", lambda job, number, _: self.act(f"requeue {job} {number}"))
        monkeypatch.setattr(requeue, "run_slurm", self.told)
        monkeypatch.setattr(lost_batch_host.time, "sleep", self.clock.sleep)

    def run(self, argv: list[str], timeout_s: float = 0) -> str:
        if argv[0] == "scancel":
            self.act(" ".join(argv))
        succeeded = self.done and not self.done[-1].startswith("refused")
        return AGAIN if succeeded else WHOLE

    def told(self, argv: list[str], timeout_s: float = 0) -> str:
        """What is asked and changed around a requeue: n2's cable is cut, Slurm has not yet set it down."""
        if argv[0] == "sinfo":
            table = "n1 down\nn2 alloc*\nn3 alloc\n"
            rows = [line.split() for line in f"{table}n4 idle\nn5 idle\n".splitlines()]
            return "".join(f"{name} {state} {state} (null)\n" for name, state in rows) if "-p" in argv else table
        if argv[1] == "update":
            self.done.append(" ".join(argv[2:]))
        return WHOLE

    def act(self, words: str) -> list[client.ShownJob]:
        if self.refuses:
            self.done.append(f"refused {words}")
            raise self.refuses.pop(0)
        self.done.append(words)
        return parse_shown(WHOLE, "7")

    def give_back(self, run_dir: Path, known: Return = JOB, job: Mapping[str, str] = OF_JOB) -> list[str]:
        environ = {**known.to_env(), **job}
        requeue_orphaned_job(run_dir, environ, "n2", lambda: False, lambda words: None, self.clock)
        return self.done


def test_a_run_directory_that_cannot_be_read_keeps_no_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Slurm(monkeypatch).give_back(tmp_path / "gone") == ["requeue 7 3"]
    monkeypatch.setattr(lost_batch_host, "READ_S", 0.05)
    monkeypatch.setattr("prime_hpc.config.load_run", lambda run_dir: threading.Event().wait(), raising=False)  # hangs
    assert Slurm(monkeypatch).give_back(tmp_path) == ["requeue 7 3"]


def test_a_controller_that_is_away_is_tried_again_and_one_that_refuses_makes_it_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Slurm(monkeypatch, *[AWAY] * 5).give_back(tmp_path)[-2:] == ["refused requeue 7 3", "requeue 7 3"]
    refusal = SlurmError(["scontrol"], 1, "Requested operation is presently disabled")
    assert Slurm(monkeypatch, *[refusal] * 3).give_back(tmp_path)[-1] == "scancel 7"
    successor = Return("7", ["7"], "n[1-3]", "n1", "successor", 3)
    assert Slurm(monkeypatch).give_back(tmp_path, successor) == ["scancel 7"]


def test_nodes_that_are_silent_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(JOB, exclude=True)
    told = Slurm(monkeypatch).give_back(tmp_path / "gone", known)
    assert told == ["requeue 7 3", "JobId=7 ExcNodeList=n[1-2]"]


@pytest.mark.parametrize(("mode", "told"), [("requeue", "requeue 100_9 3"), ("off", "scancel 100_9")])
def test_of_an_array_one_task_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, told: str
) -> None:
    allocation = read_allocation(LAST_TASK)
    assert allocation is not None
    known = Return.from_env(LAST_TASK | _how_agents_return(allocation, LAST_TASK, mode, 3, False))
    assert known is not None, "its steps state the array's id"
    assert Slurm(monkeypatch).give_back(tmp_path / "gone", known, LAST_TASK) == [told]


def test_a_task_that_cannot_read_its_run_directory_asks_for_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def requeued(job_id: str, *_: object, **__: object) -> None:
        asked.append(job_id)

    monkeypatch.setattr(restart_policy, "requeue_for_good", requeued)
    assert requeue_blindly(LAST_TASK)
    assert asked == ["100_9"]


def test_a_step_of_an_array_task_is_ended_by_the_tasks_own_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocation = read_allocation(LAST_TASK)
    assert allocation is not None
    told: list[str] = []
    monkeypatch.setattr(slurm_step, "run_slurm", lambda argv, **_: told.append(" ".join(argv)))
    spec = StepSpec("trainer", ["true"], 60.0, hosts=("n2",))
    context = StepContext(allocation, tmp_path, True)
    role = StepRole(spec, tmp_path, {}, {}, context, lambda *_, **__: None, 1.0)
    with subprocess.Popen(["sleep", "60"]) as srun:
        role._process, role.start_number = srun, 1
        hello = {"start_number": 1, "key": "n2/0", "host": "n2", "event": "hello", "step": "3", "job_id": "100"}
        role.on_message(hello)
        role.kill()
    assert told == ["scancel 100_9.3"]
