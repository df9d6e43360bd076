"""A bfloat16 policy: its weights are rounded, nothing that a batch says is."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.trainer.batching.micro_batches import MicroBatch, make_micro_batch
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.ops import attention
from prime_hpc.trainer.parallel import build_parallel
from tests.support.tiny_model import make_tiny_model, random_rank_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policy(group: None, folder: Path) -> Policy:
    return load_policy(
        ModelConfig(name=str(folder), dtype="bfloat16"),
        folder,
        build_parallel(ParallelDims(), "cpu"),
        torch.device("cpu"),
        reshard_after_forward=True,
        chunk_tokens=64,
    )


def random_micro_batch(temperature: float) -> MicroBatch:
    batch = random_rank_batch([[40, 3, 17, 64, 2]], seed=0)
    batch.temperatures[:] = temperature
    micro = make_micro_batch(dataclasses.replace(batch, ce_weights=batch.logprobs**2), 0)
    micro.reference_logprobs = micro.behaviour_logprobs * 1.1
    return micro


def test_no_field_of_a_batch_is_rounded_on_its_way_into_the_model(policy: Policy) -> None:
    micro, seen = random_micro_batch(0.7), []
    handle = policy.register_forward_pre_hook(lambda module, args: seen.append(args[0]))  # after FSDP's own
    with policy.packing(micro), torch.no_grad():
        policy(micro)
    handle.remove()
    floats = 0
    for field in dataclasses.fields(MicroBatch):
        given, found = getattr(micro, field.name), getattr(seen[0], field.name)
        if isinstance(given, torch.Tensor):
            floats += given.is_floating_point()
            assert found.dtype == given.dtype and torch.equal(found, given), field.name
    assert floats >= 5


@pytest.mark.parametrize("temperature", [0.6, 0.7, 1.0])
def test_log_probabilities_are_of_the_stated_temperature(policy: Policy, folder: Path, temperature: float) -> None:
    hf: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention.register()
    )
    plain, micro = Policy(copy.deepcopy(hf).eval(), "sdpa", 64, policy.parallel), random_micro_batch(temperature)
    with policy.packing(micro), torch.no_grad():
        found, _ = policy(micro)
        logits = hf.model(input_ids=micro.input_ids, position_ids=micro.position_ids).last_hidden_state[0]
        logits = torch.nn.functional.linear(logits[micro.target_index], hf.lm_head.weight).double() / temperature
        expected = logits.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0]
        assert torch.equal(found, plain(micro)[0])
    assert (found - expected).abs().mean() < 1e-5  # 0.7 in bfloat16 is 0.699: some 1e-2 here


def test_a_policy_is_never_in_training_mode(policy: Policy) -> None:
    assert not any(module.training for module in policy.modules())
