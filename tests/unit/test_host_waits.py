"""The host waits for the device in no micro-batch: what is read of a step is read once, after its last one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.config.sections.trainer import EntropyConfig, LossConfig, OptimConfig, TrainerConfig
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import MicroBatch, build_rank_batch, make_micro_batch
from prime_hpc.trainer.batching.prefetch_to_device import MicroBatches
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.objectives import rl_loss
from prime_hpc.trainer.objectives.entropy import EntropyBonus
from prime_hpc.trainer.ops.transfer import map_tensors, pack, unpack
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel import Parallel, build_parallel
from prime_hpc.trainer.parallel.expert import expert_modules, split_experts
from prime_hpc.trainer.slow_ranks import EVERY, SlowRanks
from prime_hpc.trainer.train_step import TrainStep
from tests.support.host_waits import host_waits
from tests.support.tiny_model import make_tiny_model, random_rank_batch

CPU = torch.device("cpu")
ALONE = Parallel(ParallelDims(), 0, None, None, None, None, None)  # type: ignore[arg-type]
"""The layout of one rank, without meshes."""


@pytest.fixture(scope="module")
def build(group: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainStep]:
    """(experts, model section) -> a train step on one rank, which times its own part as one of two does."""
    folders: dict[int, Path] = {}

    def make(experts: int = 0, **model: Any) -> TrainStep:
        if experts not in folders:
            folders[experts] = make_tiny_model(tmp_path_factory.mktemp("model"), experts=experts)
        folder, section = folders[experts], OptimConfig(lr=1e-3)
        config = ModelConfig.model_validate({"name": str(folder), "dtype": "float32", **model})
        parallel = build_parallel(ParallelDims(), "cpu")
        policy = load_policy(config, folder, parallel, CPU, reshard_after_forward=True, chunk_tokens=64)
        adapter = None
        if policy.adapters is not None:
            policy.adapters.reset(0, 0)
            adapter = policy.adapters.parameters(0)
        return TrainStep(
            policy, build_optimizer(policy, section, adapter), TrainerConfig(optim=section, no_sync=False),
            max_steps=9, normalize="sequence", device=CPU, peak_flops=1.0, slow_ranks=OneOfTwo(CPU, ["a", "b"]),
            entropy=EntropyBonus(EntropyConfig(target=9)),
        )  # fmt: skip

    return make


class OneOfTwo(SlowRanks):
    """Of a rank whose neighbour's times are its own."""

    def compare(self, step: int, table: Any) -> None:
        super().compare(step, np.repeat(table, 2, axis=0))


