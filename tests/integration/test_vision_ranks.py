"""Models that see images over gloo ranks of which some have none: one rank's numbers, trained or frozen."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from prime_hpc.config.sections.trainer import OptimConfig, TrainerConfig
from prime_hpc.trainer.batching.micro_batches import redistribute
from prime_hpc.trainer.objectives import sft_loss
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.train_step import TrainStep
from tests.support.images import OTHER, TALL, WIDE, batch_of, sample, text, vision_policy
from tests.support.ranks import spawn
from tests.support.tiny_vision import make_vision_model

pytestmark = pytest.mark.slow


def trained(model: Path, vision: str) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights after two steps, of whose three micro-batches one holds text alone."""
    policy = vision_policy(model, vision)
    optim = OptimConfig(type="adamw", lr=1e-2, eps=1e-4)
    step = TrainStep(
        policy,
        build_optimizer(policy, optim),
        TrainerConfig(optim=optim, no_sync=False),
        max_steps=100,
        normalize="token",
        device=torch.device("cpu"),
        peak_flops=1e12,
    )
    metrics = []
    for number in (1, 2):
        samples = [
            sample(policy, text(5, number), TALL, text(9, 4)),
            sample(policy, text(4, 1), WIDE, text(6, 5 + number), OTHER),
            sample(policy, text(24, 8)),
            sample(policy, WIDE, text(12, 9)),
        ]
        whole = batch_of(samples, [[0, 1], [2], [3]])
        metrics.append(step.run(number, redistribute([whole], dist.get_rank(), dist.get_world_size()), sft_loss))
    named = {name: p.detach() for name, p in policy.named_parameters()}
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in named.items()}, metrics


def work(rank: int, world_size: int, store: str, model: Path, vision: str, expected: Path) -> None:
    """One rank: train, compare with the single process's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    tensors, metrics = trained(model, vision)
    if world_size == 1:
        torch.save((tensors, metrics), expected)
    else:
        alone, told = torch.load(expected)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, alone[name], rtol=1e-4, atol=3e-5, msg=partial("{}: {}".format, name))
        for mine, one in zip(metrics, told, strict=True):
            for key in ("loss", "grad_norm"):
                assert mine[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "vision"),
    [
        pytest.param("qwen3_vl", "frozen", marks=pytest.mark.exhaustive),
        ("qwen3_vl", "trained"),
        pytest.param("qwen2_5_vl", "trained", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_equal_one_process(tmp_path: Path, family: str, vision: str) -> None:
    model, expected = make_vision_model(tmp_path / "model", family), tmp_path / "expected"
    for world_size in (1, 3):
        spawn(work, (world_size, str(tmp_path / f"store{world_size}"), model, vision, expected), world_size)
