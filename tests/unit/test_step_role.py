"""A role as a step of a job: whom its agents answer to, stand-ins, and nodes that have not spoken."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prime_hpc.slurm.allocation import Allocation
from prime_hpc.store.attempts import Ended
from prime_hpc.supervisor.roles import slurm_step
from prime_hpc.supervisor.roles.led_roles import LedRoles
from prime_hpc.supervisor.roles.slurm_step import HELLO_TIMEOUT_S, StepContext, StepRole, StepSpec
from prime_hpc.supervisor.supervisor import Supervisor

ALLOCATION = Allocation("7", (("n1", "n2", "n3"),), "n1", 0)


class World:
    """What a step publishes, and what it asks of Slurm."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.told, self.asked = 0.0, list[tuple[str, int]](), list[str]()
        self._dir = tmp_path
        monkeypatch.setattr(slurm_step, "run_slurm", lambda argv, **_: self.asked.append(" ".join(argv)))

    def role(self, name: str, *hosts: str, allocation: Allocation = ALLOCATION) -> StepRole:
        spec, context = StepSpec(name, [], 900.0, hosts=hosts), StepContext(allocation, self._dir, no_kill=True)
        role = StepRole(spec, self._dir, dict(os.environ), {}, context, self._publish, 1.0, lambda: self.now)
        role.start_number = 2
        return role

    def _publish(self, topic: str, **payload: Any) -> None:
        self.told.append((topic, payload["start_number"]))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def said(event: str, number: int, host: str = "n9", **facts: Any) -> dict[str, Any]:
    return {"event": event, "start_number": number, "host": host, "key": f"{host}/0", **facts}


def test_agents_of_a_start_that_was_given_up_are_told_to_end(world: World) -> None:
    """sbatch said that it had failed, and a newer stand-in was sent; the job was in the queue all the same."""
    role = world.role("inference", "n2")
    role.is_substitute_job, role.hosts = True, []
    role.on_message(said("hello", 1))
    assert world.told == [("end/inference[0]", 1)] and not role.has_node
    role.on_message(said("exited", 1, code=0))
    assert len(world.told) == 1 and role.exit_code is None
    role.on_message(said("hello", 2, "n8"))
    assert role.has_node and role.hosts == ["n8"] and len(world.told) == 1


def test_a_stand_in_that_nobody_waits_for_any_more_is_ended(world: World) -> None:
    role = world.role("inference", "n2")
    role.log_file.write_text("1234\n")  # a word of the server's own
    role._process = subprocess.Popen(["true"])
    role._process.wait()
    role.is_substitute_job = True
    role.kill()
    assert world.asked == [], "none was sent"
    role._said_before = role.log_file.stat().st_size
    with role.log_file.open("a") as log:
        log.write("4711\n")
    role.kill()
    assert world.asked == ["scancel 4711"] and world.told == [("end/inference[0]", 2)]
    role.kill()
    assert len(world.asked) == 1


def test_agents_that_outlive_their_srun_are_ended_too(world: World) -> None:
    role = world.role("trainer", "n1")
    role._process = subprocess.Popen(["true"])
    role._process.wait()
    role.on_message(said("hello", 2, "n1", step=3, job="7"))
    assert role.running
    role.kill()
    assert world.told == [("end/trainer", 2)] and world.asked == ["scancel 7.3"]
    role.on_message(said("exited", 2, "n1", code=0))
    world.now += 1e6
    role.kill()
    assert len(world.asked) == 1, "it is over"


def test_a_stand_in_that_takes_anothers_place_ends_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    role = world.role("inference", "n2")
    role.is_substitute_job = True
    monkeypatch.setattr(role, "_launch", lambda command: None)
    role.start()
    role.log_file.write_text("4711\n")
    role.start()
    assert world.asked == ["scancel 4711"] and role.substitute_job_id is None


def test_a_server_over_several_nodes_has_no_stand_in(world: World) -> None:
    assert world.role("inference", "n2").can_be_substituted
    assert not world.role("inference", "n2", "n3").can_be_substituted, "a job of one node is no part of its group"


def test_a_role_whose_node_ran_out_of_memory_says_so(world: World) -> None:
    role = world.role("trainer", "n1", "n2")
    for host in ("n1", "n2"):
        role.on_message(said("hello", 2, host))
    role.on_message(said("exited", 2, "n2", code=-9, oom_kills=1))
    assert not role.running
    why = "on n2 the kernel ended processes of the job for want of memory: more slurm.mem"
    assert role.death().cause == f"trainer was killed by signal 9; {why}"
    role.start_number, role._oom_kills = 3, {}  # as a new start leaves it
    role.log_file.write_text("srun: error: n2: task 1: Out Of Memory\n")  # as srun says of any step that ever was
    role.on_message(said("exited", 3, "n2", code=-9, oom_kills=0))
    assert role.death().cause == "trainer was killed by signal 9"
    role._oom_kills, role._exits = {}, {}
    role.on_message(said("exited", 3, "n2", code=-9, oom_kills=None))  # nothing in its container tells
    assert role.death().cause.endswith(why)


