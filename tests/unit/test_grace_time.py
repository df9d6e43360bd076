"""A preemption with a grace time, of which Slurm tells late: it takes time to ask, and is asked again."""

import signal
import time
from pathlib import Path

import pytest

from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.client import SlurmError
from prime_hpc.supervisor import stop_requests
from prime_hpc.supervisor.stop_requests import Controls


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
