"""Sweeps and Slurm at odd moments: a task before its record, a cancel after a submit that was cut off, a controller
that falls silent in the middle of a cancel (tests/support/fake_slurm.py).
"""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli.verbs.experiment.sweep import run
from prime_hpc.launch import job
from prime_hpc.launch.monitor.status import status_of
from prime_hpc.launch.sweep import cancel, queue
from prime_hpc.launch.sweep.report import Report
from prime_hpc.launch.sweep.resolve import load_base
from prime_hpc.launch.sweep.state import SubmitRow, Sweep
from prime_hpc.launch.sweep.submit import submit_sweep
from prime_hpc.slurm.submission_record import check_in
from prime_hpc.store.run_dirs import read_record
from prime_hpc.supervisor import main
from prime_hpc.supervisor.attempt.restart_policy import EXIT_AGAIN
from tests.support.fake_slurm import FakeSlurm
from tests.support.sweeps import make_experiment, write_sweep


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_experiment(tmp_path)


def submit(path: Path) -> Report:
    return submit_sweep(load_base(path, [], {}))


@pytest.mark.parametrize("export", ["ALL", "NONE"])
def test_the_successor_of_a_task_that_begins_before_its_record_is_written_is_known(
    slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch, export: str
) -> None:
    path = write_sweep(folder, f"seeds: 1\noverrides: {{slurm.restart.how: successor, slurm.extra.export: {export}}}\n")
    run_dir, write = folder / "out" / "s" / "seed0", queue._write_point_records

    def begins_first(sweep: Sweep, sent: SubmitRow, job_id: str) -> None:
        told = re.search(r"export PRIMEHPC_SUBMISSION='(.*)'", Path(slurm.jobs()[-1]["script"]).read_text())
        own = told[1] if told else slurm.environment_of(job_id)["PRIMEHPC_SUBMISSION"]
        assert own == f"{sent.token} {sweep.dir}" and (told is not None) is (export == "NONE")
        ids = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": job_id, "SLURM_ARRAY_TASK_ID": "0"}
        with monkeypatch.context() as task:
            for name, value in {**ids, "PRIMEHPC_SUBMISSION": own}.items():
                task.setenv(name, value)
            task.setattr(main, "supervise", lambda run_dir, in_job: EXIT_AGAIN)
            assert job.slurm_job(["--point", str(sweep.dir), "0"]) == EXIT_AGAIN
        write(sweep, sent, job_id)

    monkeypatch.setattr(queue, "_write_point_records", begins_first)
    submit(path)
    for _ in range(2):  # for the first time, and again after that has failed
        first, second = slurm.jobs()
        record = read_record(run_dir) or {}
        assert second["dependency"] == f"afternotok:{first['id']}_0" and record["successor"] == second["id"]
        token, inside = record["successor_token"], {"SLURM_JOB_ID": second["id"]}
        if export == "ALL":
            inside["PRIMEHPC_SUBMISSION"] = f"{token} {run_dir}"
        assert record["array"] and check_in(run_dir, inside) is None, "it goes on with the run"
        noted = read_record(run_dir) or {}
        assert (noted["token"], noted["job_id"], noted["successor"]) == (token, second["id"], None)
        row = {
            "attempt": 1,
            "began": time.time() - 1,
            "ended": time.time(),
            "outcome": "failed",
            "job_id": second["id"],
        }
        (run_dir / "attempts.jsonl").write_text(json.dumps(row) + "\n")
        slurm.forget(first["id"])
        slurm.forget(second["id"])
        submit(path)


def test_cancel_ends_the_array_of_a_submit_that_was_cut_off(
    slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(queue, "_note_sent", interrupt)
        submit(write_sweep(folder, "seeds: 3\n"))
    assert run(["cancel", str(folder / "out" / "s")], "sweep") == 0
    assert [job["state"] for job in slurm.jobs()] == ["CANCELLED"]


def test_a_point_that_was_cancelled_in_the_queue_is_not_lost(slurm: FakeSlurm, folder: Path) -> None:
    submit(write_sweep(folder, "seeds: 1\n"))
    assert run(["cancel", str(folder / "out" / "s")], "sweep") == 0
    slurm.forget(slurm.jobs()[0]["id"])
    assert status_of(folder / "out" / "s" / "seed0").state == "stopped"


@pytest.mark.parametrize("comes_back", [True, False])
def test_cancel_waits_for_a_controller_that_is_silent_when_the_rest_is_to_be_ended(
    slurm: FakeSlurm,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    comes_back: bool,
) -> None:
    submit(write_sweep(folder, "seeds: 1\n"))
    slurm.change(slurm.jobs()[0]["id"], state="RUNNING", nodes="n1")
    wait, asked = cancel._wait, []

    def falls_silent(*arguments: Any) -> Any:
        asked.append(arguments)
        if len(asked) > 1:
            return wait(*arguments)
        trouble = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
        slurm.behave("squeue", code=1, stderr=trouble, only_once=comes_back)
        return []

    monkeypatch.setattr(cancel, "_wait", falls_silent)
    monkeypatch.setattr(cancel, "GONE_TIMEOUT_S", 60.0 if comes_back else 0.1)
    assert run(["cancel", str(folder / "out" / "s")], "sweep") == (0 if comes_back else 1)
    said = capsys.readouterr()
    assert (slurm.jobs()[0]["state"] == "CANCELLED") is comes_back
    assert comes_back or ("still there: seed0" in said.out and "is left: `squeue" in said.err)


@pytest.mark.parametrize("how", ["successor", "requeue"])
def test_a_throttle_that_successors_do_not_keep_is_warned_of(slurm: FakeSlurm, folder: Path, how: str) -> None:
    report = submit(write_sweep(folder, f"seeds: 2\nthrottle: 1\noverrides: {{slurm.restart.how: {how}}}\n"))
    assert any("--feed keeps to them" in text for text in report.warnings) is (how == "successor")
