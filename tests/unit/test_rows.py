"""One sample a row: the same training as each sample alone, whatever micro-batches the batch came in."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.config.sections.trainer import LossConfig, TrainerConfig
from prime_hpc.trainer.batching import rows
from prime_hpc.trainer.batching.micro_batches import make_micro_batch, rows_fit, with_single_rows
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.objectives import rl_loss
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.train_step import TrainStep
from tests.proofs.prove_families import one_rank
from tests.support.every_family import tiny_config, tiny_model
from tests.support.tiny_model import random_rank_batch
from tests.unit.test_self_test import policy_of

LENGTHS = [[40, 3, 17], [], [29, 2]]


def test_rows_of_a_micro_batch_have_one_length() -> None:
    groups = rows.group_rows(np.array([5, 0, 9, 30, 4, 10]), budget=20)
    assert [g.tolist() for g in groups] == [[3], [5, 2], [0, 4]]  # 30 fits nothing and is alone
    assert [g.tolist() for g in rows.group_rows(np.array([3, 3]), budget=0)] == [[0], [1]]


def test_the_batch_holds_the_same_samples() -> None:
    batch = random_rank_batch(LENGTHS, seed=1, vocab_size=96)
    groups = rows.group_rows(np.diff(batch.seq_offsets), budget=64)
    own = with_single_rows(batch, groups, len(groups) + 1)
    assert own.num_micro_batches == len(groups) + 1
    assert [own.sequences_of(i).stop - own.sequences_of(i).start for i in range(len(groups))] == [
        len(g) for g in groups
    ]
    for place, sample in enumerate(np.concatenate(groups)):
        a, b = (slice(*x.seq_offsets[i : i + 2]) for x, i in ((own, place), (batch, sample)))
        assert (own.token_ids[a] == batch.token_ids[b]).all()
        assert (own.advantages[a] == batch.advantages[b]).all()
        assert own.sample_ids[place] == batch.sample_ids[sample]


def test_micro_batches_that_were_dealt_out_by_length_stay() -> None:
    batch = random_rank_batch([[40, 39], [], [17, 16, 17]], seed=1, vocab_size=96)
    assert rows_fit(batch, 80) and not rows_fit(batch, 79)
    assert rows_fit(random_rank_batch([[40], [17]], seed=1), 10)  # a row longer than the budget is alone
    assert not rows_fit(random_rank_batch([[40, 3]], seed=1), 10)


@pytest.mark.parametrize("family", ["lfm2", "mamba"])
def test_gradients_are_those_of_each_sample_alone(family: str) -> None:
    batch = random_rank_batch(LENGTHS, seed=2, vocab_size=96)
    groups = rows.group_rows(np.diff(batch.seq_offsets), budget=90)
    together = with_single_rows(batch, groups, len(groups))
    alone = with_single_rows(batch, [np.array([i]) for i in range(batch.num_sequences)], batch.num_sequences)
    found = []
    for laid_out in (together, alone):
        policy = policy_of(family, single_rows=True)
        for index in range(laid_out.num_micro_batches):
            micro = make_micro_batch(laid_out, index, single_rows=True)
            with policy.packing(micro):
                logprobs, _ = policy(micro)
                (logprobs * micro.advantages).sum().backward()
        found.append([p.grad for p in policy.parameters()])
    assert len(groups) < batch.num_sequences
    for got, expected in zip(*found, strict=True):
        assert expected is not None
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * max(1.0, float(expected.abs().max())))


def test_a_step_does_not_depend_on_how_the_batch_came_packed(tmp_path: Path) -> None:
    tiny_model(tiny_config("lfm2")).save_pretrained(tmp_path)
    config, cpu, trainer = ModelConfig(name=str(tmp_path), dtype="float32"), torch.device("cpu"), TrainerConfig()
    batch, found = random_rank_batch(LENGTHS, seed=3, vocab_size=96), []
    packed_otherwise = replace(batch, micro_offsets=np.array([0, 0, 5]))
    with one_rank():
        for asked, row_tokens in ((batch, 64), (packed_otherwise, 64), (batch, 1)):
            parallel = build_parallel(ParallelDims(), "cpu")
            policy = load_policy(config, tmp_path, parallel, cpu, reshard_after_forward=True, chunk_tokens=512)
            train_step = TrainStep(
                policy,
                build_optimizer(policy, trainer.optim, None),
                trainer,
                max_steps=10,
                normalize="token",
                device=cpu,
                peak_flops=1.0,
                row_tokens=row_tokens,
            )
            assert train_step.lay_out(asked).num_micro_batches == (3 if row_tokens == 64 else 5)
            found.append(train_step.run(1, asked, partial(rl_loss, LossConfig())))
    for metrics in found[1:]:
        assert metrics["shared_tokens"] == 0
        for name in ("loss", "grad_norm", "entropy", "ratio"):
            assert metrics[name] == pytest.approx(found[0][name], rel=1e-5)


def test_the_layout_that_is_asked_for(tmp_path: Path) -> None:
    """`trainer.rows`: of a family that could be packed the samples come out the same; one that cannot is refused."""
    batch, found, cpu = random_rank_batch(LENGTHS, seed=3, vocab_size=96), [], torch.device("cpu")
    for family in ("qwen3", "lfm2"):
        tiny_model(tiny_config(family)).save_pretrained(tmp_path / family)
    with one_rank():
        parallel = build_parallel(ParallelDims(), "cpu")
        load = partial(load_policy, parallel=parallel, device=cpu, reshard_after_forward=True, chunk_tokens=512)
        for choice in ("auto", "packed", "single"):
            config = ModelConfig(name="q", dtype="float32")
            policy = load(config, tmp_path / "qwen3", rows=choice)
            assert policy.single_rows == (choice == "single")
            micro = make_micro_batch(batch, 0, single_rows=policy.single_rows)
            assert micro.input_ids.shape == ((3, 40) if choice == "single" else (1, 60))
            with policy.packing(micro), torch.no_grad():
                found.append(policy(micro)[0])
        with pytest.raises(ValueError, match=r"model.name = x: trainer.rows = packed: models of model_type lfm2"):
            load(ModelConfig(name="x", dtype="float32"), tmp_path / "lfm2", rows="packed")
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[2], found[0], rtol=0, atol=1e-5)
