"""What is refused before anything starts."""

import json
import os
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prime_hpc import cli
from prime_hpc.config import ConfigError, Experiment, Loaded, load_run
from prime_hpc.launch import local
from prime_hpc.launch.checks import _weights_bytes, check
from prime_hpc.launch.plan.slurm_plan import local_plan, plan_text
from prime_hpc.launch.prepare import prepare_run
from prime_hpc.runtime.role_context import RESUME_STEP
from prime_hpc.store.attempts import ALIVE_S, begin, read_attempts, rewrite_row, write_attempt
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.attempt.crash_recovery import close_crashed_attempts
from tests.support.checkpoints import make_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + b"x" * 990)
    return folder


def loaded(tmp_path: Path, model: Path | str, **values: object) -> Loaded:
    tree = {
        "output_dir": str(tmp_path / "out"),
        "name": "x",
        "model": {"name": str(model)},
        "orchestrator": {"env": [{"id": "reverse-text"}]},
    }
    return Loaded(Experiment.model_validate({**tree, **values}), {}, [], "rl")


def test_a_good_experiment_is_prepared(tmp_path: Path, model: Path) -> None:
    one = loaded(tmp_path, model)
    run_dir = prepare_run(one)
    assert load_run(run_dir) == one.experiment
    assert (run_dir / "lock.json").exists()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"orchestrator": {"env": [{"id": "revers-text"}]}},
            "orchestrator.env.0.id.*not installed; did you mean reverse-text",
        ),
        ({"orchestrator": {}}, "no environment is named"),
        ({"kind": "sft"}, "sft.data.path: names no file"),
        ({"kind": "sft", "sft": {"data": {"path": "/nowhere/x.jsonl"}}}, "/nowhere/x.jsonl does not exist"),
    ],
)
def test_what_would_fail_later_is_refused(tmp_path: Path, model: Path, values: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(loaded(tmp_path, model, **values))


def test_what_another_job_may_make_is_not_missed_by_one_that_waits_for_it(tmp_path: Path, model: Path) -> None:
    sft = {"kind": "sft", "sft": {"data": {"path": str(tmp_path / "rows")}}}
    to_come = loaded(tmp_path, tmp_path / "made" / "weights" / "step_4", **sft)
    with pytest.raises(ConfigError, match="is not a directory"):
        check(to_come)
    check(to_come, waits=True)
    (model / "model.safetensors").unlink()
    (tmp_path / "rows").write_text("")
    with pytest.raises(ConfigError, match=r"(?s)no weights.*rows is empty|rows is empty.*no weights"):
        check(loaded(tmp_path, model, **sft), waits=True)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"device": "cpu"}, "flash needs GPUs, and device is cpu"),
        ({"dtype": "float32"}, "flash computes in bfloat16"),
        ({}, "flash-attn is not installed"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_before_anything_starts(
    tmp_path: Path, model: Path, values: dict, words: str
) -> None:
    of_model = {key: value for key, value in values.items() if key == "dtype"}
    one = loaded(tmp_path, model, **{key: value for key, value in values.items() if key == "device"})
    flash = one.experiment.model.model_copy(update={"attn": "flash", "dtype": "bfloat16", **of_model})
    with pytest.raises(ConfigError, match=words):
        prepare_run(replace(one, experiment=one.experiment.model_copy(update={"model": flash})))
    assert not (tmp_path / "out" / "x").exists()


@pytest.mark.parametrize("name", ["reverse_text", "Reverse-Text", "hypothesis", "prime_hpc.envs.tasksets.reverse_text"])
def test_every_name_that_the_environments_accept_passes(tmp_path: Path, model: Path, name: str) -> None:
    check(loaded(tmp_path, model, orchestrator={"env": [{"id": name}]}))


def test_model_path_without_weights(tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.name.*no weights"):
        check(loaded(tmp_path, model))
    (model / "pytorch_model.bin").write_bytes(b"x")  # which engines read, and the trainer does not
    with pytest.raises(ConfigError, match=r"model.name.*holds pytorch_model.bin and no safetensors"):
        check(loaded(tmp_path, model))


def test_model_path_that_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        check(loaded(tmp_path, "./no/such/model"))


def test_output_directory_that_cannot_be_written(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir.*cannot be written"):
        check(loaded(tmp_path, model, output_dir=str(tmp_path / "file" / "out")))


def test_output_directory_too_small(tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 1000000000000000}}')
    with pytest.raises(ConfigError, match="GiB free, but the run keeps about"):
        check(loaded(tmp_path, model))


@pytest.mark.parametrize("metadata", ["{}", "null", "[]", '{"total_size": "large"}'])
def test_an_index_need_not_say_how_large_the_model_is(tmp_path: Path, model: Path, metadata: str) -> None:
    (model / "model.safetensors.index.json").write_text(f'{{"metadata": {metadata}, "weight_map": {{}}}}')
    check(loaded(tmp_path, model))
    (model / "model.safetensors").rename(model / "a.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    assert _weights_bytes(loaded(tmp_path, model).experiment) == 1000


@pytest.mark.parametrize("text", ['{"weight_map"', "[]", "{}"])
def test_a_broken_index_is_named(tmp_path: Path, model: Path, text: str) -> None:
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match="model.safetensors.index.json is no index of safetensors files"):
        check(loaded(tmp_path, model))


def test_a_full_disk_has_no_room_for_what_is_small(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(ConfigError, match="0.00 GiB free, but logs and results want 64 MiB"):
        check(loaded(tmp_path, model))


def test_a_job_needs_the_room_that_its_preflight_will_ask_for(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 29))
    check(loaded(tmp_path, model))
    words = r"file system of .*/out has 0.50 GiB free, but .*preflight wants 1 GiB \(slurm.preflight.min_free_gib\)"
    with pytest.raises(ConfigError, match=words):
        check(loaded(tmp_path, model), by_slurm=True)
    check(loaded(tmp_path, model, slurm={"preflight": {"enabled": False}}), by_slurm=True)


def test_existing_run_is_never_overwritten_unasked(tmp_path: Path, model: Path) -> None:
    one = loaded(tmp_path, model)
    run_dir = prepare_run(one)
    (run_dir / "attempts.jsonl").write_text("")
    with pytest.raises(ConfigError, match="already holds a run; resume it with --ckpt.resume-step latest"):
        prepare_run(one)
    prepare_run(loaded(tmp_path, model, ckpt={"resume_step": "latest"}))
    assert (run_dir / "attempts.jsonl").exists()
    prepare_run(loaded(tmp_path, model, clean=True))
    assert not (run_dir / "attempts.jsonl").exists()


@pytest.mark.parametrize(
    ("values", "outcome", "saved", "words"),
    [
        ({"ckpt": {}}, "failed", 40, "go on from step 40: rl exp.yaml --api-key '***' --ckpt.resume-step latest"),
        ({"ckpt": {}}, "stopped", 40, "go on from step 40"),
        ({"ckpt": {}}, "interrupted", None, "nothing was saved. To start over: the same command with --clean"),
        ({}, "failed", None, "checkpoints are off: `--ckpt` switches them on"),
        (
            {"kind": "eval", "orchestrator": {}, "eval": {"environment_ids": ["reverse-text"]}},
            "failed",
            7,
            "the same command goes on",
        ),
        ({"ckpt": {}}, "completed", 40, ""),
    ],
)
def test_what_failed_on_this_machine_says_how_it_goes_on(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    values: dict[str, Any],
    outcome: str,
    saved: int | None,
    words: str,
) -> None:
    def supervise(run_dir: Path) -> int:
        attempt = begin(run_dir / "attempts.jsonl", incarnation=1, why="test", resume_step=None, job_id=None)
        attempt.outcome, attempt.saved_step = outcome, saved
        write_attempt(run_dir / "attempts.jsonl", attempt)
        return 1

    monkeypatch.setattr("prime_hpc.supervisor.main.supervise", supervise)
    monkeypatch.setattr("sys.argv", ["/bin/rl", "exp.yaml", "--clean", "--api-key", "sk-secret"])
    assert local.run(loaded(tmp_path, model, **values)) == 1
    said = capsys.readouterr().err
    assert words in said if words else said == ""


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ckpt": {}}, "rl @ exp.yaml --ckpt.resume-step latest --no-clean"),
        (
            {"kind": "eval", "orchestrator": {}, "eval": {"environment_ids": ["reverse-text"]}},
            "the same command with --no-clean goes on",
        ),
    ],
)
def test_what_goes_on_does_not_delete_what_a_file_says_to(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any], words: str
) -> None:
    one, row = loaded(tmp_path, model, clean=True, **values), {"attempt": 1, "outcome": "failed", "saved_step": 40}
    monkeypatch.setattr("sys.argv", ["/bin/rl", "@", "exp.yaml", "--clean"])
    (tmp_path / "attempts.jsonl").write_text(json.dumps(row) + "\n")
    assert words in local.how_to_go_on(one.experiment, tmp_path, local._command_again(deletes=one.experiment.clean))


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


