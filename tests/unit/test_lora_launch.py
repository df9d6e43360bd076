"""What is known of adapters before anything starts: lint, memory, the engines' arguments, a version's files."""

import json
import math
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from prime_hpc.cli.verbs.run import export
from prime_hpc.config import ConfigError, Experiment, Loaded, write_snapshot
from prime_hpc.config.site import GENERIC
from prime_hpc.inference import check_version
from prime_hpc.inference.check_version import BadVersionError, check_adapter, receive_version
from prime_hpc.inference.policy import UnavailableError
from prime_hpc.inference.vllm import cpu_corrections
from prime_hpc.inference.vllm.args import build_argv
from prime_hpc.launch.checks import check
from prime_hpc.launch.estimate.model_facts import model_facts
from prime_hpc.launch.estimate.trainer_memory import adapter_params, checkpoint_gib, trainer_gib
from prime_hpc.launch.lint.lint import lint
from prime_hpc.store.artifact import ArtifactWriter
from prime_hpc.weight_transport.transport import VersionReader

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
BASE = {
    "model.embed_tokens.weight": (100, 32),
    "model.layers.0.self_attn.q_proj.weight": (64, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 64),
    "model.layers.0.mlp.experts.0.up_proj.weight": (64, 32),
    "model.norm.weight": (32,),
}


def write_tensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of zeros."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))


def experiment(model: str | Path, lora: dict[str, Any] | None, **tree: Any) -> Experiment:
    model_section = {"name": str(model), "dtype": "bfloat16"} | ({} if lora is None else {"lora": lora})
    return Experiment.model_validate({"model": model_section, "inference": {}, **tree})


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({}, None),
        ({"rank": 32}, None),
        ({"rank": 33}, ("model.lora.rank", "33 exceeds model.layers.0.self_attn.q_proj, which is 64 x 32")),
        ({"target_modules": ["query"]}, ("model.lora.target_modules", "there are q_proj, down_proj")),
        ({"target_modules": [".*"]}, ("model.lora.target_modules", "lm_head cannot have an adapter")),
        ({"target_modules": [".*layers.*"]}, None),
        ({"target_modules": ["up_proj"]}, ("model.lora.target_modules", "up_proj matches no linear module")),
    ],
)
def test_lint_looks_at_the_stored_shapes(tmp_path: Path, lora: dict[str, Any], said: tuple[str, str] | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_tensors(tmp_path / "model.safetensors", BASE)
    found = [f for f in lint(experiment(tmp_path, lora), GENERIC) if f.code == "PH113"]
    assert [(f.key, f.severity) for f in found] == ([] if said is None else [(said[0], "error")])
    if said is not None:
        assert said[1] in found[0].message
    assert not [f for f in lint(experiment(tmp_path / "absent", lora), GENERIC) if f.code == "PH113"]


def test_lint_ends_its_sentence_where_every_matrix_holds_several(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "hrm_text"}))
    write_tensors(tmp_path / "model.safetensors", {"model.layers.0.self_attn.gqkv_proj.weight": (64, 32)})
    (found,) = [f for f in lint(experiment(tmp_path, {}), GENERIC) if f.code == "PH113"]
    assert found.line().endswith("where an adapter has no name; there are none beside them")


def test_lint_tells_which_projections_the_usual_targets_miss(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    fused = {
        f"model.layers.0.{name}.weight": (64, 32) for name in ("self_attn.qkv_proj", "mlp.gate", "embed_positions")
    }
    write_tensors(tmp_path / "model.safetensors", BASE | fused | {"vision_tower.fc1.weight": (64, 32)})
    (found,) = [f for f in lint(experiment(tmp_path, {}), GENERIC) if f.code == "PH113"]
    assert found.severity == "info" and "the usual targets miss qkv_proj of" in found.message
    stated = experiment(tmp_path, {"target_modules": ["q_proj"]})
    assert not [f for f in lint(stated, GENERIC) if f.code == "PH113"]


def test_memory_is_the_frozen_model_and_the_adapter() -> None:
    facts = model_facts(CONFIG | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}, 8 * 10**9)
    assert facts is not None
    plain, lora = experiment("m", None), experiment("m", {"rank": 16})
    per_layer = 4 * 4096 + 2 * (4 * 16) + 2 * (2 * 16) + 3 * (4096 + 14336)
    count = adapter_params(lora, facts)
    assert count == 16 * 32 * per_layer and adapter_params(plain, facts) == 0
    assert adapter_params(experiment("m", {"target_modules": ["q_proj"]}), facts) == 16 * 32 * (4096 + 4 * 16)
    one, other = trainer_gib(plain, facts), trainer_gib(lora, facts)
    assert one is not None and other is not None
    assert other["state"] == pytest.approx((2 * 8e9 + (16 + 8) * count) / 2**30)
    assert other["activations"] == one["activations"]
    two = {"trainer": {"num_ranks": 2}}
    more, less = (trainer_gib(experiment("m", adapter, **two), facts) for adapter in (None, {"rank": 16}))
    assert more is not None and less is not None
    assert less["gathered"] == more["gathered"] > 0 and less["gradients"] == 0 < more["gradients"]
    assert checkpoint_gib(lora, facts) == pytest.approx(12 * count / 2**30)
    for named in (None, "m"):
        penalty = {"trainer": {"loss": {"kl": {"target": "reference", "model": named}}}}
        assert trainer_gib(experiment("m", {"rank": 16}, **penalty), facts) == other
    many = trainer_gib(experiment("m", {"rank": 16}, trainer={"max_concurrent_runs": 8}), facts)
    assert many is not None
    assert many["state"] - other["state"] == pytest.approx(7 * 12 * count / 2**30), "weights and Adam's moments of each"