def grouped(num_micro: int) -> RankBatch:
    """Micro-batches of four samples with one prompt each, ragged."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 300, 12)
    ids = [np.append(prompt, rng.integers(0, 300, n)).astype(np.int32) for n in (5, 9, 3, 17) * num_micro]
    masks = [np.arange(len(row)) >= 12 for row in ids]
    micro = np.arange(len(ids)).reshape(num_micro, 4).tolist()
    batch = build_rank_batch(micro, ids, masks, rng.standard_normal(len(ids)).astype(np.float32))
    return replace(batch, group_ids=batch.sample_ids // 4)


def waits_of(train_step: TrainStep, batch: RankBatch, loss: LossConfig, step: int = 1) -> list[str]:
    """Waits of the host in one train step."""
    with host_waits() as waits:
        train_step.run(step, batch, partial(rl_loss, loss))
    return waits.found


CASES = {
    "dense": (0, {}, {}),
    "lora": (0, {"lora": {"rank": 4}}, {}),
    "recomputed": (0, {"ac": {"mode": "selective"}}, {}),
    "mixture of experts": (4, {}, {}),
    "sequence-level weight": (0, {}, {"type": "vespo"}),
    "sequence-level correction": (0, {}, {"type": "gspo", "correction": {"level": "sequence", "reject": {}}}),
}


@pytest.mark.parametrize(("experts", "model", "loss"), CASES.values(), ids=CASES)
def test_more_micro_batches_are_no_more_waits(build: Any, experts: int, model: Any, loss: Any) -> None:
    train_step, config = build(experts, **model), LossConfig.model_validate(loss)
    train_step.run(1, grouped(1), partial(rl_loss, config))  # lazy initialisation
    few, many = waits_of(train_step, grouped(1), config, EVERY), waits_of(train_step, grouped(4), config, 2 * EVERY)
    assert len(many) == len(few), sorted(set(many))
    assert len(few) <= 5, few  # the denominators: made, read; the metrics: made, read (a copy and its numbers)


def test_times_of_ranks_are_apart_from_a_step_s_metrics_which_a_replay_compares(build: Any) -> None:
    train_step = build()
    metrics = train_step.run(EVERY, grouped(1), partial(rl_loss, LossConfig()))
    assert train_step._slow_ranks.figures == {"ranks/slow": 0.0}
    assert not [key for key in metrics if key.startswith("ranks/")]


def test_neither_are_tokens_with_a_cross_entropy_of_their_own(build: Any) -> None:
    train_step, config = build(), LossConfig()

    def batch(num: int) -> RankBatch:
        made = grouped(num)
        return replace(made, ce_weights=np.where(made.loss_mask, 0, 0.5).astype(np.float32))

    few, many = waits_of(train_step, batch(1), config), waits_of(train_step, batch(3), config, 2)
    assert len(many) == len(few), sorted(set(many))


def test_neither_are_targets_of_a_truncated_distribution(build: Any) -> None:
    train_step, config = build(), LossConfig()

    def batch(num: int) -> RankBatch:
        made = grouped(num)
        ones = np.ones(made.num_sequences, np.float32)
        return replace(made, top_ps=0.9 * ones, top_ks=(20 * ones).astype(np.int32), min_ps=0.01 * ones)

    few, many = waits_of(train_step, batch(1), config), waits_of(train_step, batch(3), config, 2)
    assert len(many) == len(few), sorted(set(many))


def test_the_counter_sees_what_waits() -> None:
    x = torch.arange(4.0, requires_grad=True)
    with host_waits() as waits:
        for wait in (
            lambda: x.sum().item(), lambda: bool(x.detach().any()), lambda: x[x > 1], lambda: x.tolist(), x.cpu,
            lambda: torch.bincount(torch.arange(3)), lambda: x.detach().numpy(), lambda: torch.tensor([1.0]),
            lambda: torch.arange(2).repeat_interleave(torch.arange(2)), lambda: torch.nonzero(x),
        ):  # fmt: skip
            before = len(waits.found)
            wait()
            assert len(waits.found) == before + 1, waits.found[before:]
        seen = len(waits.found)
        (x[torch.tensor([1, 2])] * 2).sum().backward()
        torch.arange(2).repeat_interleave(torch.arange(2), output_size=1)
        assert len(waits.found) == seen + 1  # the index's `torch.tensor`


def test_expert_parallel_waits_once_a_layer(build: Any) -> None:
    train_step = build(4)
    (block, *_) = expert_modules(train_step.policy.hf)
    plain, D = type(block).forward, train_step.policy.hf.config.hidden_size
    hidden, weights = torch.randn(11, D, requires_grad=True), torch.rand(11, 2)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(11)])
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("ep",))
    alone = type(block)(train_step.policy.hf.config)
    with torch.no_grad():
        for own in alone.parameters():
            own.normal_(std=0.3)
    expected = plain(alone, hidden, chosen, weights)
    (wanted,) = torch.autograd.grad(expected.square().sum(), hidden)

    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = alone

    vars(alone)["_is_expert_parallel"] = True  # as the model's loading marks it
    split_experts(Holder(), replace(ALONE, ep=mesh))
    with host_waits() as waits:
        found = alone(hidden, chosen, weights)
        (grad,) = torch.autograd.grad(found.square().sum(), hidden)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad, wanted)
    assert len([w for w in waits.found if "expert.py" in w or "transfer.py" in w]) == 1, waits.found


@pytest.mark.parametrize("ahead", [False, True])
def test_micro_batches_come_in_order_and_whole(ahead: bool) -> None:
    batch = random_rank_batch([[20, 9], [15], [], [3, 3, 30]], seed=0)
    with MicroBatches(partial(make_micro_batch, batch), 4, CPU, ahead=ahead) as micros:
        found = list(micros)
    assert len(found) == len(micros) == 4
    for i, micro in enumerate(found):
        expected = make_micro_batch(batch, i)
        assert torch.equal(micro.input_ids, expected.input_ids) and torch.equal(micro.targets, expected.targets)


def test_all_steps_copy_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: object())
    batch, gpu = random_rank_batch([[20, 9]], seed=0), torch.device("cuda", 7)
    steps = [MicroBatches(partial(make_micro_batch, batch), 1, gpu) for _ in range(2)]
    assert steps[0]._stream is steps[1]._stream is not None


def test_an_error_in_the_thread_comes_out() -> None:
    batch = random_rank_batch([[20, 9], [15]], seed=0)
    broken = replace(batch, temperatures=None)  # type: ignore[arg-type]
    with (
        pytest.raises(TypeError),
        MicroBatches(partial(make_micro_batch, broken), 2, CPU, ahead=True) as micros,
    ):
        list(micros)


def tensors_of(micro: MicroBatch) -> list[torch.Tensor]:
    """All of them, in the order of `map_tensors`."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(micro, collect)
    return found


def test_a_packed_micro_batch_is_the_same_again() -> None:
    micro = make_micro_batch(grouped(1), 0)
    assert micro.packing.spread is not None and micro.packing.gather is not None
    host = tensors_of(micro)
    assert len(host) > 12
    there = iter(unpack(*pack(host, pin=False), host))
    again = map_tensors(micro, lambda _: next(there))
    copies = tensors_of(again)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(host, copies, strict=True))
    assert len({c.untyped_storage().data_ptr() for c in copies}) == 1 and again.num_shared == micro.num_shared
    assert again.packing.spread is not micro.packing.spread


def test_without_buckets_nothing_is_padded() -> None:
    micro = make_micro_batch(grouped(1), 0, pads=False)
    assert micro.packing.buckets == [] and micro.packing.gather is None