def test_clean_deletes_only_runs(tmp_path: Path, model: Path) -> None:
    run_dir = tmp_path / "out" / "x"
    (run_dir / "weights").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no run of ours"):
        prepare_run(loaded(tmp_path, model, clean=True))
    assert (run_dir / "weights").exists()


def test_plan_names_roles_and_launcher(tmp_path: Path, model: Path) -> None:
    def planned(**values: Any) -> str:
        one = loaded(tmp_path, model, **values).experiment
        return plan_text(one, local_plan(one))

    text = planned(inference={"data_parallel_size": 2}, trainer={"num_ranks": 4})
    assert "data parallel 2" in text
    assert "4 FSDP2 ranks" in text
    assert "LocalExecutor" in text
    saving = planned(ckpt={"interval": "auto"})
    assert "checkpoints  as often as costs least" in saving and "expected loss" in saving
    assert "attached: http://127.0.0.1:8000/v1" in planned()


def test_context_beyond_the_model_is_refused(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text('{"max_position_embeddings": 512}')
    with pytest.raises(ConfigError, match="seq_len: 2048 tokens are beyond the model's max_position_embeddings = 512"):
        check(loaded(tmp_path, model))
    check(
        loaded(
            tmp_path, model, seq_len=512, orchestrator={"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 64}}
        )
    )


@pytest.mark.parametrize("name", [".", "..", "", ".hidden", "-rf", "~", "a/b", "a\nb", " a", "x" * 201])
def test_a_name_that_would_be_another_place_is_refused(tmp_path: Path, model: Path, name: str) -> None:
    other = prepare_run(loaded(tmp_path, model, name="other"))
    with pytest.raises(ValueError, match=r"directory|begins|bytes long"):
        prepare_run(loaded(tmp_path, model, name=name, clean=True))
    assert cli.main(["submit", str(other / "run.yaml"), f"--name={name}", "--clean", "--dry-run"]) == 2
    assert (other / "run.yaml").exists()


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


def test_an_orchestrator_by_hand_goes_on_where_its_trainer_does(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str | None] = []
    monkeypatch.setattr(os, "execv", lambda *_: started.append(os.environ.get(RESUME_STEP)))
    monkeypatch.setattr(os, "environ", os.environ.copy())

    def by_hand(**ckpt: object) -> str | None:
        os.environ.pop(RESUME_STEP, None)
        local.run_role(loaded(tmp_path, model, ckpt=ckpt), "orchestrator")
        return started.pop()

    assert by_hand() is None
    with pytest.raises(ConfigError, match=r"ckpt.resume_step: "):
        by_hand(resume_step=4)
    paths = RunPaths(tmp_path / "out" / "x")
    for step in (2, 4):
        make_checkpoint(paths, step)
    assert by_hand(resume_step=2) == "2"
    assert by_hand(resume_step="latest") == "4"
    with pytest.raises(ConfigError, match="by hand goes on in its own run's directory alone"):
        by_hand(resume_step=str(paths.checkpoints))


def test_a_run_that_lives_on_another_login_node_is_not_started_twice(tmp_path: Path, model: Path) -> None:
    one = loaded(tmp_path, model, ckpt={"resume_step": "latest"})
    run_dir = prepare_run(one)
    (run_dir / "logs").mkdir()
    begin(run_dir / "attempts.jsonl", incarnation=1, why="first start", resume_step=None, job_id=None)
    (row,) = read_attempts(run_dir / "attempts.jsonl")
    rewrite_row(run_dir / "attempts.jsonl", row | {"host": "login2", "pid": 4711})
    status = run_dir / "status.json"
    status.write_text("{}")
    for start in (lambda: prepare_run(one), lambda: close_crashed_attempts(run_dir, RunPaths(run_dir), None)):
        with pytest.raises(ConfigError, match=r"attempt 1 runs on login2 \(process 4711\), whose last sign of life is"):
            start()
    assert not list(run_dir.glob(".tmp-*"))
    os.utime(status, (0, time.time() - ALIVE_S - 60))  # silent for longer: it is taken over, and said to have ended
    prepare_run(one)
    close_crashed_attempts(run_dir, RunPaths(run_dir), None)
    (row,) = read_attempts(run_dir / "attempts.jsonl")
    assert row["ended"] is not None and "4711 on login2" in str(row["cause"])


@pytest.mark.parametrize(
    ("role", "module"), [("trainer", "prime_hpc.trainer.torchrun"), ("orchestrator", "prime_hpc.orchestrator.main")]
)
def test_a_role_by_hand_becomes_its_process(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, role: str, module: str
) -> None:
    """The console scripts with a config that is right, up to the exec."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = tmp_path / "e.yaml"
    config.write_text(
        f"name: x\noutput_dir: {tmp_path / 'out'}\nmodel: {{name: {model}}}\n"
        "orchestrator: {env: [{id: reverse-text}]}\n"
    )
    monkeypatch.setattr("sys.argv", [role, "@", str(config)])
    getattr(cli, role)()
    assert len(started) == 1
    assert module in started[0] and str(tmp_path / "out" / "x") in started[0]
    own = tmp_path / "out" / "x" / "roles" / role / "run.yaml"
    assert os.environ["PRIMEHPC_RUN_YAML"] == str(own) and own.exists()


@pytest.mark.parametrize(
    ("more", "is_said"),
    [(["--api-key", "K"], True), (["--api-key", "K", "--server.host", "0.0.0.0"], False), ([], False)],
)
def test_a_server_with_a_key_on_the_loopback_address_says_who_cannot_reach_it(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    is_said: bool,
) -> None:
    monkeypatch.setattr(os, "execv", lambda *_: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = tmp_path / "e.yaml"
    config.write_text(f"name: x\noutput_dir: {tmp_path / 'out'}\nmodel: {{name: {model}}}\ninference: {{}}\n")
    monkeypatch.setattr("sys.argv", ["inference", "@", str(config), "--server.port", "0", *more])
    cli.inference()
    line = "note: listens on 127.0.0.1: other nodes cannot reach it; --server.host 0.0.0.0"
    assert (line in capsys.readouterr().err) is is_said


def test_engines_of_a_further_node_leave_their_heads_config_alone(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They begin at once and see the same files: each reads what it was told itself, as do servers side by side."""
    monkeypatch.setattr(os, "execv", lambda *_: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    config = tmp_path / "e.yaml"
    config.write_text(f"name: x\noutput_dir: {tmp_path / 'out'}\nmodel: {{name: {model}}}\ninference: {{}}\n")
    words = ["inference", "@", str(config), "--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    monkeypatch.setenv("DATA_PARALLEL_ADDRESS", "127.0.0.1")
    found = []
    taken = socket.create_server(("127.0.0.1", 0))  # the further node listens to nobody
    headless = ["--server.port", str(taken.getsockname()[1]), "--data-parallel-start-rank", "1", "--headless"]
    for more in (["--server.port", "0"], headless, ["--server.port", "0"]):
        monkeypatch.setattr("sys.argv", [*words, *more])
        cli.inference()
        found.append(Path(os.environ["PRIMEHPC_RUN_YAML"]))
    assert len(set(found)) == 3 and {path.parent.parent for path in found} == {
        tmp_path / "out" / "x" / "roles" / "inference"
    }
    assert found[1].parent.name == "rank_1"
    assert ["headless: true" in path.read_text() for path in found] == [False, True, False]
    taken.close()
