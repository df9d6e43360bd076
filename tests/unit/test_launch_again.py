"""A run directory that is there already: what goes on, what is refused, and what `--clean` deletes."""

import json
import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prime_hpc import cli
from prime_hpc.config import ConfigError, load_experiment, load_run
from prime_hpc.evals.episodes import results_file
from prime_hpc.inference import environment
from prime_hpc.launch.prepare import prepare_run
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.store.attempts import ALIVE_S, begin, read_attempts, rewrite_row, write_attempt
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.attempt import crash_recovery
from prime_hpc.supervisor.attempt.bad_nodes import DAY_S, bad_nodes, ledger_path
from prime_hpc.supervisor.attempt.crash_recovery import close_crashed_attempts
from prime_hpc.supervisor.attempt.restart_policy import attempts_without_progress
from tests.support.fake_slurm import FakeSlurm
from tests.support.launch import loaded, make_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


def test_existing_run_is_never_overwritten_unasked(tmp_path: Path, model: Path) -> None:
    one = loaded(tmp_path, model)
    run_dir = prepare_run(one)
    (run_dir / "attempts.jsonl").write_text("")
    with pytest.raises(ConfigError, match="already holds a run, which saved no checkpoint; choose another --name"):
        prepare_run(one)
    (run_dir / "checkpoints.json").write_text(json.dumps({"path": str(tmp_path / "elsewhere")}))
    (tmp_path / "elsewhere" / "step_2").mkdir(parents=True)  # by a command that named another ckpt.path
    with pytest.raises(ConfigError, match="already holds a run; resume it with --ckpt.resume-step latest"):
        prepare_run(one)
    (run_dir / "checkpoints.json").unlink()
    (run_dir / "checkpoints" / "step_3").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already holds a run; resume it with --ckpt.resume-step latest"):
        prepare_run(one)
    prepare_run(loaded(tmp_path, model, ckpt={"resume_step": "latest"}))
    assert (run_dir / "attempts.jsonl").exists()
    prepare_run(loaded(tmp_path, model, clean=True))
    assert not (run_dir / "attempts.jsonl").exists()


