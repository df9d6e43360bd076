"""`model.trust_remote_code`: code that ships with a model runs in the trainer and its data only where it is trusted."""

import json
from pathlib import Path

import pytest

from prime_hpc.config import Experiment
from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.store.dataset.files import find_data
from prime_hpc.trainer.data.workers import Recipe
from prime_hpc.trainer.model.load_policy import _build_empty
from tests.support.tiny_model import make_tiny_model

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Path({ran!r}).touch()


class OwnConfig(Qwen3Config):
    pass


class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model with a configuration, a model and a tokenizer of its own, which leaves `tmp_path/ran` when it runs."""
    folder = make_tiny_model(tmp_path / "model")
    (folder / "own_code.py").write_text(CODE.format(ran=str(tmp_path / "ran")))
    maps = {
        "config.json": {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"},
        "tokenizer_config.json": {"AutoTokenizer": [None, "own_code.OwnTokenizer"]},
    }
    for name, found in maps.items():
        tree = json.loads((folder / name).read_text())
        tree |= {"auto_map": found}
        if name == "tokenizer_config.json":
            tree["tokenizer_class"] = "OwnTokenizer"
        (folder / name).write_text(json.dumps(tree))
    return folder


@pytest.mark.parametrize("trusted", [False, True])
def test_the_trainer_builds_the_models_own_class_only_where_it_is_trusted(
    model: Path, tmp_path: Path, trusted: bool
) -> None:
    hf, _ = _build_empty(model, ModelConfig(name=str(model), trust_remote_code=trusted))
    assert type(hf).__name__ == ("OwnModel" if trusted else "Qwen3ForCausalLM")
    assert (tmp_path / "ran").exists() is trusted


@pytest.mark.parametrize("trusted", [False, True])
def test_rows_are_tokenised_by_the_models_own_class_only_where_it_is_trusted(
    model: Path, tmp_path: Path, trusted: bool
) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    tree = {"kind": "sft", "sft": {"data": {"path": str(tmp_path / "data.jsonl")}}}
    config = Experiment.model_validate(tree).sft.data
    recipe = Recipe(config, config, find_data(config), tmp_path / "cache", model, trusted, False, 64, 512)
    own = recipe.load_tokenizer()
    assert (type(own._tokenizer).__name__ == "OwnTokenizer") is trusted
    assert (tmp_path / "ran").exists() is trusted