def argv(lora: dict[str, Any] | None, **tree: Any) -> list[str]:
    return build_argv(experiment("m", lora, **tree), device="cpu", replica=0, port=1)


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def test_engines_have_room_for_the_versions_in_flight() -> None:
    assert "--enable-lora" not in argv(None) and "--enable-lora" not in argv({}, kind="sft")
    assert "--enable-lora" in argv({}, kind="sft", orchestrator={"eval": {"env": [{"id": "reverse-text"}]}})
    found = argv({"rank": 20}, async_level=2)
    assert "--enable-lora" in found and value(found, "--max-lora-rank") == "32"
    assert value(found, "--max-loras") == "3" and int(value(found, "--max-cpu-loras")) > 3
    assert value(argv({}, async_level=0), "--max-loras") == "2" and value(argv({}, async_level=9), "--max-loras") == "4"
    assert value(argv({"rank": 512}), "--max-lora-rank") == "512"
    with pytest.raises(ValueError, match=r"inference.vllm.max_lora_rank: the tree states this as model.lora.rank"):
        argv({}, inference={"vllm": {"max_lora_rank": 64}})


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def version(folder: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    with ArtifactWriter(folder, kind="weights", step=3, version=3, writer="test") as writer:
        write_tensors(writer.path / "adapter_model.safetensors", shapes)
    return folder


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"A.weight": (4, 32), "B.weight": (64, 4)}, None),
        (
            {"A.weight": (4, 31), "B.weight": (64, 4)},
            r"lora_A.weight has shape \[4, 31\], the model's .* \[64, 32\]",
        ),
        ({"A.weight": (4, 32), "B.weight": (63, 4)}, r"lora_B.weight has shape \[63, 4\]"),
        ({"A.weight": (16, 32), "B.weight": (64, 16)}, r"has rank 16, the server was started for 8"),
        ({"A.bias": (4,)}, "is no matrix of a LoRA adapter"),
    ],
)
def test_an_adapters_files(tmp_path: Path, shapes: dict[str, tuple[int, ...]], words: str | None) -> None:
    folder = version(tmp_path / "v", {PREFIX + name: shape for name, shape in shapes.items()})
    if words is None:
        check_adapter(folder, 3, BASE, 8)
        check_adapter(folder, 3, None, 8)
    else:
        with pytest.raises(BadVersionError, match=words):
            check_adapter(folder, 3, BASE, 8)


def test_an_adapter_of_another_model_and_kinds_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = version(tmp_path / "a", {PREFIX.replace("q_proj", "query") + "A.weight": (4, 32)})
    with pytest.raises(BadVersionError, match=r"it adapts model\.layers\.0\.self_attn\.query, which"):
        check_adapter(other, 3, BASE, 8)
    with pytest.raises(BadVersionError, match="holds version 3, not 4"):
        check_adapter(other, 4, BASE, 8)
    with pytest.raises(BadVersionError, match="is an adapter, and this server serves none"):
        receive_version(VersionReader(tmp_path), other, 3, None, tied=False)
    with ArtifactWriter(tmp_path / "b", kind="weights", step=3, version=3, writer="test") as writer:
        write_tensors(writer.path / "model.safetensors", BASE)
    with pytest.raises(BadVersionError, match="holds no adapter .*, and this server serves adapters"):
        check_adapter(tmp_path / "b", 3, BASE, 8)

    def fail(file: Path) -> Any:
        raise OSError(5, "Input/output error", str(file))

    monkeypatch.setattr(check_version, "read_header", fail)
    with pytest.raises(UnavailableError, match="cannot be had on this node: .*Input/output error"):
        check_adapter(other, 3, BASE, 8)


