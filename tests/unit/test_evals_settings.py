"""What an evaluation's directory records of how its episodes were played, and refuses of what is otherwise."""

import json
from pathlib import Path

import pytest

from prime_hpc.config import ConfigError
from prime_hpc.config.absolute import from_the_root
from prime_hpc.evals.episodes import results_file
from prime_hpc.evals.settings import is_of, record, refuse_others, settings_of
from tests.unit.test_evals import experiment


def test_other_settings_are_refused_with_file_and_key(tmp_path: Path) -> None:
    record(experiment("--sampling.max-tokens", "20"), tmp_path)
    refuse_others(experiment("--sampling.max-tokens", "20", "--num-examples", "5", "--pass-threshold", "0.5"), tmp_path)
    refuse_others(experiment("--sampling.max-tokens", "20", "--benchmarks", "reverse-text,calculator"), tmp_path)
    for argv, key in (
        (["--sampling.max-tokens", "30"], "eval.sampling"),
        (["--sampling.max-tokens", "20", "--seed", "1"], "seed"),
        (["--sampling.max-tokens", "20", "--model.name", "other"], "model.name"),
        (["--sampling.max-tokens", "20", "--client.port", "1"], "model.dtype"),
    ):
        with pytest.raises(ConfigError) as refused:
            refuse_others(experiment(*argv), tmp_path)
        said = refused.value.render()
        assert key in said and "settings.json" in said and "--clean" in said
    results_file(tmp_path).write_text("{}\n")
    (tmp_path / "results" / "settings.json").unlink()
    with pytest.raises(ConfigError, match="without settings.json"):
        refuse_others(experiment(), tmp_path)


def test_the_weights_themselves_are_part_of_the_settings(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"a" * 100)
    before = settings_of(experiment("--model.name", str(model)))
    (model / "model.safetensors").write_bytes(b"b" * 100)
    assert settings_of(experiment("--model.name", str(model))) != before


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_chat_template_is_part_of_the_settings_where_prompts_are_made_of_it(tmp_path: Path, file: str) -> None:
    """Unless the directory was begun before it was recorded, or versions bring their own."""
    model, run_dir = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    argv = ["--model.name", str(model)]
    record(experiment(*argv), run_dir)
    (model / file).write_text('{"chat_template": "a"}')
    refuse_others(experiment(*argv), run_dir)
    record(experiment(*argv), run_dir)
    refuse_others(experiment(*argv), run_dir)
    (model / file).write_text('{"chat_template": "b"}')
    with pytest.raises(ConfigError, match=r"model\.name \(its chat template\)"):
        refuse_others(experiment(*argv), run_dir)
    for more in (["--model.renderer", "qwen3"], ["--weights-dir", str(tmp_path)]):
        assert "model.name (its chat template)" not in settings_of(experiment(*argv, *more))


def test_what_is_in_files_of_rows_is_part_of_the_settings(tmp_path: Path) -> None:
    """Task 0 of other rows is another task: its episodes would stand as this one's."""
    rows, reward = tmp_path / "rows.jsonl", tmp_path / "own.py"
    env = {"id": "rows", "args": {"files": [str(rows)], "reward": f"{reward}:f"}}
    for file in (rows, reward):
        rows.write_text('{"prompt": "2 + 2"}\n')
        reward.write_text("def f(reply):\n    return 1.0\n")
        run_dir = tmp_path / file.stem
        record(experiment("--env", json.dumps([env])), run_dir)
        refuse_others(experiment("--env", json.dumps([env])), run_dir)
        file.write_text(file.read_text() + "\n")
        with pytest.raises(ConfigError, match=r"eval\.env\.rows \(contents of its files\)"):
            refuse_others(experiment("--env", json.dumps([env])), run_dir)
        *_, first, second = settings_of(experiment("--env", json.dumps([env])))
        assert is_of(first, ["rows"], None) and is_of(second, ["rows"], None) and not is_of(second, ["other"], None)
    (tmp_path / "none.jsonl").touch()  # a shard of none, among others
    env["args"] = {"files": [str(rows), str(tmp_path / "none.jsonl")]}
    assert record(experiment("--env", json.dumps([env])), tmp_path / "shards")


def test_a_model_is_the_same_by_a_path_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    record(from_the_root(experiment("--model.name", "model")), tmp_path)  # as its role reads the snapshot
    refuse_others(experiment("--model.name", "model"), tmp_path)
    with pytest.raises(ConfigError, match=r"model\.name"):
        refuse_others(experiment("--model.name", "a-model-of-the-hub"), tmp_path)


def test_versions_of_a_run_that_was_begun_anew_are_others(tmp_path: Path) -> None:
    """Of the same directory and number. Others may join, and those that are not asked for may be gone."""
    argv = ["--weights-dir", str(tmp_path / "weights"), "--steps"]
    for step, content in ((10, b"a" * 100), (20, b"b" * 100)):
        folder = tmp_path / "weights" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(content)
    record(experiment(*argv, "10"), tmp_path)
    refuse_others(experiment(*argv, "10,20"), tmp_path)
    record(experiment(*argv, "10,20"), tmp_path)
    (tmp_path / "weights" / "step_000010" / "model.safetensors").write_bytes(b"c" * 100)
    refuse_others(experiment(*argv, "20"), tmp_path)
    with pytest.raises(ConfigError, match=r"eval\.weights_dir, step 10"):
        refuse_others(experiment(*argv, "10,20"), tmp_path)


def test_a_version_whose_manifest_cannot_be_read_is_no_other_one(tmp_path: Path) -> None:
    """What a file system fails to show for a moment must not stand for other weights."""
    folder = tmp_path / "weights" / "step_000010"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"a" * 100)
    (folder / "manifest.json").write_bytes(b"{")
    with pytest.raises(ConfigError, match=r"step_000010: its weights cannot be told"):
        settings_of(experiment("--weights-dir", str(tmp_path / "weights"), "--steps", "10"))
