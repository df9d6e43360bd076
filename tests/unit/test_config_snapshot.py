"""What is written into the run directory loads back as the same experiment."""

import json
import re
import stat
import subprocess
from pathlib import Path

import pytest

from prime_hpc.config import ConfigError, Experiment, load_experiment, load_run, snapshot, write_snapshot
from prime_hpc.config.snapshot import RUN_YAML_VARIABLE, stated_text

TREE = {
    "name": "snap",
    "seed": 3,
    "max_steps": 7,
    "seq_len": 256,
    "model": {"name": "/models/starter", "dtype": "float32", "ac": {"freq": 2}},
    "ckpt": {"interval": 2, "path": "/scratch/c", "resume_step": "latest"},
    "trainer": {"num_ranks": 2, "optim": {"lr": 1e-6, "betas": [0.8, 0.95]}, "loss": {"delta": float("inf")}},
    "orchestrator": {
        "batch_size": 16,
        "rollouts_per_example": 4,
        "sampling": {"max_tokens": 64, "min_p": 0.0, "extra": {"min_tokens": 0, "stop": ["a", "\u00e9\n"]}},
        "env": [
            {"id": "reverse-text", "args": {"split": "1e-6", "deep": {"a": [1, {"b": None}]}}, "max_turns": None},
            {"id": "calculator", "ratio": 2},
        ],
        "eval": {"interval": 5, "env": [{"id": "reverse-text"}]},
        "client": {"host": "a", "port": 8001},
    },
    "inference": {"data_parallel_size": 2, "vllm": {"x": None, "y": {"z": "null"}}},
    "sft": {"data": {"path": "data/x.jsonl", "loss_roles": ["assistant", "tool"]}, "save_interval": 5},
}


def role_files(run_dir: Path, *components: str) -> list[str]:
    return [token for name in components for token in (f"--{name}", "@", str(run_dir / "configs" / f"{name}.toml"))]


@pytest.mark.parametrize(
    "tree",
    [TREE, {}, {"orchestrator": {"env": [{"id": "x"}]}, "inference": {}}, {"kind": "sft", "wandb": {"name": "n"}}],
)
def test_run_yaml_round_trip(tmp_path: Path, tree: dict) -> None:
    experiment = Experiment.model_validate(tree)
    write_snapshot(experiment, tmp_path / "run", ["rl"])
    assert load_run(tmp_path / "run") == experiment


def test_role_files_load_as_the_same_tree(tmp_path: Path) -> None:
    experiment = Experiment.model_validate(TREE)
    write_snapshot(experiment, tmp_path, ["rl"])
    argv = role_files(tmp_path, "trainer", "orchestrator", "inference", "sft")
    assert load_experiment(argv, "rl", {}).experiment == experiment
    # Each role's file alone brings the role's section and all that is shared.
    alone = load_experiment(["@", str(tmp_path / "configs" / "inference.toml")], "inference", {}).experiment
    assert (alone.inference, alone.model, alone.seq_len) == (experiment.inference, experiment.model, 256)
    alone = load_experiment(["@", str(tmp_path / "configs" / "sft.toml")], "sft", {}).experiment
    assert (alone.sft, alone.trainer, alone.seed) == (experiment.sft, experiment.trainer, 3)


@pytest.mark.parametrize(
    "text", ["export X=${HOME}/a", "\\\\${A}", "\\${A}\\\\${B}", "a\\b ${A} \\", "\x85 \u2028x", "plain \\d"]
)
def test_a_text_that_looks_like_a_reference_is_a_text_for_whoever_reads_it(tmp_path: Path, text: str) -> None:
    changed = {"slurm": {"setup": [text]}, "inference": {"vllm": {"x": {"y": text, "z": None}}}}
    experiment = Experiment.model_validate({**TREE, "sft": {}, **changed})
    write_snapshot(experiment, tmp_path, ["rl"])
    assert load_run(tmp_path) == experiment
    argv = role_files(tmp_path, "trainer", "orchestrator", "inference")
    assert load_experiment(argv, "rl", {}).experiment == experiment
    assert load_experiment([str(tmp_path / "run.yaml")], "submit", {}).experiment == experiment
    (tmp_path / "stated.yaml").write_text(stated_text(experiment))
    assert load_experiment([str(tmp_path / "stated.yaml")], "submit", {}).experiment == experiment


