"""How families train, as a login node knows it; and lint, which says it."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_hpc.config import Experiment
from prime_hpc.config.families import FLOAT32_ALONE, REFUSED, SPLIT, WHOLE, family_of, longrope_scale, rotary_problem
from prime_hpc.config.sections.lora import LoraConfig, last_names
from prime_hpc.config.site import GENERIC
from prime_hpc.launch.checks import linear_modules
from prime_hpc.launch.estimate.model_facts import stored_shapes
from prime_hpc.launch.lint.lint import lint
from prime_hpc.store.model.config import rows_of
from prime_hpc.trainer.lora import add_lora
from tests.support.every_family import CannotBuildError, family_names, tiny_config, tiny_model

RENAMED = ("axk2", "deepseek_v4", "gpt2", "hrm_text", "hy_v4", "openai-gpt")
"""Families whose modules and matrices are named differently."""
SAMPLE = {*RENAMED, "qwen3", "qwen3_moe", "granitemoe", "falcon", "opt", "gpt_bigcode", "nemotron_h"}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({"model_type": "qwen3"}, "packed"),
        ({"model_type": "nobody_knows_it"}, "packed"),
        ({"model_type": "nobody_knows_it", "layer_types": ["linear_attention", "full_attention"]}, "single"),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}, "single"),
        ({"model_type": "unknown_vl", "text_config": {"layer_types": ["conv", "full_attention"]}}, "single"),
        ({"model_type": "mamba2"}, "single"),
        ({"model_type": "bloom"}, "single"),
        ({"model_type": "deepseek_v3"}, "packed"),
        ({"model_type": "bert"}, "refused"),
        *(({"model_type": name}, "refused") for name in ("dory", "lara_mini", "sarvam_moe")),  # transformers 5.24's
        ({"model_type": "doge", "is_moe": True}, "refused"),
        ({"model_type": "nobody_knows_it", "is_encoder_decoder": True}, "refused"),
    ],
)
def test_family_of_a_config(config: dict[str, Any], rows: str) -> None:
    family = family_of(config)
    assert family.rows == rows
    assert bool(family.reason) == (rows != "packed")
    assert bool(family.refusal) == (rows == "refused")


@pytest.mark.parametrize("family", sorted(FLOAT32_ALONE))
def test_families_whose_code_mixes_dtypes_are_refused_in_bfloat16(family: str, tmp_path: Path) -> None:
    tiny_model(tiny_config(family)).save_pretrained(tmp_path / "m")
    found = {}
    for dtype in ("float32", "bfloat16"):
        model = {"name": str(tmp_path / "m"), "dtype": dtype}
        tree = {"kind": "rl", "model": model, "trainer": {"data": {"fake": {}}}, "output_dir": str(tmp_path)}
        findings = [f for f in lint(Experiment.model_validate(tree), GENERIC) if f.key == "model.dtype"]
        found[dtype] = [f"{f.code} {f.severity} {f.message}" for f in findings]
    assert not found["float32"]
    assert len(found["bfloat16"]) == 1 and "PH108 error" in found["bfloat16"][0] and family in found["bfloat16"][0]


def test_only_models_with_attention_of_their_own_keep_it() -> None:
    assert family_of({"model_type": "bloom"}).custom_attention
    assert not family_of({"model_type": "lfm2"}).custom_attention


def longrope(**changes: Any) -> dict[str, Any]:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096, **changes}
    return LLAMA | {"max_position_embeddings": 131072, "rope_parameters": rope}


def test_rotary_embeddings_that_the_engines_do_not_share() -> None:
    assert rotary_problem(LLAMA, 10**6) == ""
    assert rotary_problem(longrope(), 100_000) == ""
    assert rotary_problem(longrope(factor=32.0), 100_000) == ""
    assert "attention scale of 2" in rotary_problem(longrope(attention_factor=2.0), 100)
    dynamic = LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}
    assert rotary_problem(dynamic, 4096) == ""
    assert "no positions beyond" in rotary_problem(dynamic, 4097)
    assert longrope_scale(0.5, 4096) == 1.0
    assert longrope_scale(32.0, 4096) == pytest.approx(1.1902380714)  # Phi-3's, sqrt(1 + ln 32 / ln 4096)


def findings(
    folder: Path, config: dict[str, Any], codes: tuple[str, ...] = ("PH119", "PH121"), **tree: Any
) -> list[Any]:
    """What lint says of the family of a model with this config."""
    (folder / "config.json").write_text(json.dumps(config))
    experiment = Experiment.model_validate({"name": "x", "model": {"name": str(folder)}, **tree})
    return [f for f in lint(experiment, GENERIC) if f.code in codes]


def test_lint_says_how_a_family_trains(tmp_path: Path) -> None:
    assert findings(tmp_path, LLAMA) == []
    (said,) = findings(tmp_path, LLAMA | {"model_type": "bert"})
    assert (said.code, said.severity, said.key) == ("PH119", "error", "model.name")
    assert "not a causal language model" in said.message
    (said,) = findings(tmp_path, LLAMA | {"model_type": "lfm2"})
    assert (said.code, said.severity) == ("PH119", "info")
    split = {"num_ranks": 2, "parallel": {"cp": 2}}
    assert [f.key for f in findings(tmp_path, LLAMA | {"model_type": "lfm2"}, trainer=split)] == [
        "trainer.parallel.cp",
        "model.name",
    ]


def test_lint_says_what_becomes_of_the_layout_that_is_asked_for(tmp_path: Path) -> None:
    packed, single = ({"rows": rows} for rows in ("packed", "single"))
    assert findings(tmp_path, LLAMA, trainer=packed) == []
    (said,) = findings(tmp_path, LLAMA, trainer=single)
    assert (said.severity, said.key) == ("info", "trainer.rows") and "packed rows are faster" in said.remedy
    (said,) = findings(tmp_path, LLAMA | {"model_type": "lfm2"}, trainer=packed)
    assert (said.severity, said.key) == ("error", "trainer.rows") and "one sample a row only" in said.message
    with pytest.raises(ValueError, match=r"cp = 2: context-parallel ranks cannot split rows of one sample each"):
        Experiment.model_validate({"trainer": {"rows": "single", "num_ranks": 2, "parallel": {"cp": 2}}})


@pytest.mark.parametrize(
    ("model_type", "choice", "expected"),
    [("lfm2", "auto", "single"), ("llama", "auto", "packed"), ("llama", "single", "single"), (None, "auto", "packed")],
)
def test_the_orchestrator_knows_how_samples_are_laid_out(
    tmp_path: Path, model_type: str | None, choice: str, expected: str
) -> None:
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    tree = {"model": {"name": str(tmp_path)}, "trainer": {"rows": choice}}
    assert rows_of(Experiment.model_validate(tree)) == expected


@pytest.mark.parametrize(
    ("model_type", "severity", "words"),
    [("llama", None, ""), ("gemma2", "error", "cannot be split"), ("nobody_knows_it", "warning", "is proved")],
)
def test_lint_knows_which_families_can_be_split(
    tmp_path: Path, model_type: str, severity: str | None, words: str
) -> None:
    split = {"num_ranks": 2, "parallel": {"tp": 2}}
    config = LLAMA | {"model_type": model_type, "num_key_value_heads": 2}
    assert findings(tmp_path, config, codes=("PH109",)) == []
    said = findings(tmp_path, config, codes=("PH109",), trainer=split)
    assert [(f.severity, f.key) for f in said] == ([(severity, "trainer.parallel.tp")] if severity else [])
    assert all(words in f.message for f in said)


def test_a_family_is_split_or_whole_not_both() -> None:
    assert not SPLIT & WHOLE and not (SPLIT | WHOLE) & REFUSED.keys()


@pytest.mark.parametrize(
    ("config", "trusted", "words"),
    [
        ({"model_type": "lama"}, False, ["no causal language model of model_type lama", "another model"]),
        ({"model_type": "glm4v"}, True, ["of model_type glm4v"]),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "m.M"}}, False, ["model.trust_remote_code: true"]),
        ({"model_type": "own", "auto_map": {"AutoModelForCausalLM": "m.M"}}, True, []),
        ({"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "m.M"}}, False, []),
    ],
)
def test_lint_tells_of_families_that_transformers_may_not_know(
    tmp_path: Path, config: dict[str, Any], trusted: bool, words: list[str]
) -> None:
    model = {"name": str(tmp_path), "trust_remote_code": trusted}
    said = findings(tmp_path, LLAMA | config, model=model)
    assert [f.severity for f in said] == (["warning"] if words else [])
    assert all(word in f"{f.message} {f.remedy}" for f in said for word in words)


MIXTURE = LLAMA | {"num_key_value_heads": 2, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("config", "severity"),
    [
        ({"model_type": "ernie4_5_moe", "moe_num_experts": 4}, []),
        ({"model_type": "ernie4_5_moe", "moe_num_experts": 3}, ["error"]),
        ({"model_type": "mixtral", "num_local_experts": 4}, []),
        ({"model_type": "llama4_text", "num_local_experts": 4}, ["error"]),
        ({"model_type": "jetmoe", "num_local_experts": 4}, ["error"]),
        ({"model_type": "llama"}, ["error"]),
        ({"model_type": "gemma4_text", "num_experts": 4, "enable_moe_block": False}, ["error"]),
        ({"model_type": "gemma4_text", "num_experts": 4, "enable_moe_block": True}, []),
        ({"model_type": "doge", "num_experts": 4, "is_moe": False}, ["error"]),
        ({"model_type": "gpt_neo", "hidden_size": None}, ["error"]),  # its sizes have other names
        ({"model_type": "nobody_knows_it", "hidden_size": None}, []),
        ({"model_type": "axk2", "hidden_size": None, "n_routed_experts": 4}, []),
        ({"model_type": "hunyuan_v1_moe", "num_experts": [3, 3], "moe_topk": [2, 2]}, ["error"]),  # a number a layer
        ({"model_type": "hunyuan_v1_moe", "num_experts": [4, 4], "hidden_size": None}, []),
    ],
)
def test_lint_knows_whose_experts_can_be_split(tmp_path: Path, config: dict[str, Any], severity: list[str]) -> None:
    split = {"num_ranks": 2, "parallel": {"ep": 2}}
    assert [f.severity for f in findings(tmp_path, MIXTURE | config, ("PH111",), trainer=split)] == severity


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "ernie4_5_moe", "moe_num_experts": 4}, []),
        ({"model_type": "jetmoe", "num_local_experts": 4}, ["model.router_dtype", "trainer.router_replay"]),
    ],
)
def test_lint_knows_whose_routers_can_be_told(tmp_path: Path, config: dict[str, Any], key: list[str]) -> None:
    model = {"name": str(tmp_path), "router_dtype": "float32"}
    said = findings(tmp_path, MIXTURE | config, ("PH127",), model=model, trainer={"router_replay": True})
    assert [f.key for f in said if f.severity == "error"] == key


def test_lint_tells_of_tokens_that_the_model_has_no_embedding_of(tmp_path: Path) -> None:
    added = [{"content": "<a>", "id": 299}, {"content": "<new>", "id": 300}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"x": 0}}, "added_tokens": added}))
    (said,) = findings(tmp_path, LLAMA, ("PH128",), kind="sft")
    assert said.severity == "warning" and "has 1 tokens beyond the model's 300 embeddings ('<new>')" in said.message
    assert findings(tmp_path, LLAMA | {"vocab_size": 301}, ("PH128",), kind="sft") == []


def test_lint_refuses_rotary_embeddings_that_cannot_be_shared(tmp_path: Path) -> None:
    assert findings(tmp_path, longrope(), seq_len=8192) == []
    (said,) = findings(tmp_path, longrope(attention_factor=3.0), seq_len=8192)
    assert (said.code, said.severity, said.key) == ("PH121", "error", "model.name")


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in SAMPLE else pytest.mark.exhaustive) for f in family_names()]
)
def test_lint_knows_the_modules_that_the_trainer_can_adapt(family: str, tmp_path: Path) -> None:
    """By their names in the checkpoint alone."""
    if family_of({"model_type": family}).refused:
        return
    try:
        model = tiny_model(tiny_config(family))
    except CannotBuildError as error:
        pytest.skip(str(error))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    offered = last_names(linear_modules(stored_shapes(tmp_path) or {}, config["model_type"]))
    wanted = LoraConfig(rank=1, target_modules=offered) if offered else LoraConfig(rank=1)
    if offered:
        assert {name.rpartition(".")[2] for name in add_lora(model, wanted, torch.float32)} == set(offered)
        return
    with pytest.raises(ValueError, match="there are none"):
        add_lora(model, wanted, torch.float32)


@pytest.mark.parametrize(("family", "module"), [("deepseek_v4", "o_a_proj"), ("llama4_text", "router")])
def test_what_only_looks_like_a_linear_map_gets_no_adapter(family: str, module: str) -> None:
    with pytest.raises(ValueError, match=f"{module} matches no linear module"):
        add_lora(tiny_model(tiny_config(family)), LoraConfig(rank=1, target_modules=[module]), torch.float32)


@pytest.mark.parametrize("kind", ["rl", "sft", "eval"])
def test_lint_tells_of_weights_without_a_tokenizer(tmp_path: Path, kind: str) -> None:
    said = functools.partial(findings, tmp_path, LLAMA, ("PH130",), kind=kind)
    assert said() == []  # a config alone: the weights are yet to come
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (found,) = said()
    assert (found.severity, found.key) == ("warning", "model.name") and "tokenizer.json" in found.remedy
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}}')
    assert said() == []
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "tokenizer.model").touch()
    assert said() == []


def test_lint_tells_of_a_model_that_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    (found,) = findings(tmp_path, LLAMA, ("PH107",), model={"name": str(file)})
    assert found.severity == "error" and "is a file, where a model is a directory" in found.message
