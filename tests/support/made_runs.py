"""Run directories as the product's own writers make them, of any size and without running anything."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.store.attempts import Attempt, write_attempt
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import read_rank_batch, write_batch
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.objectives import LossStats
from prime_hpc.trainer.token_log import TokenLog

if TYPE_CHECKING:
    from prime_hpc.trainer.batching.micro_batches import MicroBatch

BEGAN = 1_790_000_000.0
STEP_S = 2.0
TRAINER = {"wait": 0.5, "forward_backward": 0.9, "optim": 0.1, "publish": 0.3, "checkpoint": 0.1}
"""Seconds of a step; 0.1 more are the rest."""


@dataclass
class Life:
    """An attempt to write: steps first + 1 .. last, how it ended, and the gap before it."""

    first: int
    last: int
    outcome: str | None = "completed"
    cause: str = "done"
    gap_s: float = 5.0
    start_s: float = 10.0
    next: str | None = None
    allocated: dict[str, float] = field(default_factory=dict)


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """A resolved config, as far as the report reads it."""
    tree: dict[str, Any] = {
        "kind": "rl",
        "name": name,
        "max_steps": 40,
        "seed": 0,
        "model": {"name": "none"},
        "trainer": {"num_ranks": 2, "optim": {"lr": 1e-6}},
        "orchestrator": {"env": [{"id": "reverse-text", "name": None}]},
        "inference": {"num_replicas": 1, "data_parallel_size": 2, "tensor_parallel_size": 1, "api_key": "sk-hidden"},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = tree
        for parent in parents:
            node = node[parent]
        node[last] = value
    return tree


def make_run(folder: Path, lives: Sequence[Life], *, config: dict[str, Any] | None = None, seed: int = 0) -> Path:
    """Write a run's config, attempts and metrics."""
    import yaml

    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config or config_of(folder.name), sort_keys=False))
    paths, rng = RunPaths(folder), random.Random(seed)
    trainer, orchestrator = MetricsWriter(paths.metrics("trainer")), MetricsWriter(paths.metrics("orchestrator"))
    now = BEGAN
    for number, life in enumerate(lives, start=1):
        now += life.gap_s
        attempt = Attempt(number, number, now, "first start" if number == 1 else "resumed")
        attempt.resume_step, attempt.allocated = life.first or None, life.allocated
        attempt.seconds = {"start": life.start_s}
        now += life.start_s
        for step in range(life.first + 1, life.last + 1):
            now += STEP_S
            _write_step(trainer, orchestrator, step, now, rng)
        now += 1.0
        if life.outcome is not None:
            attempt.ended, attempt.outcome, attempt.cause, attempt.next = now, life.outcome, life.cause, life.next
        write_attempt(paths.attempts, attempt)
    trainer.close()
    orchestrator.close()
    return folder


def make_runs_of_one_trainer(folder: Path, rates: dict[str, float], steps: int) -> Path:
    """Write a run whose trainer trains several, in turn, and the runs below it."""
    trainer = {"trainer__max_concurrent_runs": len(rates), "model": {"name": "none", "lora": {"rank": 16}}}
    parent = make_run(
        folder, [Life(0, 0, "completed", "no run was left to train")], config=config_of("many", **trainer)
    )
    writer, rng = MetricsWriter(RunPaths(parent).metrics("trainer")), random.Random(7)
    for number, (name, rate) in enumerate(rates.items()):
        life = Life(0, steps, "completed", "done")
        config = config_of(f"run_{name}", trainer__optim__lr=rate, seed=number)
        child = make_run(parent / f"run_{name}", [life], config=config, seed=number)
        RunPaths(child).metrics("trainer").unlink()  # the parent's trainer writes of all its runs
    for step in range(1, steps + 1):
        for number, name in enumerate(rates):
            turn = (step - 1) * len(rates) + number
            when = BEGAN + 15 + STEP_S * turn
            own = {"run": f"run_{name}", "run/step": step, "loss": rng.gauss(0, 0.1), "kl": abs(rng.gauss(0, 0.01))}
            log_at(writer, turn + 1, when, **own, **{"time/step": STEP_S, "time/forward_backward": 0.9, "lr": 1e-3})
    writer.close()
    attempt = Attempt(1, 1, BEGAN + 5, "first start")
    attempt.seconds, attempt.outcome, attempt.cause = {"start": 10.0}, "completed", "no run was left to train"
    attempt.ended = when + 1
    write_attempt(RunPaths(parent).attempts, attempt)
    return parent


