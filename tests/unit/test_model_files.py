"""Quantised weights, and weights that are not their config's, are refused before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from prime_hpc.config import ConfigError, Experiment, Loaded
from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.config.site import GENERIC
from prime_hpc.launch.checks import check
from prime_hpc.launch.lint.lint import lint
from prime_hpc.store.model.files import other_vocabulary, quantised, read_header, stored_tensors, without_head
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.parallel import build_parallel
from tests.support.tiny_families import VOCAB, make_family


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_family(tmp_path / "model", "qwen3")


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match=r"model\.name = ") as caught:
        load_policy(
            ModelConfig(name=str(folder), dtype="float32"),
            folder,
            build_parallel(ParallelDims(), "cpu"),
            torch.device("cpu"),
            reshard_after_forward=True,
            chunk_tokens=64,
        )
    return str(caught.value)


def linted(folder: Path) -> list[str]:
    one = Experiment.model_validate({"model": {"name": str(folder)}, "orchestrator": {"env": [{"id": "reverse-text"}]}})
    return [f.message for f in lint(one, GENERIC) if f.code == "PH118"]


def test_a_config_that_says_it_is_quantised(group: None, model: Path) -> None:
    assert linted(model) == []
    edit_config(model, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    for message in (refusal(model), *linted(model)):
        assert "config.json has quantization_config (quant_method fp8): a quantised checkpoint" in message
        assert "bfloat16 original" in message
    assert len(linted(model)) == 1


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.layers.0.mlp.up_proj.weight", torch.ones(4, 4).to(torch.float8_e4m3fn)),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", torch.ones(1, 1)),
        ("model.layers.0.mlp.up_proj.qweight", torch.ones(4, 4, dtype=torch.int32)),
        ("model.layers.0.mlp.up_proj.weight", torch.ones(4, 4, dtype=torch.int8)),
        ("model.layers.0.mlp.experts.down_proj_blocks", torch.ones(4, 4, dtype=torch.uint8)),
    ],
    ids=["float8", "scales", "gptq", "int8", "mxfp4"],
)
def test_quantised_tensors_without_a_word_in_the_config(
    group: None, model: Path, name: str, tensor: torch.Tensor
) -> None:
    save_file({name: tensor}, model / "extra.safetensors")
    weight_map = {n: t.file.name for n, t in stored_tensors(model).items()} | {name: "extra.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for message in (refusal(model), *linted(model)):
        assert f"extra.safetensors holds {name}" in message
    assert len(linted(model)) == 1


def test_masks_and_counters_are_not_quantised(tmp_path: Path) -> None:
    tensors = {
        "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "h.0.position_ids": torch.arange(4)[None],
        "h.0.scale": torch.ones(3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert quantised(tmp_path, stored_tensors(tmp_path)) is None


def test_weights_that_broke_off_are_said_before_the_queue(group: None, model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for message in (refusal(model), *linted(model)):
        assert "model.safetensors is no readable safetensors file (it ends after" in message
    assert len(linted(model)) == 1


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "tiny-Q4_K_M.gguf"])
def test_weights_of_another_format_are_said_before_the_queue(group: None, model: Path, name: str) -> None:
    (model / "training_args.bin").write_bytes(b"no weights")
    assert linted(model) == []
    (model / "model.safetensors").unlink()
    assert linted(model) == []  # a config alone: to plan with
    (model / name).write_bytes(b"weights")
    assert "holds no safetensors" in refusal(model)
    (said,) = linted(model)
    assert f"holds {name} and no safetensors" in said and "save_pretrained" in said
    (model / "model.safetensors.index.json").write_text("{")
    (said,) = linted(model)
    assert "index.json is no index of safetensors files" in said


@pytest.mark.parametrize(
    "fields",
    [{"pad_token_id": 10**6}, {"hidden_act": "mystery"}, {"num_attention_heads": 3, "head_dim": None}],
    ids=["padding", "activation", "heads"],
)
def test_a_config_of_which_no_model_can_be_built(group: None, model: Path, fields: dict[str, Any]) -> None:
    edit_config(model, **fields)
    assert "no model can be built from" in refusal(model)


def test_another_vocabulary(group: None, model: Path) -> None:
    edit_config(model, vocab_size=VOCAB + 12)
    for message in (refusal(model), *linted(model)):
        assert (
            f"vocab_size = {VOCAB + 12}, but model.embed_tokens.weight in model.safetensors has {VOCAB} rows" in message
        )
    assert len(linted(model)) == 1
    edit_config(model, vocab_size=3, text_config={"vocab_size": VOCAB})
    assert other_vocabulary(model, stored_tensors(model)) is None


def test_an_output_head_that_is_nowhere(group: None, model: Path) -> None:
    """vLLM was ready with one of whatever was in memory."""
    tensors = {n: t for n, t in load_file(model / "model.safetensors").items() if n != "lm_head.weight"}
    save_file(tensors, model / "model.safetensors")
    edit_config(model, tie_word_embeddings=False)
    played = {"kind": "eval", "model": {"name": str(model)}, "inference": {}, "eval": {"environment_ids": ["wordle"]}}
    with pytest.raises(ConfigError) as caught:
        check(Loaded(Experiment.model_validate(played), {}, [], "eval"))
    for message in (refusal(model), *linted(model), str(caught.value)):
        assert "config.json says tie_word_embeddings = false, and no file holds an output head" in message
    assert len(linted(model)) == 1
    edit_config(model, tie_word_embeddings=True)
    assert without_head(model, stored_tensors(model)) is None
    edit_config(model, tie_word_embeddings=False)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, model / "model.safetensors")
    assert linted(model) == []


def test_files_that_are_no_safetensors(tmp_path: Path) -> None:
    assert stored_tensors(tmp_path) == {}
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match=r"model\.safetensors is no readable safetensors file"):
        read_header(tmp_path / "model.safetensors")
    save_file({"a": torch.ones(100)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    for content, said in (
        (whole[:-1], f"it ends after {len(whole) - 1} of {len(whole)} bytes"),
        (whole[:30], "JSONDecodeError"),
        (b"", "buffer of 8 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=rf"model\.safetensors is no readable .*{said}"):
            read_header(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ValueError, match=r"index\.json is no index"):
        stored_tensors(tmp_path)
