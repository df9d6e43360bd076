"""The submit record and its lock."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from prime_hpc.config import ConfigError
from prime_hpc.slurm import submission_record
from prime_hpc.slurm.script import command_tail
from prime_hpc.slurm.submission_record import (
    SUBMISSION_VARIABLE,
    check_in,
    open_record,
    submission_environment,
    submitting,
    write_record,
)
from prime_hpc.store.run_dirs import SubmissionRecord, job_ids, read_record
from tests.support.submissions import wait_for


def opened(run_dir: Path, token: str = "t") -> SubmissionRecord:
    return open_record(run_dir, token=token, state="sending", command=["x"], layout="packed", cluster=None)


def test_written_and_changed(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    record = opened(tmp_path)
    assert {"token", "state", "job_id", "time", "command", "layout", "cluster", "successor"} <= record.keys()
    assert write_record(tmp_path, state="sent", job_id="12")["token"] == "t"
    assert read_record(tmp_path) == record | {"state": "sent", "job_id": "12"}
    opened(tmp_path, "u")
    again = read_record(tmp_path)
    assert again is not None and again["token"] == "u" and again["job_id"] is None
    assert [p.name for p in tmp_path.iterdir()] == ["submit.json"], "no temporary file is left"


def test_a_full_disk_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_record(tmp_path, state="sent")
    record = read_record(tmp_path)
    assert record is not None and record["state"] == "sending"
    assert [p.name for p in tmp_path.iterdir()] == ["submit.json"]


def test_a_torn_record_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "submit.json").write_text('{"token": ')
    assert read_record(tmp_path) is None


# --- the lock ---------------------------------------------------------------------------------------------------


def holder(**fields: object) -> str:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "id": "x"} | fields)


def test_one_at_a_time(tmp_path: Path) -> None:
    run_dir = tmp_path / "a" / "run"
    with submitting(run_dir):
        under_way = (
            rf"another submit or cancel of this run is under way \(process {os.getpid()} on {socket.gethostname()}\)"
        )
        with pytest.raises(ConfigError, match=under_way), submitting(run_dir):
            pass
        assert (run_dir / submission_record.LOCK).exists()
    with submitting(run_dir):
        pass
    assert list(run_dir.iterdir()) == []


def dead_pid() -> int:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize(
    "kind",
    [
        "dead process",
        "reused pid",
        "reused pid, clock set back",
        "another host, long ago",
        "another host, ahead",
        "empty, long ago",
        "empty, ahead",
    ],
)
def test_a_dead_clients_lock_is_taken_over(tmp_path: Path, kind: str) -> None:
    lock = tmp_path / submission_record.LOCK
    lock.write_text(
        {
            "dead process": holder(pid=dead_pid()),
            "reused pid": holder(time=time.time() - 1e6),  # this process is younger than that lock
            "reused pid, clock set back": holder(process="another boot:1", time=time.time() + 1e6),
            "another host, ahead": holder(host="elsewhere", time=time.time() + 1e6),
            "empty, ahead": "",
            "another host, long ago": holder(host="elsewhere", time=time.time() - 1e6),
            "empty, long ago": "",
        }[kind]
    )
    os.utime(lock, (1, 1) if "ahead" not in kind else (2**32, 2**32))
    with submitting(tmp_path):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("set_by", [-18_000.0, 18_000.0])
def test_a_lock_is_held_by_its_process_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_by: float
) -> None:
    real = psutil.Process.create_time
    with submitting(tmp_path):
        monkeypatch.setattr(
            psutil.Process, "create_time", lambda self: real(self) + set_by
        )  # as boot time moves with it
        with pytest.raises(ConfigError, match="under way"), submitting(tmp_path):
            pass


@pytest.mark.parametrize("is_empty", [False, True])
def test_a_lock_that_may_be_alive_is_respected(tmp_path: Path, is_empty: bool) -> None:
    (tmp_path / submission_record.LOCK).write_text("" if is_empty else holder(host="elsewhere"))
    with pytest.raises(ConfigError, match="under way"), submitting(tmp_path):
        pass


def test_a_lock_that_its_holder_keeps_on_another_host_is_respected_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / submission_record.LOCK
    lock.write_text(holder(host="elsewhere", time=time.time() - 1e4))
    with pytest.raises(ConfigError, match="under way"), submitting(tmp_path):
        pass
    lock.unlink()
    monkeypatch.setattr(submission_record, "_SIGN_EVERY_S", 0.02)
    with submitting(tmp_path):
        os.utime(lock, (1, 1))
        wait_for(lambda: lock.stat().st_mtime > 1)


def test_a_lock_whose_holder_ends_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, read_text = tmp_path / submission_record.LOCK, Path.read_text

    def vanishing(self: Path, **options: str) -> str:
        self.unlink()
        return read_text(self, **options)

    lock.write_text(holder())
    monkeypatch.setattr(Path, "read_text", vanishing)
    with submitting(tmp_path):
        monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cleaning_removed(tmp_path: Path) -> None:
    with submitting(tmp_path):
        (tmp_path / submission_record.LOCK).unlink()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir.*cannot be written"), submitting(tmp_path / "file" / "run"):
        pass


# --- the job ----------------------------------------------------------------------------------------------------


def inside(run_dir: Path, token: str, job_id: str, **more: str) -> dict[str, str]:
    return {**submission_environment(run_dir, token), "SLURM_JOB_ID": job_id, **more}


def test_a_job_writes_down_its_id_when_the_answer_was_lost(tmp_path: Path) -> None:
    opened(tmp_path)
    assert check_in(tmp_path, inside(tmp_path, "t", "12")) is None
    record = read_record(tmp_path)
    assert record is not None and (record["state"], record["job_id"]) == ("sent", "12")


def test_a_job_of_a_replaced_submission_may_not_run(tmp_path: Path) -> None:
    opened(tmp_path, "new")
    before = write_record(tmp_path, state="sent", job_id="13")
    assert "submitted again, as job 13" in str(check_in(tmp_path, inside(tmp_path, "old", "12")))
    assert read_record(tmp_path) == before


def test_a_successor_becomes_the_job(tmp_path: Path) -> None:
    opened(tmp_path)
    write_record(tmp_path, state="sent", job_id="12", successor="13")
    assert check_in(tmp_path, inside(tmp_path, "t", "13")) is None
    record = read_record(tmp_path)
    assert record is not None and (record["job_id"], record["successor"]) == ("13", None)


def test_a_successor_with_a_token_of_its_own(tmp_path: Path) -> None:
    opened(tmp_path)
    write_record(tmp_path, state="sent", job_id="12_3", successor="40", successor_token="own")
    assert check_in(tmp_path, inside(tmp_path, "own", "40")) is None
    record = read_record(tmp_path)
    assert record is not None and (record["token"], record["job_id"], record["successor"]) == ("own", "40", None)


def test_who_is_not_asked(tmp_path: Path) -> None:
    opened(tmp_path, "new")
    elsewhere = tmp_path / "other"
    assert check_in(tmp_path, {}) is None, "on this machine, or sent by hand"
    assert check_in(tmp_path, inside(elsewhere, "old", "12")) is None, "a shell inside another run's job"
    assert check_in(tmp_path, inside(tmp_path, "old", "12", SLURM_ARRAY_TASK_ID="1")) is None, "the sweep's matter"
    assert check_in(elsewhere, inside(elsewhere, "old", "12")) is None, "no record"


# --- what the script runs ---------------------------------------------------------------------------------------


def test_files_become_absolute_and_values_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "b.toml"):
        (tmp_path / name).write_text("")
    here = str(tmp_path)
    assert command_tail(["a.yaml", "--name", "a.yaml", "--ckpt"]) == [f"{here}/a.yaml", "--name", "a.yaml", "--ckpt"]
    assert command_tail(["--ckpt", "a.yaml"]) == ["--ckpt", f"{here}/a.yaml"]
    assert command_tail(["@", "a.yaml", "--trainer", "@b.toml"]) == [
        "@",
        f"{here}/a.yaml",
        "--trainer",
        f"@{here}/b.toml",
    ]
    assert command_tail(["/x/a b.yaml", "--output-dir", "outputs"]) == ["/x/a b.yaml", "--output-dir", "outputs"]
    # flags that need no value, and have one
    values = ["--model.cp", "2", "--model.compile", "true", "--trainer.share-prefixes", "false", "--ckpt.interval", "5"]
    assert command_tail(values) == values
    assert command_tail([*values, "a.yaml", "--model.compile", "b.toml"]) == [
        *values,
        f"{here}/a.yaml",
        "--model.compile",
        f"{here}/b.toml",
    ]


def test_the_job_and_a_client_that_write_at_once_lose_no_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that still sees the file as it was before the job wrote: what an NFS client's cache shows it."""
    open_record(tmp_path, token="t", state="sending", command=["x"], layout="packed", cluster="c")
    stale = (tmp_path / "submit.json").read_bytes()
    write_record(tmp_path, by_job=True, state="sent", job_id="12", successor="13")
    (tmp_path / "submit.json").write_bytes(stale)
    write_record(tmp_path, by_job=False, state="sent", job_id="12")
    record = read_record(tmp_path)
    assert record is not None and (record["job_id"], record["successor"]) == ("12", "13")
    assert not any(name.startswith("_") for name in record)
    write_record(tmp_path, by_job=False, cancelled=1.0, successor=None)  # the later word counts, whoever says it
    assert (read_record(tmp_path) or {})["successor"] is None
    monkeypatch.setenv(SUBMISSION_VARIABLE, f"t {tmp_path}")
    write_record(tmp_path, successor="14")
    assert (read_record(tmp_path) or {})["successor"] == "14"
    assert job_ids(tmp_path) == {"12", "14"}
    monkeypatch.delenv(SUBMISSION_VARIABLE)  # --export=NONE, or sent by hand
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    before = (tmp_path / "submit.json").read_bytes()
    assert write_record(tmp_path, successor="15")["successor"] == "15"
    assert (tmp_path / "submit.json").read_bytes() == before
    assert job_ids(tmp_path) == {"12", "15"}
    monkeypatch.setenv("SLURM_JOB_ID", "99")  # a client in another job
    write_record(tmp_path, cancelled=2.0)
    assert (tmp_path / "submit.json").read_bytes() != before
    # a new submission: the old job's words are of another time
    open_record(tmp_path, token="u", state="sending", command=["x"], layout="packed", cluster="c")
    assert (read_record(tmp_path) or {})["successor"] is None and (read_record(tmp_path) or {})["job_id"] is None
