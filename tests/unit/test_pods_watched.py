"""A run in pods as the commands of a login node see it: Slurm knows nothing of it, and is not asked."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.run_files import ATTEMPTS_JSONL, STOP
from prime_hpc.config.site import load_site
from prime_hpc.launch.cancel import cancel_run
from prime_hpc.launch.monitor.run_state import SILENT_S
from prime_hpc.launch.monitor.status import status_of
from prime_hpc.launch.monitor.where_to import NotThereError, way_to
from prime_hpc.launch.monitor.who_hangs import find_target
from prime_hpc.launch.prepare import prepare_run
from prime_hpc.launch.submission import submit
from prime_hpc.store.attempts import Attempt, write_attempt
from tests.support.fake_slurm import FakeSlurm
from tests.support.submissions import cancel, load, run_dir, wait_for


def life(config: Path, **fields: Any) -> None:
    """Write an attempt in pods."""
    began = time.time() - fields.pop("age", 0.0)
    attempt = Attempt(1, 1, began, "first start", host="r-supervisor", job_id="kubernetes:r", **fields)
    write_attempt(run_dir(config) / ATTEMPTS_JSONL, attempt)


@pytest.fixture
def in_pods(fake: FakeSlurm, config: Path) -> Path:
    prepare_run(load(config), load_site(None))
    life(config)
    return config


def test_its_state_is_its_own_word(fake: FakeSlurm, in_pods: Path) -> None:
    assert status_of(run_dir(in_pods)).state == "starting"
    life(in_pods, age=SILENT_S / 2)
    assert status_of(run_dir(in_pods)).state == "starting", "a volume that shows what is new late is no death"
    life(in_pods, age=2 * SILENT_S)
    assert "no word from r-supervisor" in status_of(run_dir(in_pods)).note
    life(in_pods, ended=time.time(), outcome="preempted", cause="drained", next="requeue")
    status = status_of(run_dir(in_pods))
    assert (status.state, status.note) == ("requeued", "its pod is made again; ended by: drained")
    assert fake.calls() == []


def test_who_holds_it_up_is_asked_without_slurm(fake: FakeSlurm, in_pods: Path) -> None:
    target = find_target(str(run_dir(in_pods)))
    assert target.status is not None and target.status.state == "starting" and target.job is None
    with pytest.raises(NotThereError, match=r"in pods \(r-\.\.\.\): `kubectl exec"):
        way_to(target, "trainer", 0, [], terminal=False, environ={})
    assert fake.calls() == []


def test_one_that_failed_goes_on_in_new_pods_or_as_a_job(fake: FakeSlurm, in_pods: Path) -> None:
    life(in_pods, ended=time.time(), outcome="failed", exit_code=1)
    again = load(in_pods, "--ckpt.resume-step", "latest")
    prepare_run(again, load_site(None))
    assert submit(again) == 0
    assert len(fake.jobs()) == 1


def test_cancel_asks_it_to_save(fake: FakeSlurm, in_pods: Path) -> None:
    def supervisor() -> None:
        wait_for((run_dir(in_pods) / STOP).exists)
        life(in_pods, ended=time.time(), outcome="stopped", exit_code=0, saved_step=5)

    thread = threading.Thread(target=supervisor)
    thread.start()
    result = cancel(in_pods)
    thread.join()
    assert (result.ended, result.outcome, result.note) == (True, "stopped", "saved at step 5 and ended")
    assert cancel(in_pods).note == "it is over already: stopped (None)"
    assert fake.calls() == []


def test_one_that_crashes_for_good_as_it_is_asked_is_over(in_pods: Path) -> None:
    def crash(_asked: str) -> None:
        life(in_pods, ended=time.time(), outcome="failed", exit_code=1, cause="a disk")

    result = cancel_run(run_dir(in_pods), now=False, timeout_s=0.5, say=crash)
    assert (result.ended, result.outcome, result.note) == (True, "over", "ended by itself: failed (a disk)")


@pytest.mark.parametrize("now", [True, False])
@pytest.mark.parametrize("row", [{}, {"ended": 1.0, "outcome": "preempted", "next": "requeue"}])
def test_what_kubernetes_alone_can_end_is_not_called_ended(in_pods: Path, row: dict[str, Any], now: bool) -> None:
    life(in_pods, **row)
    result = cancel(in_pods, now=now, timeout_s=0.5)
    assert (result.ended, result.outcome) == (False, "unknown")
    assert "`kubectl delete job -l app.kubernetes.io/instance=r`" in result.note
    assert not (run_dir(in_pods) / STOP).exists()
