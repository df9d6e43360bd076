"""Points into the queue: arrays, lanes, resubmits, refusals, answers that never came. sbatch and squeue are stand-ins
that fail on demand; the real ones are in tests/slurm.
"""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prime_hpc.cli.verbs.experiment.sweep import run
from prime_hpc.config import ConfigError, load_run
from prime_hpc.config.site import read_site
from prime_hpc.launch import job
from prime_hpc.launch.sweep import cancel, queue
from prime_hpc.launch.sweep.progress import RESUME, look
from prime_hpc.launch.sweep.report import Report
from prime_hpc.launch.sweep.resolve import load_base, load_stored
from prime_hpc.launch.sweep.state import POINTS, new_submit, point_run_dir, read_sweep
from prime_hpc.launch.sweep.submit import submit_sweep
from prime_hpc.runtime import gpus
from prime_hpc.slurm.queue_facts import submit_limits
from prime_hpc.slurm.sbatch_errors import SlurmRefused
from prime_hpc.slurm.submission_record import LOCK, check_in, write_record
from prime_hpc.store.attempts import Attempt, write_attempt
from prime_hpc.supervisor import main
from tests.support.fake_slurm import FakeSlurm
from tests.support.sweeps import make_experiment, write_sweep

AXES = "axes: {product: {trainer.optim.lr: [1e-5, 1e-4, 1e-3], seq_len: [32, 64]}}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_experiment(tmp_path)


def submit(path: Path, *argv: str, **options: object) -> Report:
    return submit_sweep(load_base(path, list(argv), {}), **options)  # type: ignore[arg-type]


def ended(run_dir: Path, outcome: str, job_id: str) -> None:
    row = {
        "attempt": 1,
        "began": time.time(),
        "ended": time.time() + 1,
        "outcome": outcome,
        "job_id": job_id,
        "host": "h",
    }
    (run_dir / "attempts.jsonl").write_text(json.dumps({**row, "pid": 1, "cause": "test"}) + "\n")


def script(slurm: FakeSlurm, number: int = -1) -> str:
    return Path(slurm.jobs()[number]["script"]).read_text()


def test_packed_points_are_one_array_with_a_throttle(slurm: FakeSlurm, folder: Path) -> None:
    report = submit(write_sweep(folder, AXES + "throttle: 2\n"))
    (job,) = slurm.jobs()
    assert (job["array"], job["name"], report.code) == ("0-5%2", "s", 0)
    sweep = read_sweep(folder / "out" / "s")
    assert [(s.state, s.job_id, s.points) for s in sweep.submits] == [("sent", job["id"], [0, 1, 2, 3, 4, 5])]
    assert f"--point {sweep.dir} " in script(slurm)
    for index, row in enumerate(sweep.rows):
        run_dir = point_run_dir(sweep.dir, index, {})
        experiment = load_run(run_dir)
        assert (experiment.name, experiment.run_dir) == (row.name, run_dir)
        assert experiment.seq_len == row.values["seq_len"]
        assert read_site(run_dir).name == "generic"
        assert (run_dir / "lock.json").exists() and (run_dir / "configs" / "trainer.toml").exists()
        record = json.loads((run_dir / "submit.json").read_text())
        assert (record["job_id"], record["token"]) == (f"{job['id']}_{index}", sweep.submits[0].token)
    assert slurm.environment_of(job["id"])["PRIMEHPC_SUBMISSION"] == f"{sweep.submits[0].token} {sweep.dir}"
    assert not (sweep.dir / "submit.json").exists()  # it is no run


def test_points_for_gpus_are_refused_where_the_packages_cannot_use_any(
    slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "torch_build", lambda: ("2.13.0+cpu", None))
    path, on_gpus = write_sweep(folder, AXES), ("--slurm.gpus-per-node", "1")
    with pytest.raises(ConfigError, match=r"device: GPUs are planned.*torch 2.13.0\+cpu"):
        submit(path, *on_gpus)
    assert slurm.jobs() == [] and not (folder / "out" / "s" / "sweep.yaml").exists()
    assert len(submit(path, *on_gpus, dry_run=True).jobs) == 6  # the plan can be looked at anywhere
    assert len(submit(path).jobs) == 6  # these need no GPU


