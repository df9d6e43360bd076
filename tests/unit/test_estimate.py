"""What a model needs, from its config.json: parameters as published, memory of a trainer's and of an engine's GPU."""

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import Experiment
from prime_hpc.launch.estimate.engine_memory import engine_memory, vocab_fits
from prime_hpc.launch.estimate.model_facts import _NORMED_HEADS, model_facts, read_model
from prime_hpc.launch.estimate.trainer_memory import trainer_gib
from tests.support.lint import LLAMA_8B, QWEN3_06B
from tests.support.tiny_vision import make_vision_model


def test_parameters_are_counted_as_published() -> None:
    llama, qwen = model_facts(LLAMA_8B), model_facts(QWEN3_06B)
    assert llama is not None
    assert qwen is not None
    assert llama.num_params == 8_030_261_248
    assert qwen.num_params is not None
    assert abs(qwen.num_params - 596_049_920) < 10_000  # but for the norms of queries and keys
    moe = model_facts({**QWEN3_06B, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768})
    assert moe is not None
    assert moe.intermediate == 8 * 768
    assert model_facts({"n_embd": 768}) is None and model_facts({"model_type": "gpt2", "n_embd": 768}) is None
    small = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    gpt2 = model_facts(small)
    assert gpt2 is not None and gpt2.num_params is not None and gpt2.tied and gpt2.context == 1024
    assert abs(gpt2.num_params - 124_439_808) < 900_000  # but for positions and biases


def test_layers_of_a_gated_delta_rule_have_their_own_parameters_and_no_cache() -> None:
    linear = {"linear_num_value_heads": 32, "linear_num_key_heads": 16}
    linear |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    widths = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 8, "num_attention_heads": 16}
    config = {"model_type": "qwen3_5_text", **widths, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 1000}
    counted = model_facts({**config, **linear, "layer_types": [*["linear_attention"] * 6, *["full_attention"] * 2]})
    assert counted is not None and counted.num_params is not None
    assert abs(counted.num_params - 1_738_086_528) < 250_000  # transformers' own, but for norms and convolutions
    assert model_facts({**config, **linear}) == counted  # where the config says only that every fourth is full
    served = Experiment.model_validate({"kind": "rl", "inference": {}})
    memory, full = engine_memory(served, counted, 80.0), engine_memory(served, replace(counted, delta=None), 80.0)
    assert memory is not None and full is not None and 4 * memory.token_bytes == full.token_bytes


def test_scores_that_are_capped_are_kept_but_by_flash_attn() -> None:
    facts = model_facts({**LLAMA_8B, "attn_logit_softcapping": 50.0})
    assert facts is not None
    for attn, kept in (("auto", True), ("flash", False)):
        parts = trainer_gib(Experiment.model_validate({"model": {"attn": attn}}), facts)
        assert parts is not None and ("scores" in parts) is kept


def test_parameters_of_stored_weights(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.float16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))

    def num_params() -> int | None:
        facts = read_model(str(tmp_path))
        assert facts is not None
        return facts.num_params

    assert num_params() == 17
    save_file({"a.other": np.zeros((3, 4), np.float32)}, tmp_path / "consolidated.safetensors")  # the weights once more
    assert num_params() == 17
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    counted = model_facts(QWEN3_06B)
    assert counted is not None and num_params() == counted.num_params


