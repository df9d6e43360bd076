"""Heads for which vLLM has no kernels on a CPU, latent attention that takes no new version there, and windows that it
does not serve, are refused before anything starts, and nowhere else."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from prime_hpc.config import Experiment
from prime_hpc.config.engine_groups import served_by
from prime_hpc.config.sections.inference import JudgeInferenceConfig
from prime_hpc.config.sections.lora import LoraConfig
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import GENERIC
from prime_hpc.inference.backend import check_backend, load_backend
from prime_hpc.inference.vllm.args import LATENT_FAMILIES, PLAIN_SIZE, build_argv, cpu_options, latent_size
from prime_hpc.inference.vllm.backend import CPU_HEAD_SIZES, SPARSE_FAMILIES, STATED_ROUTERS, head_size, slides_in_part
from prime_hpc.launch.lint.lint import lint_errors
from prime_hpc.runtime.device import DEVICE, Device

SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 2}
SMALL |= {"intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 512}


def test_the_sizes_are_those_of_the_installed_vllm() -> None:
    cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    assert list(CPU_HEAD_SIZES) == cpu_attn.CPUAttentionBackend.get_supported_head_sizes()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SMALL, 16),
        (SMALL | {"head_dim": 64}, 64),
        (SMALL | {"head_dim": None}, 16),
        ({"model_type": "vlm", "text_config": SMALL | {"head_dim": 40}}, 40),
        (SMALL | {"kv_lora_rank": 8}, None),
        ({"model_type": "mamba", "hidden_size": 64}, None),
        ({}, None),
    ],
)
def test_the_size_of_a_models_heads(config: dict[str, Any], expected: int | None) -> None:
    assert head_size(config) == expected


def experiment(folder: Path, head_dim: int, **more: Any) -> Experiment:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL | {"head_dim": head_dim}))
    tree = {"name": "x", "output_dir": str(folder), "seq_len": 512, "model": {"name": str(folder)}, "inference": {}}
    tree["orchestrator"] = {"env": [{"id": "reverse-text"}], "sampling": {"max_tokens": 24}}
    return Experiment.model_validate(tree | more)


def refused(tree: Experiment, site: SiteConfig = GENERIC) -> list[str]:
    return [f.message for f in lint_errors(tree, site) if f.code == "PH124" and f.key == "model.name"]


def test_lint_refuses_them_on_a_cpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (message,) = refused(experiment(tmp_path / "a", 24, launch="local", device="auto"))
    assert f"{tmp_path}/a has heads of size 24" in message and "32, 64, 80" in message
    assert refused(experiment(tmp_path / "b", 32, launch="local")) == []
    assert refused(experiment(tmp_path / "c", 24, launch="local", device="cuda")) == []
    transformers = {"backend": "transformers"}
    assert refused(experiment(tmp_path / "d", 24, launch="local", inference=transformers)) == []


def test_in_a_job_the_device_is_its_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of the login node
    gpus, none = {"partition": "p", "gpus_per_node": 2}, {"partition": "p"}
    assert refused(experiment(tmp_path / "a", 24, launch="slurm", slurm=gpus)) == []
    assert len(refused(experiment(tmp_path / "b", 24, launch="slurm", slurm=none))) == 1


LATENT = SMALL | {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (LATENT, 576),
        (LATENT | {"kv_lora_rank": 16}, 80),
        ({"model_type": "kimi_k25", "text_config": LATENT}, 576),
        (LATENT | {"kv_lora_rank": None}, None),
        (LATENT | {"model_type": "minicpm3"}, None),  # vLLM serves it with attention as others have it
        (SMALL, None),
    ],
)
def test_latent_attention_gets_kernels_on_a_cpu_that_take_new_versions(
    config: dict[str, Any], size: int | None
) -> None:
    assert latent_size(config) == size
    assert cpu_options(config) == ({"attention_backend": "CPU_MLA"} if size == PLAIN_SIZE else {})


def test_an_engine_on_a_cpu_is_told_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    tree = experiment(tmp_path / "a", 64)
    (tmp_path / "a" / "config.json").write_text(json.dumps(LATENT))
    argv = build_argv(tree, device="cpu", replica=0, port=1)
    assert argv[argv.index("--attention-backend") + 1] == "CPU_MLA"
    assert "--attention-backend" not in build_argv(tree, device="cuda", replica=0, port=1)
    own = experiment(tmp_path / "b", 64, inference={"vllm": {"attention_backend": "AMX_MLA"}})
    (tmp_path / "b" / "config.json").write_text(json.dumps(LATENT))
    argv = build_argv(own, device="cpu", replica=0, port=1)
    assert argv[argv.index("--attention-backend") + 1] == "AMX_MLA" and argv.count("--attention-backend") == 1


def refused_vllm(folder: Path, config: dict[str, Any], vllm: dict[str, Any], device: str) -> list[tuple[str, str]]:
    tree = experiment(folder, 64, inference={"vllm": vllm}, device=device)
    (folder / "config.json").write_text(json.dumps(config))
    return [(refusal.key, refusal.reason) for refusal in load_backend("vllm").refusals(tree)]


def test_kernels_that_take_no_new_version_are_refused(tmp_path: Path) -> None:
    stated = {"attention-backend": "AMX_MLA"}
    ((key, reason),) = refused_vllm(tmp_path / "a", LATENT, stated, "cpu")
    assert key == "inference.vllm.attention-backend" and "no new version" in reason
    assert refused_vllm(tmp_path / "b", LATENT, {"attention_backend": "CPU_MLA"}, "cpu") == []


@pytest.mark.parametrize("kind", sorted(STATED_ROUTERS))
def test_routers_that_vllm_would_take_for_others_are_refused(kind: str, tmp_path: Path) -> None:
    """`tools/proofs served_families` found 2.9 nats between softmax and sigmoid."""
    stated = STATED_ROUTERS[kind]
    own: dict[str, Any] = LATENT | {"model_type": kind, "n_routed_experts": 4, "num_local_experts": 4}
    saved = CONFIG_MAPPING[kind](**own).to_dict()
    assert stated.keys().isdisjoint(saved), "transformers says it itself: the rule is needed no more"
    for number, device in enumerate(("cpu", "cuda")):
        ((key, reason),) = refused_vllm(tmp_path / f"a{number}", saved, {}, device)
        assert key == "model.name" and json.dumps(stated)[1:-1] in reason
    ((_, reason),) = refused_vllm(tmp_path / "b", {"model_type": "outer", "text_config": saved}, {}, "cuda")
    assert next(iter(stated)) in reason
    assert refused_vllm(tmp_path / "c", saved | stated, {}, "cuda") == []
    assert refused_vllm(tmp_path / "d", saved, {"hf_overrides": dict(stated)}, "cuda") == []
    dense = saved | {"n_routed_experts": None, "num_local_experts": None}
    assert refused_vllm(tmp_path / "e", dense, {}, "cuda") == []


@pytest.mark.parametrize(
    ("targets", "expected"),
    [(["q_b_proj", "kv_b_proj"], 1), ([r".*layers\.1\..*_proj"], 1), (["q_b_proj", "kv_a_proj_with_mqa"], 0)],
)
def test_an_adapter_that_no_engine_would_use_is_refused(targets: list[str], expected: int, tmp_path: Path) -> None:
    """A tiny DeepSeek V3 with an adapter of kv_b_proj alone sampled as without it, 5.7 nats off."""
    tree = experiment(tmp_path / "a", 64, device="cuda")
    tree = tree.model_copy(update={"model": tree.model.model_copy(update={"lora": LoraConfig(target_modules=targets)})})
    for kind, count in (("deepseek_v3", expected), ("hy_v4", expected), ("minicpm3", 0)):
        config = LATENT | {"model_type": kind}
        (tmp_path / "a" / "config.json").write_text(json.dumps(config))
        assert [r.key for r in load_backend("vllm").refusals(tree)] == ["model.lora.target_modules"] * count
    alone = tree.model_copy(update={"inference": None, "kind": "sft"})
    assert not [r for r in load_backend("vllm").refusals(alone) if r.key == "model.lora.target_modules"]


@pytest.mark.parametrize(
    ("kind", "targets", "expected"),
    [
        ("glm4", ["q_proj", "gate_up_proj"], ["model.lora.target_modules"]),
        ("glm4", ["q_proj", "down_proj"], []),
        ("glm", ["gate_up_proj"], []),
        ("gptj", ["q_proj"], ["model.lora"]),
        ("stablelm", ["q_proj"], ["model.lora"]),
        ("deepseek_v4", ["q_b_proj"], []),
    ],
)
def test_adapters_that_an_engine_would_refuse_are_refused(
    kind: str, targets: list[str], expected: list[str], tmp_path: Path
) -> None:
    """GLM 4's at the first version, after its training step, the others' at the engine's start."""
    tree = experiment(tmp_path / "a", 64, device="cuda")
    tree = tree.model_copy(update={"model": tree.model.model_copy(update={"lora": LoraConfig(target_modules=targets)})})
    (tmp_path / "a" / "config.json").write_text(json.dumps(SMALL | {"model_type": kind}))
    assert [refusal.key for refusal in load_backend("vllm").refusals(tree)] == expected