KILLED = "srun: error: n1: task 0: Killed\nsrun: error: n[2-3]: tasks 1-2: Killed\n"


@pytest.mark.parametrize(
    ("log", "lost", "cause"),
    [
        ("srun: error: n1: task 0: Exited with exit code 1\n", ["n2", "n3"], ""),  # srun says nothing of a dead node
        (KILLED, ["n2", "n3"], ""),  # as of nodes that are shut down
        (f"0: slurmstepd-n1: error: *** STEP 7.1 ON n1 CANCELLED AT now DUE TO NODE FAILURE ***\n{KILLED}", None, ""),
        (f"1: slurmstepd-n2: error: *** STEP 7.1 ON n2 CANCELLED AT 2026 ***\n{KILLED}", [], "step was cancelled"),
        (f"[x] error: *** STEP 7.1 ON n2 CANCELLED AT 2026 DUE to SIGNAL Killed ***\n{KILLED}", [], "was cancelled"),
        (f"1: error: *** STEP 7.1 ON n2 CANCELLED AT 2026 DUE TO TIME LIMIT ***\n{KILLED}", [], "killed by signal 9"),
        (KILLED.replace("0: Killed", "0: Out Of Memory"), [], "killed by signal 9; on n1 the kernel ended"),
    ],
)
def test_nodes_on_which_slurm_ended_the_step_are_not_lost(
    world: World, log: str, lost: list[str] | None, cause: str
) -> None:
    role = world.role("trainer", "n1", "n2", "n3")
    for host in role.hosts:
        role.on_message(said("hello", 2, host))
    role.on_message(said("exited", 2, "n1", code=-9))
    role.log_file.write_text("srun: error: n1: task 0: Out Of Memory\n\n$ srun of this start\n" + log)
    world.now += 100.0
    expected = ["n2", "n3"] if lost is None else lost
    assert role.lost_hosts(30.0) == role.silent_hosts(-1.0) == expected
    assert not role.running and cause in role.death().cause


class Code(int):
    """An exit code upon whose reading the next one arrives, as from the bus's thread."""

    arrives: Any = None

    def __ne__(self, other: object) -> bool:
        self.arrives()
        return super().__ne__(other)

    __hash__ = int.__hash__


def test_exit_codes_may_come_while_they_are_read(world: World) -> None:
    role = world.role("trainer", "n1", "n2", "n3")
    for host in ("n1", "n2"):
        code = Code(0)
        code.arrives = lambda: role.on_message(said("exited", 2, f"m{len(role._exits)}", code=0))
        role._exits[f"{host}/0"] = code
    assert not role.running and role.exit_code is None


# ---------------------------------------------------------------------------------------------- nodes that do not speak


@pytest.fixture
def supervisor() -> Any:
    one: Any = object.__new__(Supervisor)
    one._plan, one._stop = SimpleNamespace(steps=SimpleNamespace(no_kill=True), urls={}), None
    one._ready_at = None
    one._led = LedRoles(*[cast(Any, SimpleNamespace(forget=lambda pid: None))] * 5)
    one._experiment = SimpleNamespace(slurm=SimpleNamespace(restart=SimpleNamespace(node_timeout_s=1e9)))
    one.attempt = SimpleNamespace(lost_nodes=[])
    return one


@pytest.mark.parametrize("spoke", [(), ("n1", "n2")])
def test_nodes_of_a_step_that_never_began_are_not_to_blame(
    world: World, supervisor: Any, spoke: tuple[str, ...]
) -> None:
    """srun may wait: "step creation temporarily disabled"; of a step that began, those that are silent are."""
    role = world.role("trainer", "n1", "n2", "n3")
    role.log_file.touch()
    role._process = subprocess.Popen(["sleep", "60"])
    supervisor._led.roles.append(role)
    for host in spoke:
        role.on_message(said("hello", 2, host))
    world.now = HELLO_TIMEOUT_S + 1
    with pytest.raises(Ended) as raised:
        supervisor._look_at(role)
    end = raised.value
    if spoke:
        assert (end.outcome, supervisor.attempt.lost_nodes) == ("node_lost", ["n3"])
    else:
        assert (end.outcome, supervisor.attempt.lost_nodes) == ("failed", [])
        assert end.cause == "the agents of trainer on n1, n2, n3 did not start in time"
