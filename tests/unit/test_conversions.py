"""Checkpoints that hold other tensors than the model's modules: read by parts, published as they came, bit for bit."""

import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from prime_hpc.inference.check_version import check_adapter, read_signature, receive_version
from prime_hpc.store.model.files import StoredTensor, stored_tensors
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.model.conversions import Piece, Traced, WeightMap, map_weights
from prime_hpc.trainer.model.hf_checkpoint import check_tied, read_tensors
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.weights.lora_files import read_adapter
from prime_hpc.trainer.weights.merge_lora import merge
from prime_hpc.trainer.weights.publish import Publisher, build_publisher
from prime_hpc.trainer.weights.write_plan import only_run, runs
from prime_hpc.weight_transport.transport import VersionReader
from tests.support.lora import adapters_of, fill_randomly, lora_policy, merged_model
from tests.support.published_policy import stand_in
from tests.support.tiny_checkpoints import make_checkpoint

SAMPLE = ["mixtral", "phimoe", "granitemoe", "minimax_m2", "deepseek_v3", "qwen2_moe", "hrm_text", "kimi_linear"]
"""The kinds of names: experts as w1, w2, w3; renamed; with buffers of float32; as gate, up, down; split; fused."""
EVERY = [
    "granitemoeshared", "minimax", "deepseek_v2", "deepseek_v32", "glm4_moe", "olmoe", "jamba", "ernie4_5_moe",
    "exaone_moe", "nemotron_h", "olmo_hybrid", "gpt_neox", "qwen3_5_text", "qwen3_5_moe_text", "deepseek_v4",
    "dots1", "flex_olmo", "afmoe", "laguna", "mimo_v2_flash", "hy_v3", "axk1", "cohere2_moe", "llama", "gpt2",
    "gpt_oss", "qwen3_next", "phi3", "hunyuan_v1_moe", "solar_open",
]  # fmt: skip


def empty(folder: Path) -> Any:
    with init_empty_weights(include_buffers=False):
        hf = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    hf.tie_weights()
    return hf


