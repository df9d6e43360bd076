"""Router replay in the trainer: the named experts compute, weighed by live logits, however tokens are laid out."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_hpc.config.sections.common import ActivationCheckpointConfig, ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import make_micro_batch
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.objectives import loss_of
from prime_hpc.trainer.ops.router_replay import check_recorded
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.parallel.tensor import local
from prime_hpc.trainer.trainer import Base, build_train_step
from tests.support.tiny_families import make_family, random_routing
from tests.support.tiny_model import make_tiny_model, random_rank_batch
from tests.unit.test_critic import experiment_of

LENGTHS = [[20, 9, 31], [15, 1], [41]]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("model") / "moe", "qwen3_moe")


def load(source: Path, **changes: Any) -> Policy:
    config = ModelConfig.model_validate({"name": str(source), "dtype": "float32"} | changes)
    parallel = build_parallel(ParallelDims(), "cpu")
    options: Any = {"reshard_after_forward": True, "chunk_tokens": 64, "replays_routers": True}
    return load_policy(config, source, parallel, CPU, **options)


def batch_of(seed: int = 0) -> RankBatch:
    """Random tokens, and random experts for most of them."""
    batch = random_rank_batch(LENGTHS, seed=seed, vocab_size=132)
    return dataclasses.replace(
        batch, routed=random_routing(batch.num_tokens, seed), temperatures=np.ones(6, np.float32)
    )


def computed(policy: Policy, batch: RankBatch, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities of all targets, and the gradients of their sum."""
    policy.zero_grad(set_to_none=True)
    found = []
    for index in range(batch.num_micro_batches):
        micro = make_micro_batch(batch, index, single_rows=policy.single_rows, **options)
        with policy.packing(micro):
            logprobs, _ = policy(micro)
            logprobs.sum().backward()
        found.append(logprobs.detach())
    grads = {name: p.grad.full_tensor().clone() for name, p in policy.hf.named_parameters()}
    return torch.cat(found), grads