def test_a_second_submit_sends_what_is_missing_or_failed(slurm: FakeSlurm, folder: Path) -> None:
    path = write_sweep(folder, AXES)
    submit(path)
    (first,) = slurm.jobs()
    assert submit(path).jobs == []  # all wait
    assert len(slurm.jobs()) == 1
    slurm.forget(first["id"])
    sweep = read_sweep(folder / "out" / "s")
    for index, outcome in enumerate(["completed", "completed", "failed", "completed", "stopped", "completed"]):
        ended(sweep.run_dir(sweep.rows[index]), outcome, f"{first['id']}_{index}")
    assert [job.row.index for job in submit(path, dry_run=True).jobs] == [2]
    assert len(slurm.jobs()) == 0
    report = submit(write_sweep(folder, AXES.replace("64]", "64, 48]")))  # three new points too
    assert [job.row.index for job in report.jobs] == [2, 6, 7, 8]
    assert [view.state for view in report.left] == ["completed", "completed", "completed", "stopped", "completed"]
    assert slurm.jobs()[0]["array"] == "2,6-8"


def test_resume_sends_what_was_stopped_too_and_needs_no_file(slurm: FakeSlurm, folder: Path) -> None:
    path = write_sweep(folder, AXES)
    submit(path, "--max-steps", "3")
    sweep = read_sweep(folder / "out" / "s")
    job_id = slurm.jobs()[0]["id"]
    slurm.forget(job_id)
    for index, row in enumerate(sweep.rows):
        ended(sweep.run_dir(row), "stopped" if index == 1 else "completed", f"{job_id}_{index}")
    path.unlink()
    (folder / "exp.yaml").unlink()
    (sweep.run_dir(sweep.rows[1]) / "STOP").touch()
    report = submit_sweep(load_stored(sweep.dir / "sweep.yaml"), states=RESUME)
    assert [job.row.index for job in report.jobs] == [1]
    assert not (sweep.run_dir(sweep.rows[1]) / "STOP").exists(), "it would end the point as it begins"
    assert load_run(sweep.run_dir(sweep.rows[1])).max_steps == 3
    assert slurm.jobs()[0]["array"] == "1"


def test_points_whose_jobs_differ_are_arrays_of_their_own(slurm: FakeSlurm, folder: Path) -> None:
    submit(write_sweep(folder, "axes: {product: {slurm.time: ['10:00', '20:00']}}\nseeds: 2\nthrottle: 2\n"))
    first, second = slurm.jobs()
    assert [(job["array"], job["dependency"]) for job in (first, second)] == [
        ("0-1%2", None),
        ("2-3%2", f"afterany:{first['id']}"),
    ]


def test_more_points_than_an_array_may_have(slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit_limits, "MAX_ARRAY", 10)
    submit(write_sweep(folder, "seeds: 25\nthrottle: 3\n"))
    ids = [job["id"] for job in slurm.jobs()]
    assert [(job["array"], job["dependency"]) for job in slurm.jobs()] == [
        ("0-9%3", None),
        ("0-9%3", f"afterany:{ids[0]}"),
        ("0-4%3", f"afterany:{ids[1]}"),
    ]
    sweep = read_sweep(folder / "out" / "s")
    script = (sweep.dir / "job.sbatch").read_text()  # of the last one
    named = re.search(r"--point (\S+) ", script)
    assert named is not None
    assert point_run_dir(Path(named[1]), 2, {}) == sweep.run_dir(sweep.rows[22])
    assert json.loads((sweep.dir / "seed22" / "submit.json").read_text())["job_id"] == f"{ids[2]}_2"
    # a cluster that takes more now: tasks are counted from another point, the arrays from before stay right
    (slurm.bin / "scontrol").write_text("#!/bin/sh\necho 'MaxArraySize            = 100001'\n")
    submit(write_sweep(folder, "seeds: 27\n"))
    assert slurm.jobs()[-1]["array"] == "25-26"
    # and one whose arrays have fewer tasks than indices
    said = "MaxArraySize            = 1001\nSchedulerParameters     = bf_interval=2,max_array_tasks=4,defer\n"
    (slurm.bin / "scontrol").write_text(f"#!/bin/sh\necho '{said}'\n")
    submit(write_sweep(folder, "seeds: 33\n"))
    assert [job["array"] for job in slurm.jobs()[-3:]] == ["3", "0-3", "0"]


