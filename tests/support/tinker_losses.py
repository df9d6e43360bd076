"""Losses of one and the same data by our own trainer of many runs and by the unchanged `tinker` client."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tinker import types

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import build_rank_batch
from tests.support.many_runs import log_of, make_child, make_parent, put_batch, run_trainer
from tests.support.runs import rows
from tests.support.tinker_world import datum

ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "grad_clip_norm": 1.0}
OPTIM = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "max_norm": 1.0}
MICRO_TOKENS = 60
Samples = Sequence[Mapping[str, Any]]
"""Of a step: `tokens`, `mask` of those that are trained, `advantages` and the sampler's `logprobs`, [n] each."""


def own_batch(data: Samples) -> RankBatch:
    """Micro-batches of at most `MICRO_TOKENS`."""
    micro_batches: list[list[int]] = [[]]
    for i in range(len(data)):
        if sum(len(data[j]["tokens"]) for j in [*micro_batches[-1], i]) > MICRO_TOKENS:
            micro_batches.append([])
        micro_batches[-1].append(i)
    batch = build_rank_batch(
        micro_batches,
        [np.array(row["tokens"], np.int32) for row in data],
        [row["mask"] for row in data],
    )
    mask = np.concatenate([row["mask"] for row in data])
    joined = {k: np.concatenate([row[k] for row in data]).astype(np.float32) for k in ("advantages", "logprobs")}
    joined["logprobs"] = np.where(mask, joined["logprobs"], np.float32(0))
    return replace(batch, versions=np.where(mask, 0, -1).astype(np.int32), **joined)


def client_data(data: Samples, loss: str) -> list[types.Datum]:
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
"""The client's names of losses, and ours."""


def own_losses(directory: Path, model: Path, batches: Mapping[str, Sequence[Samples]]) -> dict[str, list[float]]:
    """Losses of our own many-runs trainer, one run a loss; the n-th has the seed n."""
    parent = make_parent(directory, model, slots=3)
    for i, (name, steps) in enumerate(batches.items()):
        trainer = {"optim": OPTIM, "loss": OWN[name] | {"mismatch": {"warn": None}}}
        paths = make_child(parent, directory, f"run_{name}", seed=i, max_steps=len(steps), trainer=trainer)
        for step, data in enumerate(steps, start=1):
            put_batch(paths, step, own_batch(data), 1)
    assert run_trainer(directory) == 0, log_of(directory)
    found = {name: [row["loss"] for row in rows(directory / f"run_{name}", "trainer")] for name in batches}
    assert {n: len(losses) for n, losses in found.items()} == {n: len(steps) for n, steps in batches.items()}, log_of(
        directory
    )
    return found


def client_losses(adapter: Any, loss: str, batches: Sequence[Samples], adam: Mapping[str, float] = ADAM) -> list[float]:
    """The client's own loop, pipelined as its documentation has it."""
    found = []
    for data in batches:
        passed = adapter.forward_backward(client_data(data, loss), loss)
        stepped = adapter.optim_step(types.AdamParams(**adam))
        found.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return found
