"""The orchestrators of a trainer that trains many runs: one run's file system trouble is no other's."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from prime_hpc.store.attempts import Attempt, read_attempts
from prime_hpc.store.child_runs import STATE, ChildState
from prime_hpc.store.errors import StoreError
from prime_hpc.supervisor.roles import child_orchestrators
from prime_hpc.supervisor.roles.child_orchestrators import ChildOrchestrators

TRAINING = ChildState("training", incarnation=1, parent_incarnation=1)


class World:
    """A parent with one run below it."""

    def __init__(self, parent_dir: Path) -> None:
        self.now, self.told, self.forgotten = 0.0, list[tuple[str, str]](), list[int]()
        self.child = parent_dir / "run_a"
        self.child.mkdir()
        (self.child / "run.yaml").touch()
        self.says(TRAINING)
        config: Any = SimpleNamespace(supervisor=SimpleNamespace(grace_s=0.0, heartbeat_timeout_s=1e9))
        reaper: Any = SimpleNamespace(watch=lambda pid: None, forget=self.forgotten.append)
        parent = Attempt(1, 1, time.time(), "first start")
        self.led = ChildOrchestrators(parent_dir, config, parent, {}, self._publish, reaper, lambda: self.now)

    def _publish(self, topic: str, **payload: Any) -> None:
        self.told.append((topic, payload["reason"]))

    def says(self, state: ChildState) -> None:
        (self.child / STATE).write_text(json.dumps(asdict(state)))

    def has_orchestrator(self, *, running: bool = True) -> None:
        """As if `tick` had started it."""
        role: Any = SimpleNamespace(running=running, state="ready", pid=2**22 - 5, exit_code=0, reap=lambda: None)
        role.has_reported, role.heartbeat_age_s = lambda state: state == "done", lambda: 0.0
        self.led._roles["run_a"], self.led._servers["run_a"] = role, []
        self.led._attempts["run_a"] = Attempt(1, 1, time.time(), "slot 0")
        self.led._started.add(("run_a", 1))

    def look(self) -> list[str]:
        """Names of the runs whose orchestrators live after another look."""
        self.now += 3.0
        self.led.tick([], 0, "bus")
        return list(self.led._roles)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_word_that_cannot_be_read_now_ends_no_orchestrator(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.has_orchestrator()
    assert world.look() == ["run_a"]
    for word in (None, b'{"phase": "tra'):  # a stale handle; half of it to be seen
        with monkeypatch.context() as patch:
            if word is None:
                patch.setattr(child_orchestrators, "read_state", lambda path: None)
            else:
                (world.child / STATE).write_bytes(word)
            assert world.look() == ["run_a"] and world.led.facts() == {"run_a": "training 0/0"}
    (world.child / STATE).unlink()
    (world.child / "run.yaml").unlink()
    world.child.rmdir()
    assert world.look() == [], "its directory is gone"


def test_the_end_of_a_run_whose_word_cannot_be_read_is_that_of_its_last_word(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.says(ChildState("done", incarnation=1, parent_incarnation=1))
    world.has_orchestrator()
    assert world.look() == ["run_a"]
    world.led._roles["run_a"].running = False  # type: ignore[misc]
    monkeypatch.setattr(child_orchestrators, "read_state", lambda path: None)
    assert world.look() == []
    [row] = read_attempts(world.child / "attempts.jsonl")
    assert (row["outcome"], row["exit_code"]) == ("completed", 0)


def test_a_run_is_forgotten_where_its_servers_are_by_now(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was started again on another node kept the adapter of each run that ended after that: when all its
    places were taken, runs that began were refused."""
    asked: list[list[str]] = []
    monkeypatch.setattr(child_orchestrators, "forget_adapter", lambda urls, name, key: asked.append(urls))
    for urls in (["http://b:1/v1"], []):
        world.has_orchestrator(running=False)
        world.led._servers["run_a"] = ["http://stated:1/v1"]
        world.led.tick(urls, 1, "bus")
        world.led.end("over")
    assert asked == [["http://b:1/v1"], ["http://stated:1/v1"]]


def full(*_: object) -> None:
    raise StoreError("no space left on device")


def test_a_full_directory_at_a_runs_end_is_its_own_affair(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_orchestrators, "write_attempt", full)
    world.has_orchestrator(running=False)
    assert world.look() == []
    world.has_orchestrator()
    world.led.end("the parent's end")


def test_a_full_directory_at_a_runs_start_leaves_no_orchestrator(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(
        label="orchestrator", name="orchestrator", command=["sleep", "600"], after=(), hosts=(), environment={}
    )
    spec.index, spec.num_processes = 0, 1
    monkeypatch.setattr(child_orchestrators, "read_experiment", lambda path: SimpleNamespace())
    monkeypatch.setattr(child_orchestrators, "orchestrator_spec", lambda experiment, path: spec)
    monkeypatch.setattr(child_orchestrators, "write_attempt", full)
    assert world.look() == []
    assert world.told == [("run_a/1/orchestrator", "its orchestrator could not be started: no space left on device")]
    [pid] = world.forgotten
    assert not psutil.pid_exists(pid)
