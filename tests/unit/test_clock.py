"""The clock set back or forward by hours while a run lives, and nodes whose clocks differ."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from prime_hpc.observe import role_status as status_module
from prime_hpc.observe.role_status import RoleStatus, read_status
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.slurm import sbatch_errors
from prime_hpc.store import attempts
from prime_hpc.store.attempts import begin, is_held, read_attempts, runs_elsewhere
from prime_hpc.store.checkpoint.checkpoints import newest_first, prune_checkpoints
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor import stop_requests
from prime_hpc.supervisor.roles.process import Role
from prime_hpc.supervisor.roles.spec import RoleSpec
from prime_hpc.supervisor.stop_requests import Controls
from tests.support.checkpoints import make_checkpoint

HOURS = 5 * 3600.0


class Wall:
    """The clock on the wall, which somebody sets."""

    def __init__(self) -> None:
        self.offset = 0.0

    def time(self) -> float:
        """Seconds since 1970, or what this machine thinks that they are."""
        return time.time() + self.offset


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    wall = Wall()
    clock = SimpleNamespace(time=wall.time, monotonic=time.monotonic, process_time=time.process_time)
    monkeypatch.setattr(status_module, "time", clock)
    return wall


def make_role(tmp_path: Path) -> tuple[Role, RoleContext]:
    context = RoleContext(role="trainer", run_dir=tmp_path)
    spec = RoleSpec(name="trainer", command=["sleep", "60"], start_timeout_s=60.0)
    return Role(spec, context.log_dir, {"PATH": "/usr/bin:/bin"}), context


@pytest.mark.parametrize("set_by", [-HOURS, HOURS])
def test_a_role_is_ready_and_heard_though_its_clock_is_set(tmp_path: Path, wall: Wall, set_by: float) -> None:
    role, context = make_role(tmp_path)
    RoleStatus(context).ready()  # a former attempt's word in the same place
    role.start()
    try:
        assert not role.has_reported("ready")
        words = RoleStatus(context)
        words.starting()
        assert [row["state"] for row in role.statuses()] == ["starting"]
        wall.offset = set_by
        words.ready()
        assert role.has_reported("ready")
        quiet = role.heartbeat_age_s()
        time.sleep(0.05)
        assert role.heartbeat_age_s() > quiet >= 0.0
        words.beat(step=1)
        assert role.has_reported("ready") and role.statuses()[0]["step"] == 1
        assert role.heartbeat_age_s() < 60.0  # not hours, either way
        words.failed("no memory")
        assert "no memory" in role.death().cause
    finally:
        role.kill()
        role.reap()


def test_the_newer_of_two_words_is_the_later_one_said(tmp_path: Path, wall: Wall) -> None:
    heard: dict = {}
    role, context = make_role(tmp_path)
    role._bus_statuses = heard
    role.start()
    try:
        words = RoleStatus(context)
        words.starting()
        wall.offset = -HOURS
        words.ready()
        newest = read_status(context.log_dir)
        assert newest is not None
        words_path = status_module.status_path(context.log_dir, 0)
        heard["trainer", 0] = newest
        row = dict(newest, state="starting", time=newest["time"] + HOURS, count=newest["count"] - 1)
        words_path.write_text(json.dumps(row))  # the file, as another node still sees it
        assert role.has_reported("ready")
    finally:
        role.kill()
        role.reap()


@pytest.mark.parametrize("set_by", [-HOURS, HOURS])
def test_an_attempt_is_held_by_its_process_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_by: float
) -> None:
    path = tmp_path / "attempts.jsonl"
    begin(path, incarnation=1, why="first start", resume_step=None, job_id=None)
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + set_by)  # as boot time moves with it
    (row,) = read_attempts(path)
    assert is_held(row)
    row["process"] = "another boot:1"  # the number was given to another process since
    assert not is_held(row)


def test_attempts_count_on_when_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "attempts.jsonl"
    begin(path, incarnation=1, why="first start", resume_step=None, job_id=None)
    monkeypatch.setattr(attempts, "time", SimpleNamespace(time=lambda: time.time() - HOURS))
    begin(path, incarnation=2, why="again", resume_step=3, job_id=None)
    assert [(row["attempt"], row["incarnation"]) for row in read_attempts(path)] == [(1, 1), (2, 2)]


def test_latest_and_retention_go_by_steps_not_by_times(tmp_path: Path) -> None:
    import os

    paths = RunPaths(tmp_path)
    for step in (10, 20, 30):
        make_checkpoint(paths, step)
        moment = time.time() - step * 3600.0  # each later one is "older"
        for file in (paths.checkpoint_step(step), paths.checkpoint_step(step) / "manifest.json"):
            os.utime(file, (moment, moment))
    assert next(newest_first(paths.checkpoints)).step == 30
    assert prune_checkpoints(paths, 1) == [10, 20]


def test_a_stop_is_found_though_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Controls(tmp_path, None, 120.0)
    assert asked.poll() is None
    wall = SimpleNamespace(time=lambda: time.time() - HOURS, monotonic=lambda: time.monotonic() + stop_requests.LOOK_S)
    monkeypatch.setattr(stop_requests, "time", wall)
    (tmp_path / "STOP").touch()
    request = asked.poll()
    assert request is not None and request.outcome == "stopped"


def test_a_submit_of_the_future_is_looked_for_no_longer_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(time=time.time, monotonic=lambda: 1000.0 + sum(slept), sleep=slept.append)
    monkeypatch.setattr(sbatch_errors, "time", clock)
    monkeypatch.setattr(sbatch_errors, "find_by_token", lambda *_: [])
    assert sbatch_errors.jobs_of_cut_off_submit("token", time.time() + HOURS, Path("run"), "name") == []
    assert 0 < sum(slept) <= sbatch_errors.QUEUE_ANSWER_S


@pytest.mark.parametrize(("age_s", "is_alive"), [(5, True), (-5, True), (3600, False), (-3600, False)])
def test_a_sign_of_life_of_the_future_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, is_alive: bool
) -> None:
    begin(tmp_path / "attempts.jsonl", incarnation=1, why="first start", resume_step=None, job_id=None)
    (row,) = read_attempts(tmp_path / "attempts.jsonl")
    row["host"] = "elsewhere"
    monkeypatch.setattr(attempts, "file_age_s", lambda path: age_s)
    assert (runs_elsewhere(tmp_path, row) is not None) == is_alive