def test_memory_scales_as_it_must() -> None:
    facts = model_facts(LLAMA_8B)
    assert facts is not None

    def need(**trainer: Any) -> dict[str, float]:
        parts = trainer_gib(Experiment.model_validate({"trainer": trainer}), facts)
        assert parts is not None
        return parts

    assert need(num_ranks=8)["state"] == pytest.approx(16 * 8_030_261_248 / 8 / 2**30)
    assert need(num_ranks=16)["state"] == need(num_ranks=8)["state"] / 2
    assert need(num_ranks=8, micro_batch_tokens=8192)["activations"] == 4 * need(num_ranks=8)["activations"]
    assert need(num_ranks=8, reshard_after_forward=False)["gathered"] > need(num_ranks=8)["gathered"]
    copies, split, rows = ({"dp_replicate": 2}, {"tp": 2}, {"cp": 2})
    assert need(num_ranks=8, parallel=copies)["state"] == 2 * need(num_ranks=8)["state"]
    whole = trainer_gib(Experiment.model_validate({"trainer": {"num_ranks": 8}, "model": {"fused_head": False}}), facts)
    assert whole is not None and need(num_ranks=8, parallel=split)["logits"] == whole["logits"] / 2
    assert need(num_ranks=8)["logits"] < whole["logits"]  # no float32 logits
    cut: Any = {"env": [{"id": "a"}, {"id": "b", "sampling": {"top_p": 0.9}}]}  # which the kernels do not know
    parts = trainer_gib(Experiment.model_validate({"trainer": {"num_ranks": 8}, "orchestrator": cut}), facts)
    assert parts is not None and parts["logits"] == whole["logits"]
    assert need(num_ranks=8, parallel=rows)["activations"] == need(num_ranks=8)["activations"] / 2
    engines = [
        engine_memory(Experiment.model_validate({"inference": {"tensor_parallel_size": n}}), facts, 80.0)
        for n in (1, 2, 16)
    ]
    assert all(engine is not None for engine in engines)
    one, two, sixteen = (engine for engine in engines if engine is not None)
    assert two.weights_gib == one.weights_gib / 2
    assert (one.token_bytes, two.token_bytes, sixteen.token_bytes) == (131072, 65536, 16384)  # 8 key-value heads
    assert two.max_tokens is not None
    assert one.max_tokens is not None
    assert two.max_tokens > 2 * one.max_tokens


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_what_sees_images_is_counted_as_the_model_has_it(tmp_path: Path, family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = make_vision_model(tmp_path, family)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    facts = read_model(str(folder))
    assert facts is not None and facts.vision is not None
    assert facts.vision.num_params == sum(p.numel() for name, p in model.named_parameters() if ".visual." in name)
    text = facts.trained_params("frozen")
    assert facts.trained_params("trained") == facts.num_params == (text or 0) + facts.vision.num_params
    read = model_facts(json.loads((folder / "config.json").read_text()))
    assert read is not None and read.num_params is not None and read.vision == facts.vision

    def need(vision: str | None, **trainer: Any) -> dict[str, float]:
        tree = {"model": {"vision": vision}, "trainer": {"num_ranks": 8, **trainer}}
        parts = trainer_gib(Experiment.model_validate(tree), facts)
        assert parts is not None
        return parts

    frozen, trained = need("frozen"), need("trained")
    assert {name: value for name, value in frozen.items() if name != "images"} == need(None)
    assert trained["images"] > frozen["images"] and trained["state"] == frozen["state"]
    assert need("trained", micro_batch_tokens=65536)["images"] > 4 * trained["images"]
    assert need("frozen", micro_batch_tokens=65536)["images"] == frozen["images"]  # gone before the language model's


def test_padded_vocabulary() -> None:
    assert vocab_fits(151936, 8)
    assert vocab_fits(50257, 8)  # padded to 50304
    assert not vocab_fits(50257, 5)


def test_models_that_norm_their_heads_are_known_by_their_type() -> None:
    """Transformers' code of each that is named has such norms, and most that have them are named."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        pytest.skip("transformers is not installed")
    codes = {file.parent.name: file.read_text() for file in Path(spec.origin).parent.glob("models/*/modeling_*.py")}
    assert {
        kind for kind in _NORMED_HEADS & set(codes) if not re.search(r"self\.q\w*_(layer)?norm\b", codes[kind])
    } == set()
    for kind, normed in (("qwen3_5_moe_text", True), ("gemma4_text", True), ("olmoe", True), ("ernie4_5", False)):
        facts = model_facts({**LLAMA_8B, "text_config": {"model_type": kind}})
        assert facts is not None and facts.norms_heads == normed, kind


def test_models_beside_the_policy_count_by_their_own_size(tmp_path: Path) -> None:
    facts, larger = model_facts(QWEN3_06B), {**LLAMA_8B, "architectures": ["LlamaForSequenceClassification"]}
    head = LLAMA_8B["vocab_size"] * LLAMA_8B["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(larger))
    num_params = 8_030_261_248 - head
    assert facts is not None and facts.num_params is not None
    scores = read_model(str(tmp_path))
    assert scores is not None and scores.num_params == num_params  # a row is no table

    def state(**trainer: Any) -> float:
        tree = {"kind": "rl", "model": {"name": "m"}, "trainer": {"no_sync": False} | trainer}
        tree |= {"orchestrator": {"advantage": {"type": "gae"}}} if "critic" in trainer else {}
        found = trainer_gib(Experiment.model_validate(tree), facts)
        assert found is not None
        return found["state"] * 2**30

    of_policy, kl = state(), {"coef": 0.1, "target": "reference"}
    assert of_policy == 16 * facts.num_params
    assert state(critic={"name": str(tmp_path)}) == of_policy + 16 * num_params
    assert state(critic={"name": "not-here-yet"}) == state(critic={}) == 2 * of_policy
    assert state(loss={"kl": {**kl, "model": str(tmp_path)}}) == of_policy + 4 * num_params
    assert state(loss={"kl": kl}) == of_policy + 4 * facts.num_params