def _write_step(trainer: MetricsWriter, orchestrator: MetricsWriter, step: int, now: float, rng: random.Random) -> None:
    reward = 1 - 0.8 * 0.97**step + rng.gauss(0, 0.03)
    spans = [["wait_rollouts", STEP_S, 1.2], ["wait_weights", 0.8, 0.5], ["load", 1.0, 0.2], ["pause", 0.85, 0.05]]
    if (step - 1) % 10 == 0:
        held_out = {"mean_reward": reward + 0.05, "mean_reward_se": 0.025, "num_episodes": 64}
        log_at(orchestrator, step - 1, now - STEP_S, **{f"eval/reverse-text/{k}": v for k, v in held_out.items()})
    times = {f"time/{key}": value for key, value in TRAINER.items()}
    figures = {"loss": rng.gauss(0, 0.1), "kl": abs(rng.gauss(0, 0.01)), "entropy": 1 / (1 + step), "ratio": 1.0}
    figures |= {"num_tokens": 4096.0, "tokens_per_s": 4096.0, "mfu": 0.3, "grad_norm": rng.random(), "lr": 1e-6}
    log_at(trainer, step, now, **figures, **times, **{"time/step": STEP_S})
    waits = {"time/step": STEP_S, "time/wait_rollouts": 1.2, "time/wait_weights": 0.5, "time/wait_servers": 0.0}
    batch = {"reward/mean": reward, "reward/std": 0.2, "completion/tokens_mean": 12.0, "lag/mean": 1.0, "spans": spans}
    log_at(orchestrator, step, now - 0.4, **waits, **batch)


def log_at(writer: MetricsWriter, step: int, when: float, **values: Any) -> None:
    """Log a row with another time than now's."""
    writer.log(step, **values | {"time": round(when, 3)})


def add_batches(folder: Path, steps: Sequence[int], *, sequences: int = 8, seed: int = 0) -> None:
    """Write batches of made-up tokens: a prompt of 4, then 6 that two versions sampled."""
    rng = np.random.default_rng(seed)
    for step in steps:
        count = sequences * 10
        sampled = np.tile(np.arange(10) >= 4, sequences)
        batch = RankBatch(
            token_ids=rng.integers(0, 100, count, dtype=np.int32),
            loss_mask=sampled,
            logprobs=np.where(sampled, -rng.random(count) * 3, 0).astype(np.float32),
            versions=np.where(sampled, max(0, step - 2) + (np.arange(count) % 10 >= 7), -1).astype(np.int32),
            advantages=rng.standard_normal(count).astype(np.float32),
            seq_offsets=np.arange(sequences + 1, dtype=np.int64) * 10,
            micro_offsets=np.array([0, sequences], np.int64),
            temperatures=np.ones(sequences, np.float32),
            rewards=rng.random(sequences).astype(np.float32),
            sample_ids=np.arange(sequences, dtype=np.int64) + step * sequences,
            group_ids=np.arange(sequences, dtype=np.int64) // 4,
            env_ids=np.zeros(sequences, np.int32),
        )
        write_batch(RunPaths(folder), step, [batch], state={})


def add_tokens(folder: Path, steps: Sequence[int]) -> None:
    """Write rollouts with the probabilities of both sides, of batches of `add_batches`: the trainer's are half."""
    log = TokenLog(RunPaths(folder).metrics("tokens"), 2, 1)
    for step in steps:
        batch = read_rank_batch(RunPaths(folder).rollouts_step(step), 0)
        objective = log.watch(batch, lambda *_: (torch.zeros(()), LossStats({}, {})))
        logprobs = torch.from_numpy(batch.logprobs[batch.target_mask()] - np.float32(np.log(2)))
        advantages = torch.from_numpy(batch.advantages[batch.target_mask()])
        objective(cast("MicroBatch", SimpleNamespace(advantages=advantages)), logprobs, logprobs)
        log.write(step)


def add_samples(folder: Path, texts: Sequence[str]) -> None:
    """Write readable samples, one a step."""
    rows = [
        {"step": step, "kind": "train", "env": "reverse-text", "task": step, "reward": 0.5, "advantage": -1.0}
        | {"versions": [0, 1], "prompt": "[user] say it", "completion": text, "truncated": False}
        for step, text in enumerate(texts, start=1)
    ]
    path = RunPaths(folder).metrics("samples")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
