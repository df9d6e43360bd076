"""What lint says of images: models that see none, what takes text alone, rows that hold images."""

import json
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import Experiment
from prime_hpc.config.site import GENERIC
from prime_hpc.launch.lint.lint import Finding, lint

VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        **dict.fromkeys(("hidden_size", "intermediate_size"), 64),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 4),
        "vocab_size": 512,
    },
    "vision_config": {"model_type": "qwen3_vl", "depth": 2, "hidden_size": 32, "intermediate_size": 64},
}
TEXT = {**VL["text_config"], "model_type": "qwen3"}


def findings(folder: Path, config: dict[str, Any], *, processor: bool = True, **tree: Any) -> list[Finding]:
    """What lint says of images, of a run with this model."""
    (folder / "config.json").write_text(json.dumps(config))
    if processor:
        (folder / "preprocessor_config.json").write_text("{}")
    tree["model"] = {"name": str(folder), **tree.get("model", {})}
    return [f for f in lint(Experiment.model_validate({"name": "x", **tree}), GENERIC) if f.code == "PH129"]


def test_a_model_and_the_key_fit_each_other(tmp_path: Path) -> None:
    for vision in ("frozen", "trained"):
        assert findings(tmp_path, VL, model={"vision": vision}) == []
        (said,) = findings(tmp_path, TEXT, model={"vision": vision})
        assert said.severity == "error" and said.key == "model.name" and f"model.vision = {vision}" in said.message
        (said,) = findings(tmp_path, VL | {"model_type": "gemma3"}, model={"vision": vision})
        assert "both ways" in said.message
    (said,) = findings(tmp_path, VL)
    assert "set model.vision to frozen" in said.message
    assert findings(tmp_path, TEXT) == [] == findings(tmp_path, VL | {"model_type": "qwen3_5"})
    assert findings(tmp_path, VL, model={"vision": "frozen", "lora": {}}) == []


def test_a_model_whose_config_says_all_of_its_text_beside_the_tower(tmp_path: Path) -> None:
    """As the hub has Qwen2.5-VL's."""
    flat = {**VL["text_config"], "model_type": "qwen2_5_vl", "vision_config": VL["vision_config"]}
    assert findings(tmp_path, flat, model={"vision": "trained"}) == []
    (said,) = findings(tmp_path, flat)
    assert "set model.vision to frozen" in said.message


def test_a_model_without_an_image_processor(tmp_path: Path) -> None:
    (said,) = findings(tmp_path, VL, processor=False, model={"vision": "frozen"})
    assert "preprocessor_config.json" in said.message


@pytest.mark.parametrize(
    ("key", "tree"),
    [
        ("trainer.parallel.cp", {"trainer": {"num_ranks": 2, "parallel": {"cp": 2}}}),
        ("trainer.parallel.tp", {"trainer": {"num_ranks": 2, "parallel": {"tp": 2}}}),
        ("trainer.max_concurrent_runs", {"trainer": {"max_concurrent_runs": 2}, "model": {"lora": {}}}),
        ("orchestrator.advantage.type", {"orchestrator": {"advantage": {"type": "opsd", "demonstration": "answer"}}}),
    ],
)
def test_what_takes_text_alone_is_named(tmp_path: Path, key: str, tree: dict[str, Any]) -> None:
    assert findings(tmp_path, VL | {"model_type": "qwen3_5"}, **tree) == []
    (said,) = findings(tmp_path, VL, **tree | {"model": {**tree.get("model", {}), "vision": "frozen"}})
    assert (said.key, said.severity) == (key, "error") and "model.vision" in said.message


FILM = {"prompt": "<video>What?", "videos": ["a.mp4"]}
PICTURE = {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}


@pytest.mark.parametrize(("row", "vision"), [(FILM, None), (FILM, "frozen"), (PICTURE, None)])
def test_prompts_that_show_what_the_model_does_not_see(tmp_path: Path, row: dict[str, Any], vision: str | None) -> None:
    rows = tmp_path / "rows.jsonl"
    tree: dict[str, Any] = {
        "model": {"vision": vision},
        "orchestrator": {"env": [{"id": "rows", "args": {"files": str(rows), "reward": "exact"}}]},
    }
    beside = {"prompt": "a", "messages": [{"role": "user", "content": [{"type": "thinking"}]}, {"role": "assistant"}]}
    for shown, count in ((row, 1), (PICTURE if vision else {"prompt": "<video>", "videos": []}, 0), (beside, 0)):
        rows.write_text(json.dumps({**shown, "answer": "1"}))
        found = findings(tmp_path, VL if vision else TEXT, **tree)
        assert [(f.key, f.severity) for f in found] == [("orchestrator.env.0.args.files", "error")] * count
        assert all(str(rows) in f.message for f in found)


@pytest.mark.parametrize("row", [PICTURE, {"prompt": "<image>What?", "image": "a.png"}])
@pytest.mark.parametrize("kind", ["eval", "synthesize"])
def test_prompts_of_a_run_without_a_trainer(tmp_path: Path, kind: str, row: dict[str, Any]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "answer": "1"}))
    played: dict[str, Any] = {"env": [{"id": "prompts", "args": {"files": str(tmp_path / "rows.jsonl")}}]}
    tree: dict[str, Any] = {"kind": kind, kind: played}
    (found,) = findings(tmp_path, TEXT, **tree)
    assert (found.key, found.severity) == (f"{kind}.env.0.args.files", "error")
    of_an_api: dict[str, Any] = {"kind": kind, kind: played | {"client": {"base_url": "http://api/v1"}}}
    assert not findings(tmp_path, TEXT, **of_an_api)
    played["env"][0]["args"] |= {"prompt": ["question"], "images": ["picture"]}  # for the environment to refuse
    assert len(findings(tmp_path, TEXT, **tree)) == 1


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
        {"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": "a.png"}]}], "completion": "a"},
        {"prompt": "<image>", "completion": "a", "images": ["a.png"]},
    ],
)
def test_rows_with_images_for_a_run_of_text(tmp_path: Path, row: dict[str, Any]) -> None:
    rows = tmp_path / "rows.jsonl"
    tree: dict[str, Any] = {"kind": "sft", "sft": {"data": {"path": str(rows)}}}
    rows.write_text(json.dumps(row))
    (said,) = findings(tmp_path, TEXT, **tree)
    assert (said.key, said.severity) == ("sft.data.path", "warning") and "model.vision" in said.remedy
    assert findings(tmp_path, VL, model={"vision": "frozen"}, **tree) == []
    rows.write_text(json.dumps({"prompt": "a", "completion": "b", "images": []}))
    assert findings(tmp_path, TEXT, **tree) == []
