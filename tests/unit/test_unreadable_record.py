"""The submit record where it cannot be read for a moment: it is not taken for none, and no word of it is lost."""

import builtins
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.launch import cancel as cancel_module
from prime_hpc.launch.cancel import cancel_run
from prime_hpc.launch.monitor.status import status_of
from prime_hpc.launch.submission import submit
from prime_hpc.launch.sweep.progress import counted
from prime_hpc.launch.sweep.resolve import load_base
from prime_hpc.launch.sweep.submit import submit_sweep
from prime_hpc.slurm.queue import drop_successor, refuse_if_queued
from prime_hpc.slurm.submission_record import add_to_record, check_in, open_record, submission_environment, write_record
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.run_dirs import AttemptRow, read_record
from prime_hpc.supervisor.attempt.restart_policy import since_submitted
from tests.support.fake_slurm import FakeSlurm
from tests.support.submissions import load, run_dir
from tests.support.sweeps import make_experiment, write_sweep

Fail = Callable[..., None]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Have the opening of a file of this name fail so many times."""
    opened, left = builtins.open, dict[str, int]()

    def broken(file: Any, *arguments: Any, **options: Any) -> Any:
        name = Path(file).name if isinstance(file, str | Path) else ""
        if left.get(name, 0) > 0:
            left[name] -= 1
            raise OSError(number[0], os.strerror(number[0]), str(file))
        return opened(file, *arguments, **options)

    number = [errno.EIO]
    monkeypatch.setattr(builtins, "open", broken)

    def begin(name: str, times: int, how: int = errno.EIO) -> None:
        number[0], left[name] = how, times

    return begin


def test_a_record_that_another_node_replaces_as_it_is_read_keeps_its_words(tmp_path: Path, fail: Fail) -> None:
    open_record(tmp_path, token="t", state="sent", command=["x"], layout="packed", cluster=None, job_id="12")
    fail("submit.json", 2, errno.ESTALE)
    assert (read_record(tmp_path) or {})["token"] == "t"
    fail("submit.json", 2, errno.ESTALE)
    write_record(tmp_path, by_job=True, successor="13")
    fail("submit.job.json", 1, errno.ESTALE)
    write_record(tmp_path, by_job=True, no_successor="full")
    record = read_record(tmp_path) or {}
    assert (record["token"], record["job_id"], record["successor"], record["no_successor"]) == ("t", "12", "13", "full")


@pytest.mark.parametrize("by_job", [True, False])
def test_what_cannot_be_read_is_not_written_over(
    tmp_path: Path, fail: Fail, by_job: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    open_record(tmp_path, token="t", state="sent", command=["x"], layout="packed", cluster=None, job_id="12")
    before = (tmp_path / "submit.json").read_bytes()
    fail("submit.json", 1)
    with pytest.raises(OSError, match="Input/output error"):
        write_record(tmp_path, by_job=by_job, successor="13")
    fail("submit.json", 1)
    add_to_record(tmp_path, successor="13")
    assert "it lacks successor = 13" in capsys.readouterr().err
    assert (tmp_path / "submit.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["submit.json"]


def test_a_job_of_a_replaced_submission_does_not_run_for_want_of_the_record(tmp_path: Path, fail: Fail) -> None:
    open_record(tmp_path, token="u", state="sent", command=["x"], layout="packed", cluster=None, job_id="13")
    environ = {**submission_environment(tmp_path, "t"), "SLURM_JOB_ID": "12"}
    fail("submit.json", 1)
    with pytest.raises(OSError, match="Input/output error"):
        check_in(tmp_path, environ)
    assert "came too late" in (check_in(tmp_path, environ) or "")


def test_a_run_of_which_the_record_cannot_be_read_is_not_sent_again(fake: FakeSlurm, config: Path, fail: Fail) -> None:
    assert submit(load(config)) == 0
    fail("submit.json", 1)
    with pytest.raises(OSError, match=r"submit\.json"):
        submit(load(config))
    fail("submit.json", 2)  # the first is of the local job that it may be
    with pytest.raises(OSError, match=r"submit\.json"):
        refuse_if_queued(run_dir(config))
    fail("submit.json", 1)
    with pytest.raises(OSError, match=r"submit\.json"):
        cancel_run(run_dir(config), now=True, timeout_s=1.0, say=lambda text: None)
    assert len(fake.jobs()) == 1


def test_crashes_before_a_resume_do_not_count_for_want_of_the_record(tmp_path: Path, fail: Fail) -> None:
    open_record(tmp_path, token="t", state="sent", command=["x"], layout="packed", cluster=None, time=50.0)
    rows = [AttemptRow(attempt=n, began=10.0 * n, outcome="failed") for n in range(1, 7)]
    assert since_submitted(tmp_path, rows) == rows[4:]
    fail("submit.json", 1)
    with pytest.raises(OSError, match=r"submit\.json"):
        since_submitted(tmp_path, rows)
    fail("submit.json", 1)
    assert Patience(60.0)(lambda: since_submitted(tmp_path, rows)) == rows[4:]


def test_cancel_waits_for_a_record_that_cannot_be_read_after_scancel(
    fake: FakeSlurm, config: Path, fail: Fail, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submit(load(config)) == 0
    fake.change("100", state="RUNNING", nodes="n1")
    scancel = cancel_module.run_slurm

    def then_unreadable(argv: list[str], *others: float) -> str:
        said = scancel(argv, *others)
        fail("submit.json", 3)
        return said

    monkeypatch.setattr(cancel_module, "run_slurm", then_unreadable)
    assert cancel_run(run_dir(config), now=True, timeout_s=1.0, say=lambda text: None).outcome == "cancelled"


def test_points_of_a_sweep_of_which_the_record_cannot_be_read_are_not_sent_again(
    fake: FakeSlurm, tmp_path: Path, fail: Fail
) -> None:
    path = write_sweep(make_experiment(tmp_path), "axes: {product: {seq_len: [32, 64]}}\n")
    submit_sweep(load_base(path, [], {}))
    fail("submit.json", 1)
    report = submit_sweep(load_base(path, [], {}))
    assert report.jobs == [] and len(fake.jobs()) == 1
    assert counted(report.views) == "1 pending, 1 unreadable"


def test_the_successor_is_taken_out_though_the_record_cannot_be_read(fake: FakeSlurm, config: Path, fail: Fail) -> None:
    assert submit(load(config, "--slurm.restart.how", "successor")) == 0
    record = read_record(run_dir(config))
    assert record is not None and record["successor"]
    fail("submit.json", 9)
    assert drop_successor(run_dir(config), record) == record["successor"]
    assert [job["id"] for job in fake.jobs() if job["state"] == "PENDING"] == [record["job_id"]]


def test_a_run_that_may_have_been_submitted_again_is_not_called_over(tmp_path: Path, fail: Fail) -> None:
    row = {"attempt": 1, "incarnation": 1, "began": 1.0, "ended": 2.0, "outcome": "completed", "job_id": "11"}
    (tmp_path / "attempts.jsonl").write_text(json.dumps(row) + "\n")
    open_record(tmp_path, token="t", state="failed", command=["x"], layout="packed", cluster=None)
    assert status_of(tmp_path).state == "completed"
    fail("submit.json", 1)
    found = status_of(tmp_path)
    assert (found.state, found.note) == ("unreadable", f"{tmp_path}/submit.json cannot be read: Input/output error")