def test_export_merged_refuses_what_is_not_there(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_snapshot(experiment("m", None, name="run", output_dir=str(tmp_path)), run_dir, ["test"])
    with pytest.raises(ConfigError, match="--merged 3: no such version in .*; there are none"):
        export.run([str(run_dir), "--merged", "3"], "prime-hpc")
    with ArtifactWriter(run_dir / "weights/step_000003", kind="weights", step=3, version=3, writer="test") as writer:
        write_tensors(writer.path / "model.safetensors", BASE)
    with pytest.raises(ConfigError, match="weights/step_000003 is a model directory as it is"):
        export.run([str(run_dir), "--merged", "latest"], "prime-hpc")
    shutil.rmtree(run_dir / "weights")
    write_snapshot(experiment("m", {}, name="run", output_dir=str(tmp_path)), run_dir, ["test"])
    for wanted in ("4", "latest", "last"):
        with pytest.raises(ConfigError, match=f"--merged {wanted}: no such version in .*; there are none"):
            export.run([str(run_dir), "--merged", wanted], "prime-hpc")
    (run_dir / "weights" / "step_000003").mkdir(parents=True)
    merged = [str(run_dir), "--merged", "3"]
    with pytest.raises(ConfigError, match="weights exists: name another directory with --output"):
        export.run([*merged, "--output", str(run_dir / "weights")], "prime-hpc")
    with pytest.raises(ConfigError, match="--dtype int8: must be one of float32, bfloat16, float16"):
        export.run([*merged, "--dtype", "int8"], "prime-hpc")
    with pytest.raises(ConfigError, match="--json is for rollouts: it does not go with --merged"):
        export.run([*merged, "--json"], "prime-hpc")
    with pytest.raises(ConfigError, match="--dtype is for weights: it goes with --merged"):
        export.run([str(run_dir), "--dtype", "float32"], "prime-hpc")


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "40")])
def test_export_tells_which_signal_ended_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, name: str
) -> None:
    run_dir, dying = tmp_path / "run", tmp_path / "python"
    write_snapshot(experiment("m", {}, name="run", output_dir=str(tmp_path)), run_dir, ["test"])
    (run_dir / "weights" / "step_000003").mkdir(parents=True)
    dying.write_text(f"#!/bin/sh\nkill -{number} $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    assert export.run([str(run_dir), "--merged", "3"], "prime-hpc") == 1
    assert f"the merge was ended by signal {name}" in "".join(capsys.readouterr())


def test_products_leave_the_base_models_rows_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 1, 4, 6, generator=generator), torch.randn(3, 1, 5, 4, generator=generator)
    x, base = torch.randn(7, 6, generator=generator), torch.randn(7, 8, generator=generator)
    for places in ([0, -1, 2, 2, -1, 1, 0], [1] * 7, [-1] * 7):
        indices = torch.tensor(places)
        low, output = torch.full((7, 4), 9.0), base.clone()
        cpu_corrections.shrink(x, a, low, indices, 0.5)
        cpu_corrections.expand_slice(low, b, output, indices, 2, 5)
        whole = base[:, :5].clone()
        cpu_corrections.expand(low, b, whole, indices, add_inputs=False)
        for row, place in enumerate(places):
            expected = torch.zeros(5) if place < 0 else b[place, 0] @ (0.5 * a[place, 0] @ x[row])
            torch.testing.assert_close(output[row, 2:7] - base[row, 2:7], expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(whole[row], expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(output[:, [0, 1, 7]], base[:, [0, 1, 7]])


def test_an_adapter_for_the_model_is_told_as_one(tmp_path: Path) -> None:
    """Such as the weights of another run, which is what one begins the next run from."""
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match="holds an adapter alone, .*`?prime-hpc export RUN --merged STEP"):
        check(Loaded(experiment(tmp_path, None), {}, [], "trainer"), "trainer")
    for folder, said in ((tmp_path, "holds no config.json: heads"), (tmp_path / "absent", "is not there (yet): heads")):
        (found,) = [f for f in lint(experiment(folder, None), GENERIC) if f.code == "PH107"]
        assert said in found.message
