"""The pages of `prime-hpc status` as users see them."""

import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_hpc import cli
from tests.support.status_run import Run, job


@pytest.fixture
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRIMEHPC_OUTPUTS", str(tmp_path))
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))  # noqa: PTH120 - no Slurm here
    return tmp_path


def test_page_of_one_run(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(outputs / "demo").attempt(1, ended=400, outcome="preempted", cause="preempted by job 3").attempt(
        2, why="resumes at step 5", job_id=None, host=socket.gethostname(), pid=os.getpid(), began=time.time()
    ).word(attempt=2).metrics("orchestrator", [{"step": s, "reward/mean": s / 10} for s in range(8)])
    assert cli.main(["status", "demo"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("demo  running  step 7/40  reward 0.7 ▁")
    assert "attempt 2 (resumes at step 5)" in page
    assert "preempted" in page and "preempted by job 3" in page
    assert cli.main(["status", str(outputs / "demo"), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["state"], row["step"], row["final"], row["attempt"]) == ("running", 7, False, 2)


def test_page_of_a_folder(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(60):
        Run(outputs / f"run{number:02d}").attempt(ended=5, outcome="completed", began=time.time() - number).word(
            "ended"
        )
    Run(outputs / "sweep" / "p1").sent(age=10**5)
    assert cli.main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["RUN", "STATE", "STEP"]
    assert lines[1].startswith("sweep/p1  pending") and "there is no squeue here" in lines[1]
    assert lines[2].startswith("run00") and "7/40" in lines[2]
    assert len(lines) == 52 and "and 11 older runs" in lines[-1]
    assert cli.main(["status", "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 62
    assert cli.main(["status", "sweep", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in document["runs"]] == ["p1"] and document["more"] == 0


def test_what_is_not_there(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status"]) == 0
    assert "no runs under" in capsys.readouterr().out
    Run(outputs / "demo")
    assert cli.main(["status", "demp"]) == 2
    streams = capsys.readouterr()
    assert streams.out == "" and "did you mean demo" in streams.err
    assert cli.main(["status", "a", "b"]) == 2
    assert cli.main(["status", "--frob"]) == 2


def test_watch_ends_with_the_run(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(outputs / "demo").attempt(ended=5, outcome="completed").word("ended")
    assert cli.main(["status", "demo", "--watch"]) == 0
    assert capsys.readouterr().out.startswith("demo  completed")


def test_strange_directories_do_not_stop_the_others(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def break_snapshot(path: Path) -> None:
        (path / "run.yaml").unlink()
        (path / "run.yaml").symlink_to("/nowhere")

    spoil: dict[str, Callable[[Path], object]] = {
        "a": lambda path: (path / "attempts.jsonl").write_text('{"attempt": 1}\n'),
        "b": lambda path: (path / "status.json").write_text('{"step": "x", "time": null, "nodes": 3, "roles": []}'),
        "c": lambda path: (path / "submit.json").write_text('{"state": "sent", "job_id": "not a number"}'),
        "d": lambda path: (path / "attempts.jsonl").mkdir(),
        "e": break_snapshot,
    }
    for name, act in spoil.items():
        act(Run(outputs / name).path)
    assert cli.main(["status"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]} == set(spoil)
    for name in spoil:
        assert cli.main(["status", name]) == 0


def test_a_run_whose_attempts_cannot_be_read_is_not_called_one_that_never_started(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(outputs / "demo").word()
    file = run.path / "attempts.jsonl"
    file.symlink_to(file)
    why = f"{file} cannot be read: {os.strerror(errno.ELOOP)}"
    assert (run.status().state, run.status().note) == ("unreadable", why)
    assert cli.main(["archive", "demo", str(outputs / "demo.tar")]) == 3, "it may be at work"
    assert "demo is unreadable" in capsys.readouterr().err
    assert cli.main(["status"]) == 0 and "unreadable" in capsys.readouterr().out
    assert run.sent().status(job("RUNNING")).state == "starting", "Slurm knows it"
