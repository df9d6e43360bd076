"""PPO with a critic in real trainer processes: layouts, exact resumes, steps in which the critic learns alone."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prime_hpc.observe.metrics import read_metrics
from prime_hpc.observe.role_status import read_status
from prime_hpc.store.batches import read_state
from prime_hpc.store.run_paths import RunPaths
from tests.integration.test_trainer import assert_done, full_batch, run_trainer, weights, write_run
from tests.integration.test_trainer_objectives import replay, write_batches
from tests.support.sampled import sampled
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
STEPS = 3
CRITIC = {"lr": 1e-2, "lam": 0.9, "gamma": 0.99, "value_clip": 0.2}
KL = {"in_rewards": True, "estimator": "k1", "coef": 0.1, "target_kl": 0.5, "horizon": 20}
UPDATES = {"num_mini_batches": 2, "epochs_per_batch": 2}
OF_CRITIC = ("critic/loss", "critic/grad_norm", "critic/value", "critic/return")
SHOWN = ("loss", "grad_norm", "ratio", "kl_last", "kl_coef", "kl_penalty", *OF_CRITIC)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose vocabulary two ranks can split."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    even = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    even.resize_token_embeddings(342)
    even.save_pretrained(folder)
    return folder


def token_rewards(batch: Any) -> dict[str, Any]:
    """Of a batch in two mini-batches, whose every sequence ends with a reward, and has one on its way."""
    rewards = np.zeros(batch.num_tokens, np.float32)
    for i, end in enumerate(batch.seq_offsets[1:]):
        trained = np.flatnonzero(batch.loss_mask[:end])
        rewards[trained[-1]], rewards[trained[-3]] = 1 + i % 3, 0.5
    micro = np.repeat(np.arange(batch.num_micro_batches), np.diff(batch.micro_offsets))
    return {"advantages": rewards, "mini_batches": (micro % 2).astype(np.int32)}


def tree(critic: dict[str, Any], **changes: Any) -> dict[str, Any]:
    loss = {"type": "ppo_clip", "kl": KL}
    own = {"loss": loss, "critic": CRITIC | critic, "optim": {"lr": 2e-3}, "threads_per_rank": 1, "keep_weights": 9}
    return own | UPDATES | changes


def written(folder: Path, model: Path, num_ranks: int = 1, **changes: Any) -> RunPaths:
    """A run with its batches."""
    parallel = changes.pop("parallel", {})
    own = tree(changes.pop("critic", {}), num_ranks=num_ranks, parallel=parallel)
    advantage = {"sampling": {"max_tokens": 16}, "advantage": {"type": "gae"}}
    paths = write_run(folder, model, max_steps=STEPS, trainer=own, orchestrator=advantage, **changes)
    parts = num_ranks // (parallel.get("cp", 1) * parallel.get("tp", 1))
    write_batches(paths, range(1, STEPS + 1), parts, token_rewards)
    return paths


def run(folder: Path, model: Path, num_ranks: int = 1, **changes: Any) -> RunPaths:
    paths = written(folder, model, num_ranks, **changes)
    assert_done(run_trainer(paths, num_ranks), paths)
    return paths


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> RunPaths:
    return run(tmp_path_factory.mktemp("whole") / "whole", model, ckpt={"interval": 2})


def test_the_critic_learns_what_rewards_come(whole: RunPaths) -> None:
    rows = read_metrics(whole.metrics("trainer"))
    batch = full_batch(1)
    changed = token_rewards(batch)["advantages"]
    assert rows[0]["critic/value"] == 0  # a new head
    assert np.count_nonzero(changed) == 2 * batch.num_sequences and rows[0]["num_updates"] == 4
    assert rows[2]["critic/loss"] < rows[0]["critic/loss"] and rows[2]["critic/value"] > 0.1
    assert rows[0]["critic/lr"] == CRITIC["lr"]


@pytest.mark.parametrize("num_ranks", sampled([2, 1], 2))
def test_a_resumed_run_is_the_same(tmp_path: Path, model: Path, whole: RunPaths, num_ranks: int) -> None:
    later = written(tmp_path / "later", model, num_ranks, ckpt={})
    shutil.copytree(whole.checkpoint_step(2), later.checkpoint_step(2))
    assert_done(run_trainer(later, num_ranks, PRIMEHPC_RESUME_STEP="2"), later)
    mine, theirs = (read_metrics(paths.metrics("trainer"))[-1] for paths in (whole, later))
    if num_ranks > 1:
        assert all(theirs[key] == pytest.approx(mine[key], rel=2e-3, abs=1e-4) for key in SHOWN)
        return
    assert all(mine[key] == theirs[key] for key in SHOWN)  # to the last bit
    a, b = weights(whole, STEPS), weights(later, STEPS)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_checkpoint_with_a_critic_is_none_of_a_run_without(tmp_path: Path, model: Path, whole: RunPaths) -> None:
    plain = write_run(tmp_path / "plain", model, ckpt={})
    write_batches(plain, range(1, STEPS + 1), 1, token_rewards)
    shutil.copytree(whole.checkpoint_step(2), plain.checkpoint_step(2))
    assert run_trainer(plain, PRIMEHPC_RESUME_STEP="2").returncode != 0
    status = read_status(plain.logs(1, "trainer"))
    assert status is not None and "it holds a critic, and this run has none" in status["error"]


def test_a_refused_step_is_kept_with_its_critic(tmp_path: Path, model: Path) -> None:
    # after its first update the critic's weights are finite, their squares are not
    paths = written(tmp_path / "refused", model, critic={"lr": 1e30})
    assert run_trainer(paths).returncode != 0
    kept = RunPaths(paths.failed_step(1))
    assert read_state(kept.rollouts_step(1))["updates"] == 1
    again = replay(kept.root)
    assert again.returncode == 1, again.stderr
    assert "step 1: the critic's " in again.stdout and "lower trainer.critic.lr" in again.stdout


@pytest.mark.parametrize("parallel", sampled([{"tp": 2}, {"cp": 2}, {}], 3))
def test_two_ranks_train_the_same(tmp_path: Path, model: Path, whole: RunPaths, parallel: dict[str, int]) -> None:
    two = run(tmp_path / "two", model, 2, parallel=parallel)
    for mine, theirs in zip(*(read_metrics(p.metrics("trainer")) for p in (whole, two)), strict=True):
        for key in (*SHOWN, "critic/advantage_std", "critic/explained_variance"):
            assert theirs[key] == pytest.approx(mine[key], rel=2e-3, abs=1e-4), (mine["step"], key)


def test_the_policy_stays_while_the_critic_learns_alone(tmp_path: Path, model: Path, whole: RunPaths) -> None:
    paths = run(tmp_path / "warmup", model, critic={"warmup_steps": 2})
    rows, plain = read_metrics(paths.metrics("trainer")), read_metrics(whole.metrics("trainer"))
    before, alone, after = (weights(paths, version) for version in (1, 2, 3))
    assert all(torch.equal(before[name], alone[name]) for name in before)
    assert any(not torch.equal(alone[name], after[name]) for name in alone)
    assert rows[0]["grad_norm"] == 0 < rows[2]["grad_norm"]
    assert rows[0]["critic/loss"] == plain[0]["critic/loss"]  # of the same batch
    assert rows[0]["kl_coef"] == rows[2]["kl_coef"] == plain[0]["kl_coef"] != plain[1]["kl_coef"]
