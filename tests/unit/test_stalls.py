"""A stall is not a death: clocks that stand still, threads that never wait for a file, a controller that is away."""

import asyncio
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
from loguru import logger

from prime_hpc.config.sections.supervisor import StallsConfig
from prime_hpc.observe import logs, role_status
from prime_hpc.observe.console import Console
from prime_hpc.observe.role_status import RoleStatus
from prime_hpc.runtime import event_loops
from prime_hpc.runtime.clock import MAX_GAP_S, AwakeClock
from prime_hpc.runtime.role_context import RoleContext
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.client import SlurmError
from prime_hpc.supervisor import stop_requests
from prime_hpc.supervisor.attempt import restart_policy
from prime_hpc.supervisor.heartbeat import PULSE_S, Pulse
from prime_hpc.supervisor.roles.process import Role
from prime_hpc.supervisor.roles.spec import RoleSpec
from prime_hpc.supervisor.stalls import watch
from tests.support.runs import wait_until

WAIT_S = 200.0


class Raw:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_stopped_process_sees_no_time_pass() -> None:
    raw = Raw()
    clock = AwakeClock(raw)
    for _ in range(10):
        raw.now += 0.2
        clock.now()
    assert clock.now() == pytest.approx(1002.0)
    raw.now += 600.0  # SIGSTOP, SIGCONT
    assert clock.now() == pytest.approx(1002.0 + MAX_GAP_S)
    assert clock.missed() == pytest.approx(600.0 - MAX_GAP_S)


def test_the_pulse_goes_on_without_the_loop_but_not_for_ever() -> None:
    raw = Raw()
    clock = AwakeClock(raw, max_gap_s=1e9)
    rung = threading.Semaphore(0)
    pulse = Pulse(rung.release, clock, stall_s=100.0)
    try:
        assert rung.acquire(timeout=WAIT_S)
        raw.now += PULSE_S  # the loop stands still
        assert rung.acquire(timeout=WAIT_S)
        raw.now += 100.0
        assert not rung.acquire(timeout=1.0), "given up"
        pulse.tick()
        assert rung.acquire(timeout=WAIT_S)
    finally:
        pulse.close()


class Bus:
    """Hears what a role says."""

    connected = True

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.published = threading.Semaphore(0)

    def publish(self, topic: str, /, **payload: Any) -> None:
        self.rows.append(payload)
        self.published.release()


def test_a_role_whose_status_file_hangs_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = RoleContext("trainer", tmp_path)
    is_back, write = threading.Event(), role_status.write_atomic

    def hang(path: Path, data: str, **options: bool) -> None:
        is_back.wait()
        write(path, data, **options)

    monkeypatch.setattr(role_status, "write_atomic", hang)
    bus = Bus()
    status = RoleStatus(context, bus)
    status.start_heartbeat(0.05)
    main = threading.Thread(target=status.ready, daemon=True)
    main.start()
    for _ in range(5):
        assert bus.published.acquire(timeout=WAIT_S)
    assert main.is_alive(), "its own report still waits for the file"
    assert "ready" in [row["state"] for row in bus.rows]
    counts = [row["count"] for row in bus.rows]
    assert counts == sorted(set(counts)), "in order"
    is_back.set()
    main.join(WAIT_S)
    found = role_status.read_status(context.log_dir)
    assert found is not None and found["role"] == "trainer"
    status.done()


def test_logging_never_waits_for_a_file_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_WAITING", 3)
    gate, written = threading.Event(), []

    def write(message: str) -> None:
        gate.wait()
        written.append(message)

    sink = logs._PatientSink(write)

    def call() -> None:
        for number in range(50):
            sink.write(f"{number}\n")

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(WAIT_S)
    assert not caller.is_alive() and not written
    gate.set()
    end = time.monotonic() + WAIT_S
    while not any("last" in line for line in written):
        assert time.monotonic() < end
        sink.write("last\n")
    assert written[0] == "0\n"
    assert " lines were lost while this could not be written)" in written[1]


