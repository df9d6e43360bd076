"""The tinker service with the unchanged client of PyPI: losses are our own path's, what was saved outlives the service,
adapters do not disturb each other, and what is wrong is said to whom it concerns."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import build_rank_batch
from tests.support.many_runs import log_of, make_child, make_parent, put_batch, run_trainer
from tests.support.runs import rows
from tests.support.tinker_world import TinkerWorld, datum
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 4
LENGTHS = (17, 40, 9, 33)
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_clip_norm": 1.0}
OPTIM = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "max_norm": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerWorld]:
    world = TinkerWorld(tmp_path_factory.mktemp("tinker") / "service", model)
    world.start()
    yield world
    world.kill()


def samples(seed: int, step: int) -> list[dict[str, Any]]:
    """Tokens of a few sequences, which of them are trained, advantages and the sampler's log-probabilities."""
    rng = np.random.default_rng([seed, step])
    made = []
    for n in LENGTHS:
        tokens = rng.integers(0, 300, n).tolist()
        mask = np.arange(n) >= n // 3
        mask[0] = False
        advantages, logprobs = rng.standard_normal(n), rng.normal(-6, 0.3, n)
        made.append({"tokens": tokens, "mask": mask, "advantages": advantages, "logprobs": logprobs})
    return made


def own_batch(data: list[dict[str, Any]]) -> RankBatch:
    batch = build_rank_batch(
        [[0, 1], [2, 3]],
        [np.array(row["tokens"], np.int32) for row in data],
        [row["mask"] for row in data],
    )
    mask = np.concatenate([row["mask"] for row in data])
    joined = {k: np.concatenate([row[k] for row in data]).astype(np.float32) for k in ("advantages", "logprobs")}
    joined["logprobs"] = np.where(mask, joined["logprobs"], np.float32(0))
    return replace(batch, versions=np.where(mask, 0, -1).astype(np.int32), **joined)


def client_data(data: list[dict[str, Any]], loss: str) -> list[types.Datum]:
    """The same, so that the client's sums are our means."""
    num_targets = sum(int(row["mask"].sum()) for row in data)
    made = []
    for row in data:
        share = row["mask"][1:] / num_targets
        if loss == "cross_entropy":
            made.append(datum(row["tokens"], weights=share))
        else:
            values = {"advantages": share * row["advantages"][1:], "logprobs": row["logprobs"][1:]}
            made.append(datum(row["tokens"], **values))
    return made


OWN: dict[str, dict[str, Any]] = {
    "cross_entropy": {"type": "nll"},
    "ppo": {"type": "ppo_clip", "normalize": "token"},
    "importance_sampling": {"type": "ppo_clip", "normalize": "token", "clip_low": 1.0, "clip_high": 1e6},
}


def own_losses(directory: Path, model: Path) -> dict[str, list[float]]:
    """Losses of our own many-runs trainer, one run a loss."""
    parent = make_parent(directory, model, slots=3)
    for i, (name, loss) in enumerate(OWN.items()):
        trainer = {"optim": OPTIM, "loss": loss | {"mismatch": {"warn": None}}}
        paths = make_child(parent, directory, f"run_{name}", seed=i, max_steps=STEPS, trainer=trainer)
        for step in range(1, STEPS + 1):
            put_batch(paths, step, own_batch(samples(i, step)), 1)
    assert run_trainer(directory) == 0, log_of(directory)
    return {name: [row["loss"] for row in rows(directory / f"run_{name}", "trainer")] for name in OWN}


def train(adapter: Any, seed: int, loss: str, steps: range, adam: dict[str, float] = ADAM) -> list[float]:
    """The client's own loop, pipelined as its documentation has it."""
    found = []
    for step in steps:
        passed = adapter.forward_backward(client_data(samples(seed, step), loss), loss)
        stepped = adapter.optim_step(types.AdamParams(**adam))
        found.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return found


def test_losses_are_those_of_our_own_trainer(tmp_path: Path, model: Path, world: TinkerWorld) -> None:
    own = own_losses(tmp_path / "own", model)
    theirs: dict[str, list[float]] = {}
    for seed, loss in enumerate(OWN):
        with world.client() as client:
            adapter = client.create_lora_training_client(base_model=str(model), rank=4, seed=seed).result()
            theirs[loss] = train(adapter, seed, loss, range(1, STEPS + 1))
    for loss, curve in own.items():
        print(f"{loss}: own {curve}, client {theirs[loss]}")
        assert len(curve) == STEPS and np.ptp(curve) > 0
        np.testing.assert_allclose(theirs[loss], curve, rtol=2e-5, atol=2e-6)