def test_scattered_indices_stay_below_sbatchs_limit(
    slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_MAX_RANGES", 20)
    path = write_sweep(folder, "seeds: 40\n")
    submit(path)
    (first,) = slurm.jobs()
    assert first["array"] == "0-39"
    slurm.forget(first["id"])
    sweep = read_sweep(folder / "out" / "s")
    for row in sweep.rows[::2]:
        ended(sweep.run_dir(row), "completed", f"{first['id']}_{row.index}")
    texts = [part["array"] for part in submit(path).parts]
    assert max(map(len, texts)) <= 20
    assert sorted(int(number) for text in texts for number in text.split(",")) == list(range(1, 40, 2))


def test_a_bad_point_does_not_stop_the_others(slurm: FakeSlurm, folder: Path) -> None:
    path = write_sweep(folder, "axes: {product: {seq_len: [32, 100000, 64], sft.data.batch_size: [8, 'x']}}")
    report = submit(path)
    assert report.code == 1
    assert [job.row.values["seq_len"] for job in report.jobs] == [32, 64]
    reasons = {row.name: str(row.reason) for row in report.invalid}
    assert "beyond the model's" in reasons["seq_len100000-batch_size8"]
    assert "expected an integer" in reasons["seq_len32-batch_sizex"]
    assert slurm.jobs()[0]["array"] == "0,4"
    fixed = write_sweep(folder, "axes: {product: {seq_len: [32, 100000, 64], sft.data.batch_size: [8, 4]}}")
    assert [(job.row.index, job.row.name) for job in submit(fixed).jobs][:1] == [(6, "seq_len32-batch_size4")]


def test_what_is_wrong_with_every_point_is_said_once_and_nothing_is_sent(slurm: FakeSlurm, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"all 3 points are wrong: .*batch_tokens"):
        submit(write_sweep(folder, "seeds: 3\noverrides: {sft.data.batch_tokens: 8}"))
    assert not slurm.calls("sbatch")
    assert not (folder / "out" / "s" / "sweep.yaml").exists()


def test_dry_run_writes_nothing(slurm: FakeSlurm, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["submit", str(write_sweep(folder, AXES + "throttle: 2")), "--dry-run"], "prime-hpc sweep") == 0
    assert not (folder / "out").exists()
    assert not slurm.calls("sbatch")
    text = capsys.readouterr().out
    assert "array: 6 points (0-5), 2 at a time" in text
    assert "lr1e-05-seq_len32" in text
    assert run(["submit", str(write_sweep(folder, "seeds: 1")), "--dry-run"], "prime-hpc sweep") == 0
    assert ": 1 point, 1 would be sent" in capsys.readouterr().out


def test_refused_by_slurm(slurm: FakeSlurm, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_sweep(folder, AXES)
    slurm.behave("sbatch", code=1, stderr="sbatch: error: Batch job submission failed: Invalid qos specification")
    assert run(["submit", str(path)], "prime-hpc sweep") == 3
    assert "slurm.qos" in capsys.readouterr().out
    slurm.behave("sbatch")
    assert run(["status", str(path)], "prime-hpc sweep") == 0
    assert "6 failed" in capsys.readouterr().out
    assert run(["submit", str(path)], "prime-hpc sweep") == 0
    assert len(slurm.jobs()) == 1


def test_a_refused_array_does_not_stop_the_others(slurm: FakeSlurm, folder: Path) -> None:
    slurm.behave("sbatch", code=1, stderr="sbatch: error: Requested time limit is invalid", only_once=True)
    report = submit(write_sweep(folder, "axes: {product: {slurm.time: ['10:00', '20:00', '30:00']}}\nthrottle: 1\n"))
    assert [bool(part["error"]) for part in report.parts] == [True, False, False]
    assert report.code == 3
    first, second = slurm.jobs()
    assert [first["dependency"], second["dependency"]] == [None, f"afterany:{first['id']}"]


def test_after_some_refusals_the_rest_is_not_tried(slurm: FakeSlurm, folder: Path) -> None:
    slurm.behave("sbatch", code=1, stderr="sbatch: error: Invalid account")
    times = ", ".join(f"'{minutes}:00'" for minutes in range(10, 16))
    report = submit(write_sweep(folder, f"axes: {{product: {{slurm.time: [{times}]}}}}\n"))
    assert len(slurm.calls("sbatch")) == 3
    assert "not tried" in report.parts[-1]["error"]


def test_no_sbatch_where_slurm_is_asked_for(slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(slurm.bin))
    slurm.remove("sbatch")
    with pytest.raises(SlurmRefused, match="no sbatch on PATH.*launch = slurm asks for one"):
        submit(write_sweep(folder, AXES), "--launch", "slurm")


def test_sbatch_errors_of_an_array_that_arrived(slurm: FakeSlurm, folder: Path) -> None:
    slurm.behave("sbatch", say="sbatch: an odd wrapper says nothing", only_once=True)
    report = submit(write_sweep(folder, AXES))
    (job,) = slurm.jobs()
    assert [part["job_id"] for part in report.parts] == [job["id"]]
    assert submit(write_sweep(folder, AXES)).jobs == []


def test_controller_that_cannot_be_reached(slurm: FakeSlurm, folder: Path) -> None:
    trouble = "Unable to contact slurm controller (connect failure)"
    slurm.behave("sbatch", code=1, stderr=trouble)
    path = write_sweep(folder, AXES)
    with pytest.raises(SlurmRefused, match=r"Whether the job was queued is not known"):
        submit(path)
    slurm.behave("squeue", code=1, stderr=trouble)
    with pytest.raises(SlurmRefused, match=r"an earlier submit was cut off.*nothing was changed"):
        submit(path)
    slurm.behave("sbatch")
    slurm.behave("squeue")
    assert len(submit(path).jobs) == 6
    assert len(slurm.jobs()) == 1
    slurm.behave("squeue", code=1, stderr=trouble)
    with pytest.raises(SlurmRefused, match=r"whether they still run cannot be asked"):
        submit(path)
    assert len(slurm.jobs()) == 1


def start(path: Path, environ: dict[str, str]) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-m", "prime_hpc.cli", "sweep", "submit", str(path)]
    return subprocess.Popen(argv, env={**environ, "PYTHONPATH": os.pathsep.join(sys.path)})


@pytest.mark.parametrize("when", ["after", "before"])
def test_a_submit_killed_in_the_middle_never_makes_two_arrays(slurm: FakeSlurm, folder: Path, when: str) -> None:
    slurm.behave("sbatch", hang=when)
    path = write_sweep(folder, AXES)
    process = start(path, slurm.environ)
    try:
        deadline = time.monotonic() + 60
        while not (slurm.calls("sbatch") and (when == "before" or slurm.jobs())):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    slurm.behave("sbatch")
    sweep = read_sweep(folder / "out" / "s")
    assert [s.state for s in sweep.submits] == ["sending"]
    report = submit(path)
    assert len(slurm.jobs()) == 1
    assert len(report.jobs) == (0 if when == "after" else 6)
    sweep = read_sweep(folder / "out" / "s")
    assert [s.state for s in sweep.submits] == (["sent"] if when == "after" else ["failed", "sent"])
    records = [json.loads((sweep.run_dir(row) / "submit.json").read_text()) for row in sweep.rows]
    assert [record["job_id"] for record in records] == [f"{slurm.jobs()[0]['id']}_{i}" for i in range(6)]


def test_a_submit_interrupted_before_its_points_know_their_tasks_never_makes_two_arrays(
    slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_sweep(folder, AXES)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for _ in range(2):  # the submit, and the one that finds its array
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(queue, "open_point_record", interrupt)
            submit(path)
    assert submit(path).jobs == []
    (job,) = slurm.jobs()
    sweep = read_sweep(folder / "out" / "s")
    records = [json.loads((sweep.run_dir(row) / "submit.json").read_text()) for row in sweep.rows]
    assert [record["job_id"] for record in records] == [f"{job['id']}_{i}" for i in range(6)]


def test_a_task_waits_for_a_file_system_that_does_not_answer(
    slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(write_sweep(folder, AXES))
    left, read_text = [OSError(errno.ESTALE, os.strerror(errno.ESTALE), POINTS)], Path.read_text

    def flaky(self: Path, **options: str) -> str:
        if self.name == POINTS and left:
            raise left.pop()
        return read_text(self, **options)

    monkeypatch.setattr(Path, "read_text", flaky)
    monkeypatch.setattr(main, "supervise", lambda run_dir, in_job: 0)
    assert job.slurm_job(["--point", str(folder / "out" / "s"), "0"]) == 0 and left == []


def test_two_submits_at_once(slurm: FakeSlurm, folder: Path) -> None:
    slurm.behave("sbatch", hang="before")
    path = write_sweep(folder, AXES)
    process = start(path, slurm.environ)
    try:
        deadline = time.monotonic() + 60
        while not slurm.calls("sbatch"):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        with pytest.raises(ConfigError, match="another submit .* is under way"):
            submit(path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_cancel_ends_the_successor_in_which_a_point_runs(slurm: FakeSlurm, folder: Path) -> None:
    submit(write_sweep(folder, "seeds: 1\n"))
    sweep = read_sweep(folder / "out" / "s")
    run_dir, first = sweep.run_dir(sweep.rows[0]), slurm.jobs()[0]["id"]
    slurm.add(state="RUNNING", name="s", comment="prime-hpc:second", nodes="n1")
    write_record(run_dir, by_job=True, successor_token="second", successor="101")
    slurm.forget(first)  # it reached its time limit; its successor began, and has the next one wait
    inside = {"PRIMEHPC_SUBMISSION": f"second {run_dir}", "SLURM_JOB_ID": "101"}
    assert check_in(run_dir, inside) is None
    slurm.add(state="PENDING", name="s", comment="prime-hpc:third", dependency="afternotok:101")
    write_record(run_dir, by_job=True, successor_token="third", successor="102")
    slurm.add(state="RUNNING", name="s", comment="prime-hpc:of-another-run", nodes="n2")
    assert run(["cancel", str(sweep.dir), "--now"], "sweep") == 0
    assert [job["state"] for job in slurm.jobs()] == ["CANCELLED", "CANCELLED", "RUNNING"]


def test_a_point_that_begins_before_scancel_comes_is_not_counted_as_waiting(
    slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(write_sweep(folder, "seeds: 1\n"))
    scancel = cancel.run_slurm

    def between(argv: list[str], *others: float) -> str:
        slurm.change(slurm.jobs()[0]["id"], state="RUNNING", nodes="n1")
        return scancel(argv, *others)

    monkeypatch.setattr(cancel, "run_slurm", between)
    assert run(["cancel", str(folder / "out" / "s")], "sweep") == 0
    assert "0 taken out of the queue, 0 saved and ended, 1 ended without a save" in capsys.readouterr().out


def test_a_point_that_was_cancelled_while_it_started_has_saved_nothing(slurm: FakeSlurm, folder: Path) -> None:
    submit(write_sweep(folder, AXES))
    sweep = read_sweep(folder / "out" / "s")
    ended(sweep.run_dir(sweep.rows[0]), "stopped", "100_0")
    ended(sweep.run_dir(sweep.rows[1]), "stopped", "100_1")
    rows = sweep.run_dir(sweep.rows[1]) / "attempts.jsonl"
    rows.write_text(json.dumps({**json.loads(rows.read_text()), "saved_step": 20}) + "\n")
    views = [view for view in look(sweep) if view.row.index < 2]
    outcome = cancel._counted(sweep, views, waiting=0, left=[])
    assert (outcome.saved, outcome.ended) == (1, 1) and "1 ended without a save" in outcome.describe()


def test_cancel_asks_points_here_whose_command_is_gone(
    slurm: FakeSlurm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(write_sweep(folder, AXES))
    slurm.forget(slurm.jobs()[0]["id"])
    sweep = read_sweep(folder / "out" / "s")
    sweep.update(new_submit("local", [0]), state="sent")
    (sweep.dir / LOCK).touch()  # of the command, which was killed
    run_dir = sweep.run_dir(sweep.rows[0])
    write_record(run_dir, state="local", job_id=None)
    write_attempt(run_dir / "attempts.jsonl", Attempt(1, 1, time.time(), "first start"))  # by this very process
    asked: list[bool] = []

    def wait(*_: object) -> list[object]:
        asked.append((run_dir / "STOP").exists())
        return []

    monkeypatch.setattr(cancel, "_wait", wait)
    outcome = cancel.cancel_sweep(sweep, save=True, timeout_s=1.0, say=print)
    assert asked == [True] and slurm.calls("scancel") == [] and outcome.left == []


def test_an_ordinary_run_is_not_taken_for_a_sweep(slurm: FakeSlurm, folder: Path) -> None:
    (folder / "out" / "s").mkdir(parents=True)
    (folder / "out" / "s" / "run.yaml").write_text("")
    with pytest.raises(ConfigError, match="holds a run: choose another name"):
        submit(write_sweep(folder, AXES))