def test_a_line_is_in_the_file_when_the_call_returns(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "supervisor.log"
    logs.setup_logger("supervisor", file=path, console=False)
    try:
        for number in range(20):
            logger.info(f"line {number}")
            assert f"line {number}" in path.read_text()
    finally:
        logger.remove()


def test_a_roles_deadlines_wait_with_a_supervisor_that_was_held_up(tmp_path: Path) -> None:
    raw = Raw()
    role = Role(RoleSpec("trainer", ["true"], 30.0), tmp_path, dict(os.environ), {}, raw)
    role.start()
    role.reap()
    raw.now += 500
    assert role.heartbeat_age_s() == 500
    role.extend_deadlines(490)
    assert role.heartbeat_age_s() == 10
    assert raw.now - role.started == 10 and role.unhealthy_s() == 10


def test_the_time_limit_moves_with_a_suspended_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> stop_requests.Controls:
        job = Allocation("7", (("n1",),), "n1", 0, ends_at=time.time() + 20)
        return stop_requests.Controls(tmp_path, job, 60.0, lambda: 1.0)

    assert make().poll() is not None, "as if it were over"
    monkeypatch.setattr(stop_requests, "granted_until", lambda job: time.time() + 2000)
    one = make()
    one.was_stopped(600)
    assert one.poll() is None
    monkeypatch.setattr(stop_requests, "granted_until", lambda job: None)  # Slurm does not say
    one = make()
    one.was_stopped(600)
    assert one.poll() is None


def test_a_step_that_was_suspended_is_no_measure_of_the_next(tmp_path: Path) -> None:
    raw = Raw()
    console = Console(tmp_path, 9, kind="sft", clock=AwakeClock(raw))
    row = {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0, "tokens_per_s": 1.0, "time/step": 1.0, "time/checkpoint": 0.5}
    path = tmp_path / "metrics" / "trainer.jsonl"
    path.parent.mkdir()
    for step, seconds in ((1, 1.0), (2, 1.0), (3, 600.0)):
        raw.now += seconds
        slow = {"time/step": seconds, "time/checkpoint": seconds / 2}
        with path.open("a") as file:
            file.write(json.dumps({**row, "step": step, **slow}) + "\n")
        console.tick({})
    assert console.needs_s() < 5


def test_a_controller_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    away = SlurmError(["scontrol"], 1, "Unable to contact slurm controller (connect failure)")
    answers: list[object] = [away, away, "JobId=7 NumNodes=2"]

    def requeue(*_: object, **__: object) -> None:
        answer = answers.pop(0)
        if isinstance(answer, SlurmError):
            raise answer

    monkeypatch.setattr(restart_policy, "requeue_for_good", requeue)
    now = Raw()

    def sleep(seconds: float) -> None:
        now.now += seconds

    assert restart_policy.return_to_queue("7", "requeue", 2, restarts=0, clock=now, sleep=sleep)
    answers[:] = [SlurmError(["scontrol"], 1, "Requested operation is presently disabled"), ""]
    assert not restart_policy.return_to_queue("7", "requeue", 2, restarts=0, clock=now, sleep=sleep)
    assert len(answers) == 1, "a refusal is final"
    answers[:] = [away] * 1000
    assert not restart_policy.return_to_queue("7", "requeue", 2, restarts=0, clock=now, sleep=sleep)


def test_an_event_loop_that_stood_still_has_no_late_timers() -> None:
    async def standing_still() -> str:
        loop = asyncio.get_running_loop()
        began, answer = event_loops.loop_time(), loop.create_future()
        loop.call_soon_threadsafe(lambda: raw.__setattr__("skipped", 600.0))  # SIGSTOP, SIGCONT, or a file that hangs
        loop.call_later(0.2, answer.set_result, "in time")
        async with asyncio.timeout(200):
            words = await answer
        assert event_loops.loop_time() - began < 60.0
        return words

    class Skipping:
        skipped = 0.0

        def __call__(self) -> float:
            return time.monotonic() + self.skipped

    raw = Skipping()
    loop = event_loops.new_event_loop(raw)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(standing_still()) == "in time"


def test_a_trainer_that_nobody_asks_for_a_step_does_not_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service, or a trainer of many runs, between two clients."""

    class Clock:
        seconds, looks = 0.0, 0

        def now(self) -> float:
            self.looks += 1
            return self.seconds

    clock = Clock()
    told: list[tuple[int, float]] = []
    info: dict[str, Any] = {"idle": True}
    statuses = {("trainer", 0): {"state": "ready", "step": 3, "info": info}}
    monkeypatch.setattr(watch, "TICK_S", 0.01)
    monkeypatch.setattr(watch.StallWatch, "_look_into", lambda _, step, seconds: told.append((step, seconds)))
    stalls = watch.StallWatch(
        tmp_path,
        tmp_path,
        StallsConfig(factor=2, least_s=10),
        cast("AwakeClock", clock),
        bus_statuses=statuses,
        publish=lambda *_, **__: None,
        agents=list,
    )

    def pass_by(seconds: float) -> None:
        clock.seconds += seconds
        looks = clock.looks
        wait_until(lambda: clock.looks > looks + 3, 200, "it looked")

    try:
        pass_by(0)
        pass_by(1000)
        assert told == []
        info["idle"] = False
        pass_by(15)
        assert told == []  # counted from the end of the pause
        pass_by(30)
        assert [step for step, _ in told] == [3]
    finally:
        stalls.close()