def test_a_snapshot_of_before_is_read_as_it_was_meant(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("slurm: {setup: ['export X=${HOME}/a']}\n")
    assert load_run(tmp_path).slurm.setup == ["export X=${HOME}/a"]


def test_three_role_files_are_the_whole_of_an_rl_run(tmp_path: Path) -> None:
    experiment = Experiment.model_validate({**TREE, "sft": {}})
    write_snapshot(experiment, tmp_path, ["rl"])
    argv = role_files(tmp_path, "trainer", "orchestrator", "inference")
    assert load_experiment(argv, "rl", {}).experiment == experiment


def test_a_section_that_is_off_has_no_file(tmp_path: Path) -> None:
    write_snapshot(Experiment.model_validate(TREE), tmp_path, ["rl"])
    assert (tmp_path / "configs" / "inference.toml").exists()
    write_snapshot(Experiment.model_validate({**TREE, "inference": None}), tmp_path, ["rl"])
    assert not (tmp_path / "configs" / "inference.toml").exists()


def test_lock_holds_what_made_the_run_and_no_secret(tmp_path: Path) -> None:
    experiment = Experiment.model_validate({**TREE, "inference": {"api_key": "hush-hush"}})
    command = ["rl", "--inference.api-key", "hush-hush", "--inference.api_key=hush-hush", "--seed", "3"]
    write_snapshot(experiment, tmp_path, command)
    text = (tmp_path / "lock.json").read_text()
    lock = json.loads(text)
    assert "hush-hush" not in text
    assert lock["command"] == ["rl", "--inference.api-key", "***", "--inference.api_key=***", "--seed", "3"]
    assert lock["packages"]["pydantic"] and lock["python"] and lock["host"] and lock["time"].endswith("+00:00")
    for name in ("run.yaml", "configs/inference.toml"):
        assert "hush-hush" not in (tmp_path / name).read_text()
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "secrets" / "inference.api_key").stat().st_mode) == 0o600
    assert load_run(tmp_path) == experiment


def test_lock_knows_a_package_whose_authors_name_is_no_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old-1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: old\nVersion: 1.0\nAuthor: Andr\xe9\n".encode("latin-1")
    (tmp_path / "old-1.0.dist-info" / "METADATA").write_bytes(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    assert snapshot.gather_lock(["rl"])["packages"]["old"] == "1.0"


def test_lock_has_the_packages_of_the_engines_own_environment(tmp_path: Path) -> None:
    """Read in its folders: nobody starts its interpreter, which is none here."""
    there = tmp_path / "engines" / "lib" / "python3.12" / "site-packages" / "vllm-0.11.0.dist-info"
    there.mkdir(parents=True)
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.11.0\n")
    judge = {"model": "a/judge", "python": "/no/python"}
    tree = {**TREE, "inference": {"python": str(tmp_path / "engines/bin/python")}, "judge_inference": judge}
    folder = tmp_path / "sweep"
    folder.mkdir()
    shared = snapshot.share(["sweep"], folder)
    write_snapshot(Experiment.model_validate(TREE), folder / "0", [], shared)
    write_snapshot(Experiment.model_validate(tree), folder / "1", [], shared)
    plain, own = (json.loads((folder / name / "lock.json").read_text()) for name in "01")
    assert own == plain | {"engines": own["engines"]} and (folder / "0" / "lock.json").samefile(folder / "lock.json")
    assert own["engines"]["inference"]["packages"] == {"vllm": "0.11.0"}
    assert own["engines"]["inference"]["python"] == "3.12"
    assert own["engines"]["judge_inference"] == {"executable": "/no/python", "python": None, "packages": {}}


def test_lock_names_the_commit_of_a_checkout_that_is_another_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image's, which has no settings of git's, or a shared installation's."""
    author = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], [*author, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    (tmp_path / ".git" / "config").unlink()
    (tmp_path / "new.py").touch()
    monkeypatch.setattr(snapshot, "__file__", str(tmp_path / "prime_hpc" / "config" / "snapshot.py"))
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    git = snapshot.gather_lock(["rl"])["git"]
    assert re.fullmatch("[0-9a-f]{40}", git["sha"])
    assert (git["status"], git["diff"]) == (["?? new.py"], "")


def test_nothing_temporary_stays(tmp_path: Path) -> None:
    write_snapshot(Experiment(), tmp_path, [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["configs", "lock.json", "run.yaml"]
    assert not list(tmp_path.rglob(".*"))


def test_load_run_of_nothing_and_of_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is .* a run directory"):
        load_run(tmp_path)
    (tmp_path / "run.yaml").write_text("seed: 1\nmax_steps: x\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:2: max_steps: expected an integer"):
        load_run(tmp_path)
    (tmp_path / "run.yaml").write_text("seed: 1\nold_key: x\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:2: old_key"):
        load_run(tmp_path)


def test_a_role_started_by_hand_reads_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "roles" / "trainer"
    write_snapshot(Experiment(seed=1), tmp_path, [])
    write_snapshot(Experiment(seed=2), own, [])
    monkeypatch.setenv(RUN_YAML_VARIABLE, str(own / "run.yaml"))
    assert load_run(tmp_path).seed == 2
    monkeypatch.delenv(RUN_YAML_VARIABLE)
    assert load_run(tmp_path).seed == 1
