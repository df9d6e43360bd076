"""`prime-hpc fetch`: what an experiment needs, what of it is there, and what a hub over real HTTP brings."""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from prime_hpc.cli import main
from prime_hpc.config import Experiment
from prime_hpc.config.site import GENERIC
from prime_hpc.launch.fetch import fetch, presence
from prime_hpc.launch.fetch.download import is_loaded
from prime_hpc.launch.fetch.named_datasets import NamedDataset, datasets_named_in
from prime_hpc.launch.fetch.needs import Need
from prime_hpc.launch.fetch.presence import datasets_cache
from tests.support.hub_server import serving

SHARD = bytes(range(256)) * 4096
POLICY = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    ).encode(),
    "model-00001-of-00002.safetensors": SHARD,
    "model-00002-of-00002.safetensors": SHARD[::-1],
    "pytorch_model.bin": b"not loaded",
    "README.md": b"not loaded",
    "onnx/model.safetensors": b"not loaded",
}
TEACHER = {"config.json": b"{}", "tokenizer.model": b"t", "model.safetensors": b"weights"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HF_HOME of the test alone; the hub's clients are told to stay off the network, which the verb does not heed."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    return tmp_path / "hf"


def write(folder: Path, **tree: Any) -> str:
    whole = {
        "name": "fetched",
        "launch": "local",
        "output_dir": str(folder / "outputs"),
        "orchestrator": {"env": [{"id": "reverse-text"}]},
        **tree,
    }
    path = folder / "exp.yaml"
    path.write_text(yaml.safe_dump(whole))
    return str(path)


def ask(capsys: pytest.CaptureFixture, *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["fetch", *words, "--json"])
    answer = json.loads(capsys.readouterr().out)
    return code, {row["name"]: row for row in answer["needs"]} | {"notes": answer["notes"]}


def test_a_broken_download_goes_on_and_a_whole_one_is_left_alone(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    exp = write(
        tmp_path,
        model={"name": "owner/policy"},
        trainer={"loss": {"kl": {"model": "owner/reference"}}},
    )
    code, before = ask(capsys, exp, "--check")
    assert code == 1 and before["owner/policy"]["lacks"] == ["all of it"] and not home.exists()
    with serving({"owner/policy": POLICY, "owner/reference": TEACHER}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.break_off = "model-00002-of-00002.safetensors"
        code, broken = ask(capsys, exp)
        assert code == 1 and broken["owner/policy"]["lacks"] == ["1 of 2 files of weights"]
        assert broken["owner/policy"]["problem"] and broken["owner/reference"]["fetched"]
        hub.break_off, hub.sent = None, []
        code, after = ask(capsys, exp)
        assert code == 0 and after["owner/policy"]["fetched"] and not after["owner/reference"]["fetched"]
        assert [file for file, _ in hub.sent] == ["model-00002-of-00002.safetensors"]
        hub.sent = []
        assert ask(capsys, exp)[0] == 0 and hub.sent == []
    files = {path.name: path.read_bytes() for path in Path(after["owner/policy"]["path"]).iterdir()}
    assert files == {name: content for name, content in POLICY.items() if content != b"not loaded"}
    assert after["owner/policy"]["bytes"] == sum(map(len, files.values()))
    assert ask(capsys, exp, "--check")[0] == 0  # with no hub there


def test_of_a_teacher_that_others_serve_the_tokenizer_is_fetched_and_no_weights(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The orchestrator reads it on a node without a network."""
    teacher = {"model": "owner/teacher", "base_url": "http://node:8000/v1"}
    distilled: dict[str, Any] = {
        "trainer": {"loss": {"type": "reinforce"}},
        "orchestrator": {"env": [{"id": "reverse-text"}], "advantage": {"type": "opd"}, "teacher": teacher},
    }
    assert (
        "owner/teacher" not in ask(capsys, write(tmp_path, model={"name": "owner/policy"}, **distilled), "--check")[1]
    )
    distilled["orchestrator"]["teacher"] = {**teacher, "tokenizer": "own"}
    exp = write(tmp_path, model={"name": "owner/policy"}, **distilled)
    code, before = ask(capsys, exp, "--check")
    assert code == 1 and before["owner/teacher"]["lacks"] == ["a tokenizer"]
    with serving({"owner/policy": POLICY, "owner/teacher": {**POLICY, "tokenizer.model": b"t"}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        code, after = ask(capsys, exp)
    files = {path.name for path in Path(after["owner/teacher"]["path"]).iterdir()}
    assert code == 0 and files == {"config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"}
    assert ask(capsys, exp, "--check")[0] == 0
    distilled["orchestrator"]["teacher"].pop("base_url")
    whole = write(tmp_path, model={"name": "owner/policy"}, teacher_inference={}, **distilled)
    assert ask(capsys, whole, "--check")[1]["owner/teacher"]["lacks"] == ["weights (*.safetensors)"]
    local = tmp_path / "tokenizer"
    local.mkdir()
    (local / "tokenizer.json").write_text("{}")
    distilled["orchestrator"]["teacher"] = {**teacher, "model": str(local), "tokenizer": "own"}
    assert ask(capsys, write(tmp_path, model={"name": "owner/policy"}, **distilled), "--check")[0] == 0


def test_two_splits_of_one_data_set_are_told_apart(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(need: Need, environ: Mapping[str, str]) -> str:
        if need.split == "test":
            return "no network"
        folder = datasets_cache(environ) / "owner___rows" / "default" / "0.0.0" / "abc"
        folder.mkdir(parents=True)
        (folder / "dataset_info.json").write_text('{"splits": {"train": {}}}')
        return ""

    monkeypatch.setattr(fetch, "_download", download)
    rows = {"data": {"name": "owner/rows"}, "eval": {"split": "test"}}
    one = Experiment.model_validate({"name": "x", "kind": "sft", "model": {"name": str(tmp_path)}, "sft": rows})
    done = fetch.fetch_all(one, GENERIC, into=tmp_path / "other")
    told = [(row["split"], row["fetched"], row["problem"]) for row in done.as_dict()["needs"][1:]]
    assert told == [("train", True, ""), ("test", False, "no network")]
    assert done.notes[0].startswith(f"the job looks in {home / 'hub'} and {home / 'datasets'}: ")


def test_what_the_hub_does_not_have_is_said(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    exp = write(tmp_path, model={"name": "owner/bin-only"})
    elsewhere = tmp_path / "other"
    with serving({"owner/bin-only": {"config.json": b"{}", "tokenizer.json": b"{}", "pytorch_model.bin": b"x"}}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        code, answer = ask(capsys, exp, "--into", str(elsewhere))
    assert code == 1 and "no weights (*.safetensors)" in answer["owner/bin-only"]["problem"]
    assert f"slurm.env.HF_HOME: {elsewhere}" in answer["notes"][0] and not home.exists()
    assert Path(answer["owner/bin-only"]["path"]).is_relative_to(elsewhere)


def test_a_place_that_cannot_be_read_is_said(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A share that is away, or another user's directory (root would read that)."""
    model = tmp_path / "model"
    model.mkdir()

    def refuse(folder: Path) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(presence, "folder_bytes", refuse)
    code, answer = ask(capsys, write(tmp_path, model={"name": str(model)}), "--check")
    assert code == 1 and answer[str(model)]["path"] == str(model)
    assert answer[str(model)]["lacks"] == ["it cannot be read (Permission denied)"]


def test_what_cannot_be_fetched_is_said_with_what_to_do(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes(b"{}")
    envs = [{"id": "owner/no-such-env@0.1"}, {"id": "gsm8k"}, {"id": "humaneval", "args": {"data": str(tmp_path)}}]
    exp = write(tmp_path, model={"name": str(model)}, orchestrator={"env": envs})
    assert main(["fetch", exp, "--check"]) == 1
    said = capsys.readouterr().out
    assert "a tokenizer" in said and "prime env install owner/no-such-env@0.1" in said and "its package" in said
    assert f"all of it in {tmp_path}/cache/prime-hpc/benchmarks/gsm8k.jsonl" in said
    (model / "tokenizer.json").write_text("{}")
    rows = tmp_path / "cache" / "prime-hpc" / "benchmarks" / "gsm8k.jsonl"
    rows.parent.mkdir(parents=True)
    rows.write_text("{}\n")
    exp = write(tmp_path, model={"name": str(model)}, orchestrator={"env": [{"id": "gsm8k"}]})
    assert main(["fetch", exp]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["there", "there"]


def test_rows_of_supervised_fine_tuning(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_bytes(b"{}")
    tree = {"kind": "sft", "model": {"name": str(model)}, "orchestrator": {}}
    exp = write(tmp_path, **tree, sft={"data": {"name": "Owner/Some-Rows", "split": "train"}})
    code, answer = ask(capsys, exp, "--check")
    assert code == 1 and answer["Owner/Some-Rows"]["lacks"] == ["all of it"]
    prepared = home / "datasets" / "Owner___some-rows" / "default" / "0.0.0" / "abc"
    prepared.mkdir(parents=True)
    (prepared / "dataset_info.json").write_text(json.dumps({"splits": {"test": {}}}))
    assert ask(capsys, exp, "--check")[1]["Owner/Some-Rows"]["lacks"] == ["split train"]
    (prepared / "dataset_info.json").write_text(json.dumps({"splits": {"test": {}, "train": {}}}))
    assert ask(capsys, exp, "--check")[0] == 0
    exp = write(tmp_path, **tree, sft={"data": {"path": str(tmp_path / "none.jsonl")}})
    code, answer = ask(capsys, exp)
    assert code == 1 and answer[str(tmp_path / "none.jsonl")]["can_fetch"] is False


def test_files_that_nobody_loads() -> None:
    assert all(is_loaded(name) for name, content in POLICY.items() if content != b"not loaded")
    assert not any(
        is_loaded(n) for n in ("pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors")
    )


def test_data_sets_that_a_source_names(tmp_path: Path) -> None:
    source = tmp_path / "env.py"
    source.write_text(
        "from datasets import load_dataset\n"
        "NAME = 'a/constant'\n"
        "class Config:\n    rows: str = 'b/field'\n"
        "def load_environment(name='c/default', *, split='train', path='x.jsonl'):\n"
        "    load_dataset(NAME, 'main', split=split)\n"
        "    load_dataset(self.config.rows)\n"
        "    load_dataset(name, split=f'{split}[:10]')\n"
        "    load_dataset('json', data_files=path)\n"
        "    load_dataset(path)\n"
    )
    assert datasets_named_in([source, tmp_path / "absent.py"], {}) == [
        NamedDataset("a/constant", "main", "train"),
        NamedDataset("b/field", None, None),
        NamedDataset("c/default", None, None),
    ]
    given = datasets_named_in([source], {"name": "d/given", "split": "test"})
    assert given[0].split == "test" and given[2].name == "d/given"