def test_an_evaluation_that_ended_as_it_started_goes_on(tmp_path: Path, model: Path) -> None:
    """It has no results yet."""
    one = loaded(tmp_path, model, kind="eval", orchestrator={}, eval={"environment_ids": ["reverse-text"]})
    run_dir = prepare_run(one)
    attempt = begin(run_dir / "attempts.jsonl", incarnation=1, why="test", resume_step=None, job_id=None)
    attempt.ended = time.time()
    write_attempt(run_dir / "attempts.jsonl", attempt)
    prepare_run(one)
    (run_dir / "run.yaml").write_text("kind: rl\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        prepare_run(one)


def test_what_is_asked_otherwise_of_a_run_that_goes_on_is_named(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def envs(**args: object) -> dict[str, Any]:
        return {"env": [{"id": "reverse-text", "args": args}], "sampling": {"max_tokens": 16}}

    run_dir = prepare_run(loaded(tmp_path, model, ckpt={}, orchestrator=envs(max_words=3), inference={"api_key": "a"}))
    attempt = begin(run_dir / "attempts.jsonl", incarnation=1, why="test", resume_step=None, job_id=None)
    attempt.ended = time.time()
    write_attempt(run_dir / "attempts.jsonl", attempt)
    assert capsys.readouterr().err == ""
    again: dict[str, Any] = {"ckpt": {"resume_step": "latest"}, "inference": {"api_key": "b"}}
    prepare_run(loaded(tmp_path, model, **again, orchestrator=envs(max_words=4, system_prompt=[1])))
    assert capsys.readouterr().err.splitlines() == [
        "changed since this run was last started: orchestrator.env.0.args.max_words: 3 -> 4",
        'changed since this run was last started: inference.api_key: "***" -> "*** (another)"',
        "changed since this run was last started: orchestrator.env.0.args.system_prompt: null -> [1]",
    ]
    prepare_run(loaded(tmp_path, model, **again, orchestrator=envs(max_words=4, system_prompt=[1])))
    assert capsys.readouterr().err == ""
    (run_dir / "run.yaml").write_text("kind: [")
    prepare_run(loaded(tmp_path, model, **again, orchestrator=envs(max_words=4)))
    assert load_run(run_dir).orchestrator.env[0].args == {"max_words": 4}
    (run_dir / "run.yaml").write_bytes(b"kind: \xff")
    prepare_run(loaded(tmp_path, model, **again, orchestrator=envs(max_words=4)))


def test_packages_that_are_others_than_before_are_named_also_those_of_the_engines(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "problem_of", lambda *_: "")  # its interpreter is none

    def lock(**changes: Any) -> None:
        file = run_dir / "lock.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    there = tmp_path / "engines" / "lib" / "python3.12" / "site-packages" / "vllm-2.0.dist-info"
    there.mkdir(parents=True)
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 2.0\n")
    tree: dict[str, Any] = {"orchestrator": {"env": [{"id": "reverse-text"}]}}
    tree["inference"] = {"python": str(tmp_path / "engines/bin/python")}
    run_dir = prepare_run(loaded(tmp_path, model, ckpt={}, **tree))
    attempt = begin(run_dir / "attempts.jsonl", incarnation=1, why="test", resume_step=None, job_id=None)
    attempt.ended = time.time()
    write_attempt(run_dir / "attempts.jsonl", attempt)
    tree["ckpt"] = {"resume_step": "latest"}
    prepare_run(loaded(tmp_path, model, **tree))
    assert capsys.readouterr().err == ""
    packages = json.loads((run_dir / "lock.json").read_text())["packages"]
    old = dict.fromkeys(map(str, range(10)), "1")
    lock(packages=packages | old, engines={"inference": {"packages": {"vllm": "1.0"}}, "teacher_inference": {}})
    prepare_run(loaded(tmp_path, model, **tree))
    told = ", ".join(["vllm (inference.python) 1.0 -> 2.0", *(f"{i} 1 -> none" for i in range(7))])
    assert capsys.readouterr().err == f"packages changed since this run was last started: {told} and 3 more\n"


def test_what_another_version_of_the_suite_writes_otherwise_was_not_changed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def again(**args: object) -> list[str]:
        env = {"env": [{"id": "reverse-text", "args": args}]}
        prepare_run(loaded(tmp_path, model, ckpt={"resume_step": "latest"}, orchestrator=env))
        return capsys.readouterr().err.splitlines()

    again()
    run_dir = tmp_path / "out" / "x"
    attempt = begin(run_dir / "attempts.jsonl", incarnation=1, why="test", resume_step=None, job_id=None)
    attempt.ended = time.time()
    write_attempt(run_dir / "attempts.jsonl", attempt)
    lines = (run_dir / "run.yaml").read_text().splitlines(keepends=True)
    older = [line for line in lines if not line.startswith(("  head_dtype: ", "  rows: "))]
    assert len(older) == len(lines) - 2
    (run_dir / "run.yaml").write_text("".join(older))
    assert again() == []
    (line,) = again(system_prompt="é" * 1000)
    assert "orchestrator.env.0.args.system_prompt: null -> " in line and line.endswith("éé...") and len(line) < 400


def test_a_life_that_ended_before_it_wrote_anything_is_no_run(tmp_path: Path, model: Path) -> None:
    one = loaded(tmp_path, model)
    run_dir = prepare_run(one)
    for name in ("rollouts", "weights", "metrics"):
        (run_dir / name).mkdir()
    prepare_run(one)
    (run_dir / "rollouts" / "step_000001").mkdir()
    with pytest.raises(ConfigError, match="already holds a run"):
        prepare_run(one)


def test_a_run_that_lives_on_another_login_node_is_not_started_twice(tmp_path: Path, model: Path) -> None:
    one = loaded(tmp_path, model, ckpt={"resume_step": "latest"})
    run_dir = prepare_run(one)
    (run_dir / "logs").mkdir()
    begin(run_dir / "attempts.jsonl", incarnation=1, why="first start", resume_step=None, job_id=None)
    (row,) = read_attempts(run_dir / "attempts.jsonl")
    rewrite_row(run_dir / "attempts.jsonl", row | {"host": "login2", "pid": 4711})
    status = run_dir / "status.json"
    status.write_text("{}")
    close = partial(close_crashed_attempts, one.experiment, run_dir, RunPaths(run_dir), None)
    for start in (lambda: prepare_run(one), close):
        with pytest.raises(ConfigError, match=r"attempt 1 runs on login2 \(process 4711\), whose last sign of life is"):
            start()
    assert not list(run_dir.glob(".tmp-*"))
    os.utime(status, (0, time.time() - ALIVE_S - 60))  # silent for longer: it is taken over, and said to have ended
    prepare_run(one)
    close()
    (row,) = read_attempts(run_dir / "attempts.jsonl")
    assert row["ended"] is not None and "4711 on login2" in str(row["cause"])


def test_a_line_made_by_hand_is_an_attempt_that_left_no_end(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    path.write_text('{"attempt": 1, "began": null}\n')
    close_crashed_attempts(loaded(tmp_path, model).experiment, tmp_path, RunPaths(tmp_path), None)
    (row,) = read_attempts(path)
    assert row["outcome"] == "failed" and row["ended"] is not None
    assert begin(path, incarnation=1, why="again", resume_step=None, job_id=None).attempt == 2


def test_an_evaluation_whose_node_dies_has_got_as_far_as_its_episodes(tmp_path: Path, model: Path) -> None:
    argv = ["--model.name", str(model), "--environment-ids", "reverse-text", "--output-dir", str(tmp_path)]
    alone, paths = load_experiment(argv, "eval", {}).experiment, RunPaths(tmp_path / "eval")
    results_file(paths.root).parent.mkdir(parents=True)
    results_file(paths.root).write_text("{}\n" * 500)
    begin(paths.attempts, incarnation=1, why="first start", resume_step=None, saved_before=0, job_id=None)
    rewrite_row(paths.attempts, {**read_attempts(paths.attempts)[0], "pid": 2**22 + 1})
    close_crashed_attempts(alone, paths.root, paths, None)
    rows = read_attempts(paths.attempts)
    assert rows[0]["saved_step"] == 500 and attempts_without_progress(rows) == 0


def test_a_job_that_has_the_id_of_an_attempts_job_by_now_is_no_obstacle(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that was set up anew gives the same ids again."""
    fake = FakeSlurm(tmp_path)
    fake.use(monkeypatch)
    one = loaded(tmp_path, model)
    run_dir = prepare_run(one)
    job = fake.add(state="RUNNING", nodes="n1", name="own", stdout=f"{run_dir}/logs/slurm-100.out")
    begin(run_dir / "attempts.jsonl", incarnation=1, why="first start", resume_step=None, job_id=job)
    (row,) = read_attempts(run_dir / "attempts.jsonl")
    rewrite_row(run_dir / "attempts.jsonl", row | {"host": "n9", "began": time.time() - 2 * ALIVE_S})
    close = partial(
        close_crashed_attempts, one.experiment, run_dir, RunPaths(run_dir), Allocation("7", (("n2",),), "n2", 0)
    )
    with pytest.raises(ConfigError, match=rf"job {job} \(RUNNING\) still works there"):
        close()
    fake.change(job, stdout=f"{run_dir.parent}/another/logs/slurm-100.out")
    fake.behave("scontrol", code=1, stderr="Unable to contact slurm controller (connect failure)")
    with pytest.raises(ConfigError, match="still works there"):
        close()  # nobody says that it is another's
    fake.behave("scontrol")
    fake.change(job, name=one.experiment.name)
    with pytest.raises(ConfigError, match="still works there"):
        close()  # sent with `sbatch -o FILE job.sbatch`
    fake.change(job, name="own")
    close()
    (row,) = read_attempts(run_dir / "attempts.jsonl")
    assert row["ended"] is not None


@pytest.mark.parametrize("days", [0, 20])  # after weeks all nodes were started again, as maintenance leaves them
def test_a_node_that_was_lost_with_its_supervisor_is_remembered_from_then_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    one = loaded(tmp_path, model)
    run_dir = prepare_run(one)
    attempts = run_dir / "attempts.jsonl"
    begin(attempts, incarnation=1, why="first start", resume_step=None, job_id="7")
    rewrite_row(attempts, {**read_attempts(attempts)[0], "began": time.time() - days * DAY_S})
    monkeypatch.setattr(crash_recovery, "lost_hosts", lambda hosts, since, silent_end: ["n1"])
    allocation = Allocation("7", (("n2", "n3"),), "n2", 1)
    close_crashed_attempts(one.experiment, run_dir, RunPaths(run_dir), allocation)
    known = bad_nodes(ledger_path(one.experiment.output_dir), 7)
    assert known == ({} if days else {"n1": "node n1 was lost"})


@pytest.mark.parametrize("name", [".", "..", "", ".hidden", "-rf", "~", "a/b", "a\nb", " a", "x" * 201])
def test_a_name_that_would_be_another_place_is_refused(tmp_path: Path, model: Path, name: str) -> None:
    other = prepare_run(loaded(tmp_path, model, name="other"))
    with pytest.raises(ValueError, match=r"directory|begins|bytes long"):
        prepare_run(loaded(tmp_path, model, name=name, clean=True))
    assert cli.main(["submit", str(other / "run.yaml"), f"--name={name}", "--clean", "--dry-run"]) == 2
    assert (other / "run.yaml").exists()


def test_clean_deletes_only_runs(tmp_path: Path, model: Path) -> None:
    run_dir = tmp_path / "out" / "x"
    (run_dir / "weights").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no run of ours"):
        prepare_run(loaded(tmp_path, model, clean=True))
    assert (run_dir / "weights").exists()


def _clean(tmp_path: Path, model: Path, name: str = "x") -> None:
    prepare_run(loaded(tmp_path, model, name=name, clean=True))


def test_clean_refuses_what_is_not_one_run_of_ones_own(tmp_path: Path, model: Path) -> None:
    inner = prepare_run(loaded(tmp_path, model, output_dir=str(tmp_path / "out" / "x"), name="inner"))
    outer = prepare_run(loaded(tmp_path, model))
    (outer / "weights").mkdir()
    with pytest.raises(ConfigError, match=r"holds other runs \(inner\)"):
        _clean(tmp_path, model)
    assert (inner / "run.yaml").exists() and (outer / "run.yaml").exists()
    link = tmp_path / "out" / "link"
    link.symlink_to(outer)
    with pytest.raises(ConfigError, match="is a link to .*/x"):
        _clean(tmp_path, model, "link")
    shutil.rmtree(inner)
    (outer / "points.jsonl").touch()
    with pytest.raises(ConfigError, match="is a sweep's"):
        _clean(tmp_path, model)
    (outer / "points.jsonl").unlink()
    (outer / "roles" / "trainer").mkdir(parents=True)
    (outer / "roles" / "trainer" / "run.yaml").touch()  # of a role by hand: this run's own
    _clean(tmp_path, model)
    assert not (outer / "weights").exists()


def test_clean_leaves_a_home_directory(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = prepare_run(loaded(tmp_path, model))
    (run_dir / "weights").mkdir()
    monkeypatch.setenv("HOME", str(run_dir / "weights"))
    with pytest.raises(ConfigError, match="holds your home directory"):
        _clean(tmp_path, model)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_clean_leaves_another_users_run(tmp_path: Path, model: Path) -> None:
    run_dir = prepare_run(loaded(tmp_path, model))
    (run_dir / "weights").mkdir()
    os.chown(run_dir, 12345, 12345)
    with pytest.raises(ConfigError, match=r"belongs to another user .*uid 12345"):
        _clean(tmp_path, model)
    assert (run_dir / "weights").exists()


def test_the_words_of_a_sites_wrapper_are_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["Welcome to Foo, Slurm 23.11\nRelease 2.0\n\n12.batch\n12.0\n12+1.3\n12_4.1\nbye.1\n", "23.11x\n"])
    cancelled: list[str] = []

    def answer(argv: list[str], timeout_s: float) -> str:
        if argv[0] == "squeue":
            return next(answers)
        cancelled.append(argv[1])
        return ""

    monkeypatch.setattr(crash_recovery, "run_slurm", answer)
    monkeypatch.setattr(crash_recovery.time, "sleep", lambda _: None)
    crash_recovery.cancel_stale_steps(Allocation("12", (("n1",),), "n1", restarts=1))
    assert cancelled == ["12.0", "12+1.3", "12_4.1"]