def test_lint_refuses_latent_attention_of_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for device, size, count in (("auto", 16, 1), ("auto", 512, 0), ("cuda", 16, 0)):
        folder = tmp_path / f"{device}{size}"
        tree = experiment(folder, 64, launch="local", device=device)
        (folder / "config.json").write_text(json.dumps(LATENT | {"kv_lora_rank": size}))
        found = [message for message in refused(tree) if "latent attention of size 80 " in message]
        assert len(found) == count


def test_a_server_that_is_started_by_hand_refuses_them_too(tmp_path: Path) -> None:
    tree = experiment(tmp_path / "a", 24)
    with pytest.raises(ValueError, match=r"^model.name: .* heads of size 24.* inference.backend = transformers"):
        check_backend(tree, "inference", Device("cpu"))
    assert check_backend(tree, "inference", Device("cuda", 1)).title == "vLLM"


def test_refusals_of_a_judge_name_its_keys_and_ways_that_it_has(tmp_path: Path) -> None:
    experiment(tmp_path / "judge", 24)
    tree, name = experiment(tmp_path / "policy", 64), str(tmp_path / "judge")
    for servers, way in (
        (JudgeInferenceConfig(model=name), "judge_inference.backend = transformers, GPUs, or another model"),
        (JudgeInferenceConfig(model=name, runner="pooling"), "GPUs, or another model"),
    ):
        view = served_by(tree.model_copy(update={"judge_inference": servers}), "judge")
        with pytest.raises(ValueError, match=rf"^judge_inference\.model: .* heads of size 24.*; use {way}$"):
            check_backend(view, "judge", Device("cpu"))