def contents(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def load(folder: Path) -> tuple[Any, WeightMap]:
    hf = empty(folder)
    weights = map_weights(hf, stored_tensors(folder))
    policy: Any = SimpleNamespace(hf=hf.to_empty(device="cpu"))
    hf.tie_weights()
    named = dict(Policy.named_weights(policy))
    read_tensors({name: tensor.detach() for name, tensor in named.items()}, weights)
    return stand_in(lambda: list(named.items()), weights), weights


def publish(policy: Any, folder: Path, run: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    Publisher(policy, folder, RunPaths(run), dtype=dtype, incarnation=0, model_name="it").publish(1)
    return RunPaths(run).weights_step(1)


def comes_and_goes(model_type: str, root: Path) -> None:
    """Load and publish a checkpoint of a family; whatever transformers and the engine's check say must be the same."""
    source = make_checkpoint(root / "model", model_type, torch.bfloat16)
    policy, _ = load(source)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    for name, tensor in policy.named_weights():
        assert torch.equal(tensor, expected[name].float()), name
    published = publish(policy, source, root / "run")
    receive_version(VersionReader(root), published, 1, read_signature(source), tied=True)
    before, after = contents(source), contents(published)
    assert before.keys() - {"lm_head.weight"} == after.keys() - {"lm_head.weight"}
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name
    loaded: Any = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32, output_loading_info=True)
    again, info = loaded
    assert not any(info.values()), info
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_checkpoint_is_published_as_it_came(group: None, tmp_path: Path, model_type: str) -> None:
    comes_and_goes(model_type, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", EVERY)
def test_every_family_is_published_as_it_came(group: None, tmp_path: Path, model_type: str) -> None:
    comes_and_goes(model_type, tmp_path)


def test_buffers_keep_their_precision_and_parameters_get_the_computations(group: None, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", "minimax_m2")  # all float32
    bias = "model.layers.0.block_sparse_moe.e_score_correction_bias"
    policy, weights = load(source)
    assert "model.layers.0.mlp.e_score_correction_bias" in weights.buffers
    after = contents(publish(policy, source, tmp_path / "run"))
    assert after[bias].dtype == torch.float32 and torch.equal(after[bias], contents(source)[bias])
    assert {tensor.dtype for name, tensor in after.items() if "e_score" not in name} == {torch.bfloat16}


def test_what_the_model_does_not_use_goes_along(group: None, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", "qwen3_5_text", torch.bfloat16)
    extra = {"mtp.fc.weight": torch.randn(8, 4).bfloat16(), "mtp.scale": torch.randn(3)}
    save_file(contents(source) | extra, source / "model.safetensors", {"format": "pt"})
    policy, weights = load(source)
    assert set(weights.unused) == extra.keys()
    published = publish(policy, source, tmp_path / "run")
    receive_version(VersionReader(tmp_path), published, 1, read_signature(source), tied=False)
    after = contents(published)
    assert all(torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in extra.items())
    index = json.loads((published / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == after.keys() and index["mtp.scale"] == "model-unused.safetensors"


def changed(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Add, replace or (None) remove tensors."""
    kept = {name: tensor for name, tensor in (contents(folder) | change).items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"the weights lack model\.norm\.weight \(1 tensors in all\)"),
        (
            {"model.norm.weight": torch.zeros(7)},
            r"model\.norm\.weight: the checkpoint holds \[7\], the config says \[32\]",
        ),
        ({"model.layers.0.self_attn.sinks": torch.zeros(4)}, r"sinks \(1 such tensors\), for which .* has no place"),
        (
            {"model.layers.0.block_sparse_moe.experts.5.w1.weight": None},
            r"cannot be read as transformers reads them|the checkpoint holds \[.*\], the config says \[6,",
        ),
        (
            {"model.layers.1.block_sparse_moe.experts.5.w2.weight": None},
            r"experts\.0\.w2\.weight and 4 more: the checkpoint holds \[5, 32, 48\], the config says \[6, 32, 48\]",
        ),
    ],
    ids=["missing", "shape", "unknown", "half an expert", "an expert"],
)
def test_other_weights_than_the_configs(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    source = make_checkpoint(tmp_path / "model", "mixtral")
    changed(source, change)
    with pytest.raises(ValueError, match=message):
        map_weights(empty(source), stored_tensors(source))


def test_tied_tensors(group: None, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    table = contents(source)["model.embed_tokens.weight"]
    changed(source, {"lm_head.weight": table.clone()})
    policy, weights = load(source)
    assert weights.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    check_tied(weights)
    published = publish(policy, source, tmp_path / "run", torch.float32)
    assert "lm_head.weight" not in contents(published)
    receive_version(VersionReader(tmp_path), published, 1, read_signature(source), tied=True)
    changed(source, {"lm_head.weight": table + 1})
    with pytest.raises(ValueError, match=r"lm_head\.weight and model\.embed_tokens\.weight with different values"):
        check_tied(map_weights(empty(source), stored_tensors(source)))
    changed(source, {"lm_head.weight": table.clone(), "model.embed_tokens.weight": None})
    _, weights = load(source)
    assert [piece.name for piece in weights.pieces["model.embed_tokens.weight"]] == ["lm_head.weight"]


def test_followed_functions_are_torchs() -> None:
    """Stacked, joined, cut and transposed as torch does it, seen by the values that the pieces fetch."""
    stored = {name: torch.randn(6, 4) for name in "abcd"}
    traced = {name: Traced((6, 4), (Piece.whole(name, (6, 4)),)) for name in stored}

    def made(tensors: dict[str, Any]) -> Any:
        stacks = [torch.stack([tensors["a"], tensors["b"]], dim=0), torch.stack([tensors["c"], tensors["d"]], dim=0)]
        joined = torch.cat(stacks, dim=1)
        cut = torch.chunk(joined, 3, dim=1)[1]  # across the seam
        return torch.transpose(cut, 1, 2).contiguous()

    expected, followed = made(stored), made(traced)
    assert followed.shape == tuple(expected.shape)
    values = torch.full(expected.shape, torch.nan)
    back = {name: torch.full((6, 4), torch.nan) for name in stored}
    for piece in followed.pieces:
        box = tuple(slice(*ends) for ends in piece.model)
        values[box] = piece.to_model(stored[piece.name][tuple(slice(*ends) for ends in piece.stored)])
        assert not piece.keeps_rows((6, 4))
        for first, part in runs(piece.stored, (6, 4), piece.to_stored(expected[box])):
            back[piece.name].view(-1)[first : first + part.numel()] = part.reshape(-1)
    assert torch.equal(values, expected)
    for name, tensor in back.items():
        known = ~tensor.isnan()
        assert known.any() and torch.equal(tensor[known], stored[name][known])
    with pytest.raises(NotImplementedError, match=r"torch\.flip on stored tensors"):
        torch.flip(traced["a"], (0,))  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (3, 1, 2), (2, 3, 4)])
def test_what_is_one_run_is_known_without_cutting(shape: tuple[int, ...]) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    ends_of = [[(a, b) for a in range(size) for b in range(a + 1, size + 1)] for size in shape]
    for box in product(*ends_of):
        part = Piece("a", box, box, tuple(range(len(shape))))
        values = whole[tuple(slice(*ends) for ends in box)]
        cut = list(runs(box, shape, part.to_stored(values)))
        first = only_run(part, shape)
        assert (first is None) == (len(cut) > 1)
        if first is not None:
            assert first == cut[0][0] and torch.equal(values.reshape(-1), cut[0][1].reshape(-1))
    if len(shape) == 2:
        assert only_run(Piece("a", ((0, 3), (0, 4)), ((0, 4), (0, 3)), (1, 0)), shape) is None


def test_adapted_modules_have_the_names_of_the_base() -> None:
    stored = {name: StoredTensor(Path(), "F32", (4, 4)) for name in ("base.q.weight", "base.kv.weight")}
    half = Piece("base.kv.weight", ((0, 2), (0, 4)), ((0, 2), (0, 4)), (0, 1))
    weights = WeightMap(stored, {"m.q.weight": [Piece.whole("base.q.weight", (4, 4))], "m.k.weight": [half]})
    assert weights.base_names(["m.q"]) == {"m.q": "base.q"}
    with pytest.raises(ValueError, match=r"target_modules: the checkpoint holds m\.k within base\.kv\.weight"):
        weights.base_names(["m.q", "m.k"])


def test_an_adapter_is_published_and_merged_under_the_names_of_its_base(group: None, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    short = {name.removeprefix("model."): tensor for name, tensor in contents(source).items()}  # as of the base model
    save_file(short, source / "model.safetensors", {"format": "pt"})
    policy = lora_policy(source)
    tensors = fill_randomly(policy, 0, seed=3)
    assert (
        policy.adapters is not None
        and policy.adapters.base_names["model.layers.0.mlp.up_proj"] == "layers.0.mlp.up_proj"
    )
    paths = RunPaths(tmp_path / "run")
    build_publisher(policy, source, paths, dtype=torch.float32, incarnation=0, model_name=str(source)).publish(1)
    check_adapter(paths.weights_step(1), 1, read_signature(source), max_rank=4)
    stored = read_adapter(paths.weights_step(1))
    adapters_of(policy).load(0, stored)
    renamed = {name.replace("base_model.model.model.", "base_model.model."): tensor for name, tensor in tensors.items()}
    assert stored.keys() == renamed.keys() and all(torch.equal(stored[n], t) for n, t in renamed.items())
    assert merge(paths.weights_step(1), source, tmp_path / "merged") == len(renamed) // 2
    expected = merged_model(source, tensors, scale=2.0).state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert all(torch.allclose(merged[name], tensor, atol=1e-6) for name, tensor in expected.items())
