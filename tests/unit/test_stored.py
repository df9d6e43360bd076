"""Checkpoints on disk: a mixture's experts are stored apart, read into fused tensors, and published apart again."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.store.model.files import stored_tensors
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.weights.publish import Publisher
from tests.support.tiny_families import VOCAB, make_family


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(VOCAB)[None]).logits


def test_a_mixture_is_read_and_published_under_its_own_names(group: None, mixture: Path, tmp_path: Path) -> None:
    policy = load_policy(
        ModelConfig(name=str(mixture), dtype="float32"),
        mixture,
        build_parallel(ParallelDims(), "cpu"),
        torch.device("cpu"),
        reshard_after_forward=True,
        chunk_tokens=64,
    )
    by_transformers = dict(AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).named_parameters())
    for name, tensor in policy.named_weights():
        assert torch.equal(tensor.full_tensor(), by_transformers[name]), name  # type: ignore[attr-defined]
    paths = RunPaths(tmp_path / "run")
    Publisher(policy, mixture, paths, dtype=torch.float32, incarnation=0, model_name="mixture").publish(1)
    published = paths.weights_step(1)
    assert stored_tensors(published).keys() == stored_tensors(mixture).keys()
    assert torch.equal(logits(published), logits(mixture))


def test_a_dense_model_has_no_experts_to_split(mixture: Path, tmp_path: Path) -> None:
    from prime_hpc.trainer.parallel import Parallel
    from prime_hpc.trainer.parallel.expert import split_experts

    dense = AutoModelForCausalLM.from_pretrained(make_family(tmp_path, "llama"))
    place = Parallel(ParallelDims(dp_shard=2, ep=2), 0, None, None, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ep = 2: LlamaForCausalLM has no experts to split; set it to 1"):
        split_experts(dense, place)
    place = Parallel(ParallelDims(dp_shard=3, ep=3), 0, None, None, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ep = 3 does not divide the model's 8 experts"):
        split_experts(AutoModelForCausalLM.from_pretrained(mixture), place)