MIXED = ["full_attention", "full_attention", "sliding_attention", "sliding_attention"]
WINDOWS = [
    ({"use_sliding_window": True, "max_window_layers": 2}, True),
    ({"use_sliding_window": True, "max_window_layers": 2, "sliding_window": None}, False),
    ({"use_sliding_window": False, "max_window_layers": 2}, False),
    ({"max_window_layers": 2}, False),  # as Qwen2 and Qwen3 are published
    ({"use_sliding_window": True, "max_window_layers": 4}, False),
    ({"use_sliding_window": True, "max_window_layers": 0}, False),
    ({"use_sliding_window": True}, False),  # from layer 28 on
    ({"layer_types": MIXED, "max_window_layers": 2}, True),
    ({"layer_types": ["full_attention"] * 4, "use_sliding_window": True, "max_window_layers": 2}, False),
]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize(("fields", "expected"), WINDOWS)
def test_windows_in_some_layers_are_those_that_vllm_refuses(kind: str, fields: dict[str, Any], expected: bool) -> None:
    """Its condition, on transformers' own reading of the config."""
    own = CONFIG_MAPPING[kind](**(SMALL | {"num_hidden_layers": 4} | fields))
    assert (len(set(own.layer_types)) > 1 and own.max_window_layers != own.num_hidden_layers) is expected
    assert slides_in_part(SMALL | {"model_type": kind, "num_hidden_layers": 4} | fields) is expected


def test_a_mixture_with_windows_in_some_layers_is_refused_as_it_is_saved() -> None:
    """`tools/proofs served_families` found Qwen2-MoE wrong with `max_window_layers` = all."""
    fields: dict[str, Any] = SMALL | {"num_hidden_layers": 4, "max_window_layers": 4}
    for uses, expected in ((True, True), (False, False)):
        saved = CONFIG_MAPPING["qwen2_moe"](**(fields | {"use_sliding_window": uses})).to_dict()
        assert (len(set(saved["layer_types"])) > 1) is expected
        assert slides_in_part(saved) is expected
        stated = fields | {"model_type": "qwen2_moe", "use_sliding_window": uses}
        assert slides_in_part(stated) is expected and not slides_in_part(stated | {"sliding_window": None})


