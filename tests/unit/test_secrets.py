"""A secret of the config is read by its owner alone, whichever way it came in; and it arrives where it is needed."""

import errno
import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

from prime_hpc import cli
from prime_hpc.config import ConfigError, Experiment, load_experiment, load_run, snapshot, write_snapshot
from prime_hpc.config.run_files import RUN_YAML
from prime_hpc.config.secret import (
    SECRETS,
    Secret,
    masked,
    masked_command,
    names_secret,
    plainly_assigned,
    read_key_file,
    revealed,
    written_secrets,
)
from prime_hpc.config.site import load_site, read_site
from prime_hpc.launch import local, submission
from prime_hpc.slurm.script import command_tail
from tests.support.submissions import load, run_dir, use_fake_slurm, write_config

CANARY = "can4ry-0f-a-k3y"


def key_file(folder: Path, text: str = CANARY, mode: int = 0o600) -> Path:
    path = folder / "key"
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


def leaks(folder: Path) -> list[str]:
    """Files below a folder that hold the canary, those aside that only their owner can open or reach."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and CANARY.encode() in path.read_bytes():
            is_kept = path.parent.name == SECRETS and stat.S_IMODE(path.stat().st_mode) == 0o600
            if not (is_kept and stat.S_IMODE(path.parent.stat().st_mode) == 0o700):
                found.append(str(path.relative_to(folder)))
    return found


def test_a_secret_is_printed_by_nobody() -> None:
    exp = Experiment.model_validate(
        {
            "inference": {"api_key": CANARY, "vllm": {"hf_token": CANARY}},
            "slurm": {"env": {"WANDB_API_KEY": CANARY, "https_proxy": f"http://me:{CANARY}@proxy:80", "A": "b"}},
            "orchestrator": {"env": [{"id": "x", "args": {"deep": [{"judge_api_key": CANARY}], "answer_key": "a"}}]},
        }
    )
    shown = [
        repr(exp),
        str(exp),
        f"{exp}",
        exp.model_dump_json(),
        repr(exp.model_dump()),
        json.dumps(exp.model_dump(mode="json")),
    ]
    assert not any(CANARY in text for text in shown)
    assert exp.inference is not None and exp.inference.api_key is not None
    assert exp.inference.api_key.reveal() == CANARY
    assert pickle.loads(pickle.dumps(exp.inference.api_key)) == exp.inference.api_key
    assert revealed(exp.inference.vllm) == {"hf_token": CANARY}
    assert revealed(exp.slurm.env)["https_proxy"] == f"http://me:{CANARY}@proxy:80"
    assert revealed(exp.orchestrator.env[0].args) == {"deep": [{"judge_api_key": CANARY}], "answer_key": "a"}
    assert exp.model_dump()["slurm"]["env"]["A"] == "b"
    assert exp.holds_secret and not Experiment().holds_secret


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("api_key", "api-key", "judge_api_key", "WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD")),
        *((name, True) for name in ("AWS_SECRET_ACCESS_KEY", "password", "hf_token", "client_secret", "ACCESS_KEYS")),
        *((name, False) for name in ("TOKENIZERS_PARALLELISM", "MAX_NEW_TOKENS", "answer_key", "eos_token", "seed")),
        *((name, False) for name in ("api_key_var", "GOOGLE_KEY_FILE", "SSH_KEY_PATH", "OMP_NUM_THREADS", "key")),
    ],
)
def test_names_tell_a_secret(name: str, secret: bool) -> None:
    assert names_secret(name) is secret


def test_a_key_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    (folder := tmp_path / "my keys").mkdir()
    path = key_file(folder)
    assert read_key_file(path) == CANARY
    path.chmod(0o400)
    assert read_key_file(path) == CANARY
    for mode in (0o644, 0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=rf"others can read or change it \(mode {mode:04o}\).*chmod 600 '{path}'"):
            read_key_file(path)
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_key_file(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for other in (tmp_path, tmp_path / "pipe"):  # of which nobody waits for who writes into it
        with pytest.raises(ConfigError, match="is no ordinary file"):
            read_key_file(other)
    with pytest.raises(ConfigError, match="No such file"):
        read_key_file(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        read_key_file(path)


def test_a_key_file_that_others_can_read_stops_a_run_before_it_starts(tmp_path: Path) -> None:
    path = key_file(tmp_path, mode=0o644)
    with pytest.raises(ConfigError, match=r"--inference.api-key\): inference.api_key: .*chmod 600") as caught:
        load_experiment([f"--inference.api-key=@{path}", "--orchestrator.env", '[{"id": "x"}]'], "rl", {})
    assert CANARY not in str(caught.value)


def test_a_file_that_states_a_secret_for_all_to_read_is_warned_of(tmp_path: Path) -> None:
    config = tmp_path / "e.yaml"
    config.write_text(f"inference: {{api_key: {CANARY}}}\n")
    config.chmod(0o644)
    assert any("can be read by others" in text for text in load_experiment(["@", str(config)], "trainer", {}).warnings)
    config.chmod(0o600)
    assert not load_experiment(["@", str(config)], "trainer", {}).warnings
    key_file(tmp_path)
    config.write_text("inference: {api_key: '@key'}\n")  # relative to the file that says so
    config.chmod(0o644)
    loaded = load_experiment(["@", str(config)], "trainer", {})
    assert loaded.experiment.inference is not None and not loaded.warnings
    assert loaded.experiment.inference.api_key == Secret(CANARY)


def test_wrong_values_of_secrets_are_not_shown(tmp_path: Path) -> None:
    config = tmp_path / "e.yaml"
    config.write_text("inference: {api_key: [91827364]}\n")
    with pytest.raises(ConfigError, match="expected text or null, got something else") as caught:
        load_experiment(["@", str(config)], "trainer", {})
    assert "91827364" not in str(caught.value)
    for flags in (["--inference", f'{{"api_key": "{CANARY}"'], ["--slurm.env", f"WANDB_API_KEY={CANARY}"]):
        with pytest.raises(ConfigError) as caught:
            load_experiment(flags, "trainer", {})
        assert CANARY not in str(caught.value)
    with pytest.raises(ConfigError, match=r"\*\*\* stands for a secret that was left out"):
        load_experiment(["--inference.api-key", "***"], "trainer", {})


def test_secrets_in_shell_lines_are_refused() -> None:
    with pytest.raises(ValueError, match="gives HF_TOKEN its value in plain text"):
        Experiment.model_validate({"slurm": {"setup": [f"export HF_TOKEN={CANARY}"]}})
    with pytest.raises(ValueError, match="WANDB_API_KEY"):
        Experiment.model_validate({"slurm": {"srun_args": [f"--export=ALL,WANDB_API_KEY={CANARY}"]}})
    Experiment.model_validate({"slurm": {"setup": ["export HF_TOKEN=$(cat ~/.hf)", 'export A_KEY="$B"', "x=1"]}})
    assert plainly_assigned("--env HF_TOKEN=abc") == "HF_TOKEN" and plainly_assigned("KEY_FILE=abc") is None


def test_command_lines_are_masked_whatever_their_form() -> None:
    quoted = [
        ["rl", "--inference.api-key", CANARY],
        ["rl", f"--inference.api_key={CANARY}"],
        ["rl", "--inference", json.dumps({"num_replicas": 2, "api_key": CANARY})],
        ["rl", f"--inference={{'api_key': '{CANARY}'}}"],
        ["rl", "--slurm.env", json.dumps({"HF_TOKEN": CANARY})],
        ["rl", f"--slurm.env.HF_TOKEN={CANARY}"],
        ["rl", "--slurm.env.HTTPS_PROXY", f"http://u:{CANARY}@p:1"],
    ]
    for command in quoted:
        assert CANARY not in " ".join(masked_command(command)), command
        assert CANARY not in " ".join(command_tail(command)), command
    assert masked_command(["rl", "@", "e.yaml", "--inference.api-key=@key", "--max-steps", "3"])[3:] == [
        "--inference.api-key=@key",
        "--max-steps",
        "3",
    ]
    assert command_tail(["--inference.api-key", CANARY, "--max-steps", "3"]) == ["--max-steps", "3"]
    assert masked(f'{{"api_key": "{CANARY}", "b": 1}}') == '{"api_key": "***", "b": 1}'


def test_a_folder_of_secrets_that_others_may_open_is_closed(tmp_path: Path) -> None:
    """It came with a copy of the run directory, say."""
    home = tmp_path / SECRETS
    home.mkdir()
    home.chmod(0o755)
    with written_secrets(tmp_path, {"api_key": CANARY}):
        pass
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_of_secrets_that_begin_alike_nothing_is_left() -> None:
    texts = ["walrus" + "-and-more" * number for number in range(6)]
    for text in texts:
        Secret(text)
    assert [masked(f"it is {text}.") for text in texts] == ["it is ***."] * 6


def _by_flag(config: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["--slurm.env.HF_TOKEN", CANARY]


def _by_json_flag(config: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return ["--slurm.env", json.dumps({"HF_TOKEN": CANARY}), "--inference", json.dumps({"api_key": CANARY})]


def _by_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    tree = json.loads(config.read_text())
    tree["inference"] = {"api_key": CANARY}
    tree["slurm"]["env"] = {"WANDB_API_KEY": CANARY}
    config.write_text(json.dumps(tree))
    config.chmod(0o600)
    return []


def _by_key_file(config: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return [f"--slurm.env.HF_TOKEN=@{key_file(config.parent)}"]


def _by_environment(config: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("PRIME_SLURM__ENV", json.dumps({"HF_TOKEN": CANARY}))
    monkeypatch.setenv("PRIME_INFERENCE__API_KEY", CANARY)
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    return []


def _by_site(config: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    site = config.parent / "site.yaml"
    site.write_text(f"scratch: {config.parent}\ndevice: cpu\nenv: {{HF_TOKEN: {CANARY}}}\n")
    site.chmod(0o600)
    return []


WAYS = [_by_flag, _by_json_flag, _by_file, _by_key_file, _by_environment, _by_site]


@pytest.mark.parametrize("way", WAYS)
def test_no_way_into_a_run_leaves_a_secret_in_sight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], way: object
) -> None:
    fake = use_fake_slurm(tmp_path, monkeypatch)
    config = write_config(tmp_path)
    flags = way(config, monkeypatch)  # type: ignore[operator]
    monkeypatch.setattr("sys.argv", ["prime-hpc", "submit", str(config), *flags])
    loaded = load(config, *flags)
    assert submission.submit(loaded, dry_run=True) == 0
    assert submission.submit(loaded, dry_run=True, as_json=True) == 0
    assert submission.submit(loaded, as_json=True) == 0
    out = capsys.readouterr()
    assert CANARY not in out.out + out.err
    assert not any(CANARY in word for call in fake.calls() for word in call)
    assert leaks(tmp_path / "out") == []
    experiment = load_run(run_dir(config))
    assert experiment == loaded.experiment
    given = revealed({**read_site(run_dir(config)).env, **experiment.slurm.env})
    assert CANARY in given.values()


def test_a_sweep_keeps_secrets_out_of_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use_fake_slurm(tmp_path, monkeypatch)
    config = write_config(tmp_path)
    _by_site(config, monkeypatch)
    sweep = tmp_path / "s.yaml"
    overrides = {"slurm.env": {"WANDB_API_KEY": CANARY}, "inference.api_key": CANARY}
    tree = {"name": "s", "experiment": str(config), "overrides": overrides, "axes": {"product": {"seed": [1, 2]}}}
    sweep.write_text(json.dumps(tree))
    sweep.chmod(0o600)
    argv = ["sweep", "submit", str(sweep), "--slurm.env.HF_TOKEN", CANARY]
    monkeypatch.setattr("sys.argv", ["prime-hpc", *argv])
    assert cli.main(argv) == 0
    assert not any(CANARY in word for call in fake.calls() for word in call)
    out = tmp_path / "out" / "s"
    assert leaks(tmp_path / "out") == []
    points = [path.parent for path in out.glob("*/run.yaml")]
    assert len(points) == 2
    for point in points:
        assert revealed(load_run(point).slurm.env) == {"WANDB_API_KEY": CANARY, "HF_TOKEN": CANARY}
        assert revealed(read_site(point).env) == {"HF_TOKEN": CANARY}
    assert cli.main(["sweep", "resume", str(out), "--dry-run"]) == 0  # from what it keeps alone


def test_an_axis_over_a_secret_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    sweep = tmp_path / "s.yaml"
    tree = {"experiment": str(config), "axes": {"product": {"inference.api_key": [CANARY, CANARY + "2"]}}}
    sweep.write_text(json.dumps(tree))
    assert cli.main(["sweep", "submit", str(sweep), "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert "a secret cannot vary" in err and CANARY not in err


def test_a_local_job_is_not_handed_the_environment_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    (tmp_path / "run.yaml").write_text("max_steps: many\n")
    job = local._start(tmp_path)  # its config is wrong: it ends at once
    assert job.result() == 2
    assert leaks(tmp_path) == []


def test_role_files_of_a_run_with_secrets_load(tmp_path: Path) -> None:
    tree = {"inference": {"api_key": CANARY}, "orchestrator": {"env": [{"id": "x", "args": {"api_key": CANARY}}]}}
    experiment = Experiment.model_validate({**tree, "teacher_inference": None})
    write_snapshot(experiment, tmp_path / "run", ["rl"])
    assert leaks(tmp_path) == []
    files = [tmp_path / "run" / "configs" / f"{role}.toml" for role in ("trainer", "orchestrator", "inference")]
    argv = [word for file in files for word in (f"--{file.stem}", "@", str(file))]
    assert load_experiment(argv, "rl", {}).experiment.inference == experiment.inference
    # a run without them leaves none of an earlier one
    write_snapshot(Experiment(), tmp_path / "run", ["rl"])
    assert list((tmp_path / "run" / SECRETS).iterdir()) == []


def test_secrets_are_removed_once_nothing_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Experiment.model_validate({"inference": {"api_key": CANARY}})
    write_snapshot(before, tmp_path, ["rl"])
    write = snapshot.write_atomic

    def broken_off(path: Path, *arguments: Any, **options: Any) -> None:
        if path.name == RUN_YAML:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, *arguments, **options)

    monkeypatch.setattr(snapshot, "write_atomic", broken_off)
    with pytest.raises(OSError, match="No space"):
        write_snapshot(Experiment(), tmp_path, ["rl"])
    kept = load_run(tmp_path).inference
    assert kept is not None and before.inference is not None and kept.api_key == before.inference.api_key


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_run_whose_secrets_are_out_of_reach_can_still_be_looked_at(tmp_path: Path) -> None:
    write_snapshot(Experiment.model_validate({"inference": {"api_key": CANARY}}), tmp_path, ["rl"])
    (tmp_path / SECRETS).chmod(0)
    try:
        experiment = load_run(tmp_path)
        assert experiment.inference is not None and experiment.inference.api_key is not None
        with pytest.raises(ConfigError, match="Permission denied"):
            experiment.inference.api_key.reveal()
    finally:
        (tmp_path / SECRETS).chmod(0o700)


def test_a_narrow_umask_is_not_widened(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_snapshot(Experiment(), tmp_path / "run", ["rl"])
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert modes == {0o600}


def test_a_site_profile_states_secrets_by_file_too(tmp_path: Path) -> None:
    key_file(tmp_path)
    (tmp_path / "site.yaml").write_text("env: {HF_TOKEN: '@key'}\n")
    assert revealed(load_site(str(tmp_path / "site.yaml")).env) == {"HF_TOKEN": CANARY}
    key_file(tmp_path, mode=0o640)
    with pytest.raises(ConfigError, match=r"site.yaml: env.HF_TOKEN: .*chmod 600"):
        load_site(str(tmp_path / "site.yaml"))
