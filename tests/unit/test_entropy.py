"""The entropy bonus, the control of its coefficient, and the tokens of highest entropy in the whole batch."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from prime_hpc.config.experiment import Experiment
from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.config.sections.trainer import EntropyConfig, LossConfig, OptimConfig, TrainerConfig
from prime_hpc.orchestrator.batching.batch_builder import zero_groups
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.checkpoint.checkpoints import resolve_resume
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.batching.micro_batches import MicroBatch
from prime_hpc.trainer.checkpointing.checkpointer import Checkpointer
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.objectives import LossStats, rl_loss
from prime_hpc.trainer.objectives.entropy import EntropyBonus
from prime_hpc.trainer.objectives.top_share import top_share_threshold
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.train_step import TrainStep
from tests.support.ranks import spawn
from tests.support.tiny_model import make_tiny_model, random_rank_batch

CPU = torch.device("cpu")
LENGTHS = [[20, 9], [15], [], [3, 30]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def build(group: None, model: Path) -> Callable[..., TrainStep]:
    def make(entropy: EntropyConfig | None = None, top: float | None = None) -> TrainStep:
        parallel, section = build_parallel(ParallelDims(), "cpu"), OptimConfig(lr=3e-3, max_norm=0)
        config = ModelConfig(name=str(model), dtype="float32")
        policy = load_policy(config, model, parallel, CPU, reshard_after_forward=True, chunk_tokens=8)
        return TrainStep(
            policy, build_optimizer(policy, section), TrainerConfig(optim=section, no_sync=False), max_steps=99,
            normalize="token", device=CPU, peak_flops=1.0, top_entropy=top,
            entropy=None if entropy is None else EntropyBonus(entropy),
        )  # fmt: skip

    return make


def without_signal(batch: RankBatch) -> RankBatch:
    """Every advantage is 0: nothing but the bonus moves the policy."""
    return replace(batch, advantages=np.zeros_like(batch.advantages))


def masked(batch: RankBatch) -> RankBatch:
    return replace(batch, loss_mask=np.zeros_like(batch.loss_mask))


plain = partial(rl_loss, LossConfig(type="reinforce"))


def test_the_bonus_raises_the_entropy_and_is_part_of_the_loss(build: Any) -> None:
    train_step, batch = build(EntropyConfig(coef=0.5)), without_signal(random_rank_batch(LENGTHS, seed=0))
    rows = [train_step.run(step, batch, plain) for step in range(1, 8)]
    assert rows[-1]["entropy"] > rows[0]["entropy"] + 0.01
    for row in rows:
        assert row["loss"] == pytest.approx(-0.5 * row["entropy"], rel=1e-5) and row["entropy_coef"] == 0.5
    assert "entropy_coef" not in build().run(1, batch, plain)


def test_the_coefficient_goes_up_and_down_with_the_entropy() -> None:
    bonus = EntropyBonus(EntropyConfig(coef=0.01, target=0.3, delta=0.02, max_coef=0.04))
    used = []
    for entropy in (0.2, 0.3, 0.1, 0.5, 0.4, 0.4, 0.2, 0.2):
        used.append(bonus.coef)
        bonus.observe(entropy)
    assert used == pytest.approx([0.01, 0.03, 0.04, 0.04, 0.0, 0.0, 0.0, 0.02])  # none after what is above the target
    assert bonus.state.tolist() == pytest.approx([0.04, 0.2])
    fixed = EntropyBonus(EntropyConfig(coef=0.01))
    fixed.observe(9.0)
    assert fixed.coef == 0.01 and fixed.state.tolist() == [0.01, 0.0]


def test_a_control_goes_on_from_its_checkpoint(build: Any, tmp_path: Path) -> None:
    paths, config = RunPaths(tmp_path / "run"), EntropyConfig(coef=0.1, target=99, delta=0.05)

    def saver(train_step: TrainStep) -> Checkpointer:
        extra = {} if train_step.entropy is None else {"entropy_bonus": train_step.entropy.state}
        optimizer, meta = train_step.optimizer, {"kind": "rl"}
        return Checkpointer(train_step.policy, optimizer, paths, incarnation=0, meta=meta, extra=extra)

    first, second, without = build(config), build(config), build()
    batch = random_rank_batch(LENGTHS, seed=0)
    for step in (1, 2):
        first.run(step, batch, plain)
    saver(first).save(2, progress={}, batch_dir=None)
    saver(second).load(resolve_resume(paths.checkpoints, "latest"))
    rows = [train_step.run(3, batch, plain) for train_step in (first, second)]
    assert rows[0] == rows[1] and rows[0]["entropy_coef"] == pytest.approx(0.2)
    saver(without).load(resolve_resume(paths.checkpoints, "latest"))  # the bonus was taken out
    without.run(3, batch, plain)
    saver(without).save(3, progress={}, batch_dir=None)
    added = build(config)
    saver(added).load(resolve_resume(paths.checkpoints, "latest"))  # and put in: it begins as stated
    assert added.entropy.coef == 0.1


@pytest.mark.parametrize("echo", [False, True])
def test_the_tokens_of_highest_entropy_in_the_batch_train(build: Any, echo: bool) -> None:
    train_step, batch = build(top=0.3), random_rank_batch(LENGTHS, seed=1)
    if echo:
        batch = replace(batch, ce_weights=np.where(batch.loss_mask, 0, 0.5).astype(np.float32))
    entropies: list[np.ndarray] = []
    chosen: list[np.ndarray] = []
    forward = train_step.policy.forward

    def seen(micro: MicroBatch, with_entropy: bool = False, *more: bool) -> Any:
        logprobs, entropy = forward(micro, with_entropy, *more)
        if torch.is_grad_enabled():
            found = entropy.detach().numpy()
            entropies.append(found if micro.trained is None else found[micro.trained])
        return logprobs, entropy

    def objective(micro: MicroBatch, logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        assert micro.high_entropy is not None
        chosen.append(micro.high_entropy.numpy())
        loss, stats = plain(micro, logprobs, weights)
        (grad,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
        assert (grad == torch.where(micro.high_entropy, -weights * micro.advantages, 0)).all()
        return loss, stats

    train_step.policy.forward = seen
    row = train_step.run(1, batch, objective)
    every, taken = np.concatenate(entropies), np.concatenate(chosen)
    count = math.ceil(0.3 * len(every))
    assert len(every) == row["num_targets"] and taken.sum() == count
    assert (np.flatnonzero(taken) == np.sort(np.argsort(-every)[:count])).all()
    assert row["low_entropy_masked"] == pytest.approx(1 - count / len(every))


def test_a_batch_without_targets_changes_nothing(build: Any) -> None:
    train_step = build(EntropyConfig(coef=0.1, target=1.0), 0.2)
    before = [p.detach().full_tensor().clone() for p in train_step.policy.parameters()]
    row = train_step.run(1, masked(random_rank_batch(LENGTHS, seed=0)), plain)
    assert row["loss"] == 0 and train_step.entropy.state.tolist() == [0.1, 0.0]
    assert all(
        torch.equal(a, b.detach().full_tensor()) for a, b in zip(before, train_step.policy.parameters(), strict=True)
    )
    assert train_step.run(2, RankBatch.empty(1), plain)["low_entropy_masked"] == 0


def test_groups_without_signal_reach_a_trainer_with_a_bonus() -> None:
    def zero(**entropy: Any) -> str:
        return zero_groups(Experiment.model_validate({"trainer": {"loss": {"entropy": entropy or None}}}))

    assert zero() == zero(coef=0.0) == "drop"
    assert zero(coef=0.01) == zero(coef=0.0, target=0.3) == "keep"


def run_rank(rank: int, out: str) -> None:
    """One of three ranks, the second without tokens, the third with the first one's."""
    dist.init_process_group("gloo", store=dist.FileStore(f"{out}/store", 3), rank=rank, world_size=3)
    values = torch.arange(10, dtype=torch.float32) if rank != 1 else torch.zeros(0)
    found = [top_share_threshold(values, share, counts=rank < 2).item() for share in (1e-9, 0.01, 0.2, 0.21, 0.3, 1.0)]
    found.append(top_share_threshold(torch.zeros(0), 0.2, counts=True).item())
    Path(f"{out}/{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def test_the_threshold_is_that_of_all_ranks(tmp_path: Path) -> None:
    spawn(run_rank, (str(tmp_path),), 3)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert found == [[9, 9, 8, 7, 7, 0, 0]] * 3


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ({"entropy": {"coef": 2, "target": 0.5}}, "exceeds max_coef"),
        ({"entropy": {"coef": -1}}, "greater than or equal to 0"),
        ({"entropy": {"target": 0}}, "greater than 0"),
        ({"top_entropy_quantile": 0}, "greater than 0"),
        ({"top_entropy_quantile": 1.2}, "less than or equal to 1"),
        ({"type": "vespo", "gamma_pos": (-1, 2)}, "finite and not negative"),
        ({"type": "vespo", "gamma_neg": (3, 0)}, r"gamma_neg = \(3, 0\)"),
    ],
)
def test_settings_that_cannot_work_are_refused(tree: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LossConfig.model_validate(tree)