def test_lint_refuses_windows_in_some_layers(tmp_path: Path) -> None:
    tree = experiment(tmp_path / "a", 32, launch="local")
    config = SMALL | {"head_dim": 32, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    (message,) = refused(tree)
    assert "a sliding window in some of its layers" in message
    other = tree.model_copy(update={"inference": tree.inference.model_copy(update={"backend": "transformers"})})  # type: ignore[union-attr]
    assert not any("some of its layers" in m for m in refused(other))
    stated = {"hf_overrides": {"layer_types": ["full_attention"] * SMALL["num_hidden_layers"]}}
    other = tree.model_copy(update={"inference": tree.inference.model_copy(update={"vllm": stated})})  # type: ignore[union-attr]
    assert not any("some of its layers" in m for m in refused(other)), "vLLM starts so"


def test_what_a_cpus_engines_compute_otherwise_is_refused(tmp_path: Path) -> None:
    tree = experiment(tmp_path / "a", 32, launch="local")
    config = tmp_path / "a" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gemma3n_text"}))
    (message,) = refused(tree)
    assert "(gemma3n_text): on a CPU vLLM samples from another distribution" in message


@pytest.mark.parametrize(
    ("kind", "device", "expected"),
    [
        ("mpt", "cuda", 1),
        ("rwkv", "cpu", 1),
        ("olmo_hybrid", "cpu", 1),
        ("falcon_mamba", "cpu", 1),
        ("olmo_hybrid", "cuda", 0),
        ("jamba", "cpu", 1),
    ],
)
def test_families_that_no_engine_starts_with_are_refused(kind: str, device: str, expected: int, tmp_path: Path) -> None:
    tree = experiment(tmp_path / "a", 64, device=device)
    (tmp_path / "a" / "config.json").write_text(json.dumps(SMALL | {"head_dim": 64, "model_type": kind}))
    found = list(load_backend("vllm").refusals(tree))
    assert [refusal.key for refusal in found] == ["model.name"] * expected
    assert all(f"({kind})" in refusal.reason for refusal in found)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_delta_nets_in_float32_are_refused_on_a_cpu(kind: str, tmp_path: Path) -> None:
    """Their engines start, and die of the first request."""
    for number, (dtype, device, count) in enumerate(
        (("float32", "cpu", 1), ("bfloat16", "cpu", 0), ("float32", "cuda", 0))
    ):
        tree = experiment(tmp_path / str(number), 64, device=device)
        tree = tree.model_copy(update={"model": tree.model.model_copy(update={"dtype": dtype})})
        (tmp_path / str(number) / "config.json").write_text(json.dumps(SMALL | {"head_dim": 64, "model_type": kind}))
        assert [refusal.key for refusal in load_backend("vllm").refusals(tree)] == ["model.dtype"] * count


@pytest.mark.parametrize(("keys", "values", "expected"), [(128, 64, 1), (32, 32, 1), (64, 64, 0), (None, None, 0)])
def test_sizes_of_delta_nets_without_a_kernel_are_refused_on_a_cpu(
    keys: int | None, values: int | None, expected: int, tmp_path: Path
) -> None:
    """Of Qwen3.5 with heads of 32 the engine died with the first request."""
    tree = experiment(tmp_path / "a", 64, device="cpu")
    own = {"linear_key_head_dim": keys, "linear_value_head_dim": values}
    text = {"text_config": own, "head_dim": 64, "model_type": "qwen3_5"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(SMALL | text))
    found = list(load_backend("vllm").refusals(tree))
    assert [refusal.key for refusal in found] == ["model.name"] * expected
    assert all(f"keys of size {keys} and values of size {values}" in refusal.reason for refusal in found)
    assert not list(load_backend("vllm").refusals(tree.model_copy(update={"device": "cuda"})))


def test_adapters_of_a_mixture_are_refused_on_a_cpu(tmp_path: Path) -> None:
    """Engines with adapters multiply experts by Triton's kernels."""
    tree = experiment(tmp_path / "a", 32, launch="local", device="cpu")
    config = tmp_path / "a" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen3_moe", "num_experts": 4}))
    assert not list(load_backend("vllm").refusals(tree))
    adapted = tree.model_copy(update={"model": tree.model.model_copy(update={"lora": LoraConfig()})})
    (refusal,) = load_backend("vllm").refusals(adapted)
    assert refusal.key == "model.lora" and "no adapters" in refusal.reason


FOLDS = """
import vllm.config
from vllm.transformers_utils import model_arch_config_convertor as convertor
from tests.support.every_family import CannotBuildError, family_names, tiny_config
for name in family_names():
    try:
        config = tiny_config(name)
    except CannotBuildError:
        continue
    of = convertor.MODEL_ARCH_CONFIG_CONVERTORS.get(config.model_type, convertor.ModelArchConfigConvertorBase)
    if of(config, config).is_deepseek_mla():
        print("folds", config.model_type)
"""


@pytest.mark.exhaustive  # vllm takes seconds to import
def test_the_families_of_latent_attention_are_those_of_the_installed_vllm() -> None:
    """Those whose kv_b_proj it folds, of all that transformers has."""
    pytest.importorskip("vllm")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", FOLDS], cwd=root, capture_output=True, text=True, timeout=800)
    folded = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("folds ")}
    assert folded == (LATENT_FAMILIES | SPARSE_FAMILIES) & set(CONFIG_MAPPING), done.stderr[-3000:]
