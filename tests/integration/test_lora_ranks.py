"""Adapters over several gloo ranks: one rank's numbers, on every rank, whatever the micro-batches."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from prime_hpc.config.sections.lora import LoraConfig
from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.batching.micro_batches import redistribute
from prime_hpc.trainer.objectives import rl_loss
from tests.support.lora import adapters_of, lora_policy, lora_train_step
from tests.support.ranks import spawn
from tests.support.tiny_model import make_tiny_model, random_rank_batch

pytestmark = pytest.mark.slow

LENGTHS = [[17, 40, 9], [60], [33, 5], [50, 12]]
LOSS = LossConfig.model_validate({"kl": {"coef": 0.1}})
RANK = 2
"""Fewer than the ranks, which divide none of the dimensions either."""


def trained(model: Path) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Two slots after two steps each, in turn, with the base model as the KL's reference."""
    policy = lora_policy(model, num_slots=2, lora=LoraConfig(rank=RANK), ac={"freq": 1})
    train_steps = [lora_train_step(policy, slot, reference=policy) for slot in (0, 1)]
    for slot in (0, 1):
        adapters_of(policy).reset(slot, seed=slot)
    metrics = []
    for step in (1, 2):
        for slot in (0, 1):
            whole = random_rank_batch(LENGTHS, seed=10 * slot + step, step=step)
            batch = redistribute([whole], dist.get_rank(), dist.get_world_size())
            metrics.append(train_steps[slot].run(step, batch, partial(rl_loss, LOSS)))
            assert all(p.grad is None for p in adapters_of(policy).parameters(1 - slot))
    return {f"{slot} {n}": t for slot in (0, 1) for n, t in adapters_of(policy).weights(slot).items()}, metrics


def work(rank: int, world_size: int, store: str, model: Path, expected: Path) -> None:
    """One rank: train, compare with the single process's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    tensors, metrics = trained(model)
    if world_size == 1:
        torch.save((tensors, metrics), expected)
    else:
        alone, told = torch.load(expected)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, alone[name], rtol=1e-4, atol=3e-6, msg=partial("{}: {}".format, name))
        for mine, one in zip(metrics, told, strict=True):
            for key in ("loss", "grad_norm", "kl"):
                assert mine[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key
    dist.destroy_process_group()


def test_ranks_equal_one_process(tmp_path: Path) -> None:
    model, expected = make_tiny_model(tmp_path / "model"), tmp_path / "expected"
    for world_size in (1, 3):
        args = (world_size, str(tmp_path / f"store{world_size}"), model, expected)
        spawn(work, args, world_size)
