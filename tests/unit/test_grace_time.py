"""A preemption with a grace time, of which Slurm tells late: it takes time to ask, and is asked again."""

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.slurm import time_limit
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.client import SlurmError
from prime_hpc.supervisor import stop_requests
from prime_hpc.supervisor.heartbeat import LoopGaps
from prime_hpc.supervisor.roles.health import HealthChecks
from prime_hpc.supervisor.stop_requests import Controls, Stop
from prime_hpc.supervisor.supervisor import Supervisor


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Epoch seconds."""
    now = [time.time()]
    monkeypatch.setattr(stop_requests.time, "time", lambda: now[0])
    return now


def warned(tmp_path: Path, left_s: float) -> Controls:
    """Of a job that has so much time, and was told something."""
    one = Controls(tmp_path, Allocation("12", (("n1",),), "n1", 0, ("12",), time.time() + left_s), 60.0, lambda: 1.0)
    one.note_warning(signal.SIGTERM)
    return one


def answers(monkeypatch: pytest.MonkeyPatch, clock: list[float], takes_s: float, *found: float | None) -> None:
    """What Slurm says of the job's end, one answer a question; None: it does not answer."""
    left = list(found)

    def granted_until(job_id: str) -> float:
        clock[0] += takes_s
        if (answer := left.pop(0)) is None:
            raise SlurmError(["scontrol", "show", "job", job_id], None, "timed out: no answer within 15 s")
        return answer

    monkeypatch.setattr(stop_requests, "granted_until", granted_until)


def test_what_slurm_does_not_tell_at_once_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """A controller that preempts many jobs answers late: the run went on until the grace was over."""
    one = warned(tmp_path, 10_000)
    answers(monkeypatch, clock, 0.0, None, clock[0] + 300)
    assert one.poll() is None
    one._next_look = 0.0
    request = one.poll()
    assert request is not None and request.reason == "preempted, with 300 s of grace"


def test_what_is_left_is_counted_from_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    one = warned(tmp_path, 10_000)
    answers(monkeypatch, clock, 12.0, clock[0] + 40)
    request = one.poll()
    assert request is not None and request.budget_s == 28 and "28 s of grace" in request.reason


def test_a_time_limit_that_comes_near_while_slurm_is_asked_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    one = warned(tmp_path, 80)
    answers(monkeypatch, clock, 30.0, None)
    request = one.poll()
    assert request is not None and request.outcome == "requeued" and request.reason.startswith("50 s before")


def test_while_slurm_does_not_tell_the_run_saves_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    """A controller that was silent until the grace was over left the save KillWait, less two questions more."""
    one = warned(tmp_path, 10_000)
    answers(monkeypatch, clock, 0.0, None, None, clock[0] + 10_000, None)
    asked = []
    for again in (False, False, False, True):
        if again:
            one.note_warning(signal.SIGTERM)
        one._next_look = 0.0
        assert one.poll() is None
        asked.append(one.num_saves)
    assert asked == [1, 1, 1, 2], "the third answer was: not preempted; then came another warning"


def test_a_slow_slurm_is_no_file_system_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It moved every deadline, that of the save to beyond the grace, and had the log ask for the file system."""
    seconds = [0.0]
    monkeypatch.setattr(stop_requests.time, "monotonic", lambda: seconds[0])

    def granted_until(job_id: str) -> float:
        seconds[0] += 15.0
        return time.time() + 40

    monkeypatch.setattr(stop_requests, "granted_until", granted_until)
    one: Any = object.__new__(Supervisor)
    one._controls, one._health, one._children = warned(tmp_path, 10_000), HealthChecks(lambda: seconds[0]), None
    one._gaps = LoopGaps(SimpleNamespace(now=lambda: seconds[0], missed=lambda: 0.0))  # type: ignore[arg-type]
    one._led = SimpleNamespace(roles=[])
    request = one._controls.poll()
    assert request is not None
    one._stop = Stop(request, seconds[0] + request.budget_s)
    one._detect_own_stall()
    assert one._stop.deadline == 15.0 + request.budget_s
    seconds[0] += 20.0  # the file system
    one._detect_own_stall()
    assert one._stop.deadline == 35.0 + request.budget_s


def test_a_warning_that_may_be_of_a_grace_time_waits_little_for_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def silent(job_id: str, timeout_s: float) -> None:
        waits.append(timeout_s)
        raise SlurmError(["scontrol", "show", "job", job_id], None, "timed out")

    monkeypatch.setattr(time_limit, "show_job", silent)
    one = warned(tmp_path, 10_000)
    one.note_warning(signal.SIGUSR1)
    for _ in range(2):
        request = one.poll()
        assert request is not None and request.outcome == "preempted"
    assert waits == [5.0]