def reference(folder: Path, batch: RankBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same in float64, one sample after the other, with routers written out here."""
    assert batch.routed is not None
    hf: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    named: list[torch.Tensor] = []

    def route(gate: Any, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden @ gate.weight.T
        likely = logits.softmax(-1)
        own = likely.topk(gate.top_k).indices
        ids = torch.where(named[0][:, layer] == 255, own, named[0][:, layer])
        weights = torch.take_along_dim(likely, ids, -1)
        return logits, weights / weights.sum(-1, keepdim=True), ids

    for layer, block in enumerate(hf.model.layers):
        if hasattr(block.mlp, "gate"):
            block.mlp.gate.forward = lambda hidden, gate=block.mlp.gate, layer=layer: route(gate, layer, hidden)
    found = []
    for start, stop in zip(batch.seq_offsets[:-1], batch.seq_offsets[1:], strict=True):
        ids = torch.from_numpy(batch.token_ids[start:stop].astype(np.int64))
        named[:] = [torch.from_numpy(batch.routed[start:stop].astype(np.int64))]
        logprobs = hf(input_ids=ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
        found.append(logprobs[torch.from_numpy(batch.loss_mask[start + 1 : stop])])
    every = torch.cat(found)
    every.sum().backward()
    return every.detach(), {name: p.grad for name, p in hf.named_parameters()}


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of a gradient, relative to its tensor's largest entry."""
    assert one.keys() == other.keys()
    return max(float((one[k] - other[k]).abs().max() / other[k].abs().max().clamp_min(1e-9)) for k in one)


def test_named_experts_compute_and_gradients_are_theirs(group: None, folder: Path) -> None:
    policy, batch = load(folder), batch_of()
    found, grads = computed(policy, batch)
    want, want_grads = reference(folder, batch)
    assert (found - want).abs().max() < 2e-5
    assert gap(grads, want_grads) < 2e-5
    assert all(float(grads[name].abs().max()) > 1e-4 for name in grads if name.endswith("gate.weight"))
    live, live_grads = computed(policy, dataclasses.replace(batch, routed=None))
    assert (live - want).abs().max() > 0.1 and gap(live_grads, want_grads) > 0.1
    assert batch.routed is not None
    shuffled = np.random.default_rng(1).permutation(batch.routed)
    wrong, _ = computed(policy, dataclasses.replace(batch, routed=shuffled))
    assert (wrong - want).abs().max() > 0.1


def test_every_update_follows_the_experts_and_the_critic_its_own_routers(group: None, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, experts=8, expert_width=32)
    trainer: dict[str, Any] = {"router_replay": True, "num_mini_batches": 2, "epochs_per_batch": 2}
    trainer |= {"optim": {"lr": 0, "weight_decay": 0}, "loss": {"type": "ppo_clip", "correction": {}}}
    experiment, policy = experiment_of(folder, {"lr": 0}, trainer=trainer), load(folder)
    none: Any = None
    step = build_train_step(Base(policy, folder, CPU, 1.0, none, none), experiment)
    assert step.critic is not None
    with torch.no_grad():
        torch.nn.init.normal_(local(step.critic.policy.hf.score.weight), generator=torch.Generator().manual_seed(0))
    batch = dataclasses.replace(batch_of(), mini_batches=np.array([0, 0, 0, 1, 1, 1], np.int32))
    sampled = np.zeros(batch.num_tokens, np.float32)
    sampled[batch.target_mask()] = computed(policy, batch)[0]
    batch = dataclasses.replace(batch, logprobs=sampled)
    found = step.run(1, batch, loss_of(experiment))
    assert found["num_updates"] == 4 and found["logprob_diff_max"] < 1e-4 and abs(found["kl_last"]) < 1e-5
    assert batch.routed is not None
    shuffled = np.random.default_rng(1).permutation(batch.routed)
    wrong = step.run(2, dataclasses.replace(batch, routed=shuffled), loss_of(experiment))
    assert wrong["logprob_diff"] > 0.1 and wrong["kl_last"] > 0.01
    assert wrong["critic/value"] == pytest.approx(found["critic/value"], rel=1e-5) and abs(found["critic/value"]) > 1e-3


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_computed_again_follows_the_same_experts(group: None, folder: Path, mode: Any) -> None:
    batch = batch_of()
    want, want_grads = computed(load(folder), batch)
    found, grads = computed(load(folder, ac=ActivationCheckpointConfig(mode=mode)), batch)
    assert torch.equal(found, want)
    assert gap(grads, want_grads) < 1e-6


def test_a_prompt_is_shared_as_far_as_its_experts_are(group: None, folder: Path) -> None:
    batch = random_rank_batch([[30, 30, 30]], seed=3, vocab_size=132)
    ids, routed = batch.token_ids.reshape(3, 30).copy(), random_routing(90, 3).reshape(3, 30, 3, 2)
    ids[:, :20], routed[:, :20] = ids[0, :20], routed[0, :20]
    routed[2, 12] = (routed[2, 12] + 1) % 8
    parts: dict[str, Any] = {"token_ids": ids.reshape(-1), "routed": routed.reshape(90, 3, 2)}
    batch = dataclasses.replace(batch, group_ids=np.zeros(3, np.int64), **parts)
    assert make_micro_batch(batch, 0).num_shared == 24
    policy = load(folder)
    found, grads = computed(policy, batch)
    want, want_grads = computed(policy, batch, share_prefixes=False)
    assert (found - want).abs().max() < 1e-5 and gap(grads, want_grads) < 1e-5
    alone = dataclasses.replace(batch, routed=None)
    assert make_micro_batch(alone, 0).num_shared == 40


def test_a_row_for_each_sample_is_routed_as_a_packed_one(group: None, folder: Path) -> None:
    policy, batch = load(folder), batch_of()
    want, want_grads = computed(policy, batch)
    policy.single_rows = True
    found, grads = computed(policy, batch)
    assert (found - want).abs().max() < 1e-5 and gap(grads, want_grads) < 1e-5


def test_batches_that_are_not_of_the_model_are_refused(group: None, folder: Path) -> None:
    policy, batch = load(folder), batch_of()
    assert batch.routed is not None
    check_recorded(policy.hf, batch)
    check_recorded(policy.hf, RankBatch.empty(1))
    with pytest.raises(ValueError, match="holds no recorded experts"):
        check_recorded(policy.hf, dataclasses.replace(batch, routed=None))
    with pytest.raises(ValueError, match="up to 8 in 3 layers"):
        check_recorded(policy.hf, dataclasses.replace(batch, routed=np.where(batch.routed == 7, 8, batch.routed)))
    with pytest.raises(ValueError, match="in 2 layers"):
        check_recorded(policy.hf, dataclasses.replace(batch, routed=batch.routed[:, :2]))


def test_a_dense_model_has_nothing_to_follow(group: None, tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path)
    with pytest.raises(ValueError, match="trainer.router_replay: Qwen3ForCausalLM has no experts"):
        load(dense)


def test_routers_in_float32(group: None, folder: Path) -> None:
    """Of bfloat16 hidden states and weights: the products of exactly these, not rounded to bfloat16."""
    policy = load(folder, dtype="bfloat16", router_dtype="float32")
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    gate = policy.hf.model.layers[0].mlp.gate
    gate.register_forward_hook(lambda module, args, out: seen.append((args[0], module.weight.detach().clone(), out[0])))
    batch = batch_of()
    computed(policy, batch)
    hidden, weight, logits = seen[0]
    assert hidden.dtype == weight.dtype == torch.bfloat16 and logits.dtype == torch.float32
    exact = hidden.double() @ weight.double().T
    assert (logits - exact).abs().max() < 1e-5 < (exact.bfloat16() - exact).abs().max()
