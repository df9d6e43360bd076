"""A parent and its runs for tests of the trainer that trains many: directories, scripted batches, the process."""

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file

from prime_hpc.config import Experiment, write_snapshot
from prime_hpc.config.child_config import as_child
from prime_hpc.config.snapshot import Shared, share
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.child_runs import list_children, read_state
from prime_hpc.store.errors import StoreError
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.batching.micro_batches import redistribute
from tests.support import forked
from tests.support.tiny_model import random_rank_batch

REPO = Path(__file__).resolve().parents[2]
SHAPES = [[[17, 40, 9], [60]], [[33, 5], [50, 12], [8]], [[21, 21]]]
"""Micro-batches of a step, one shape for each seed."""
_SHARED: list[Shared] = []


def shared_snapshot() -> Shared:
    """The lock of all snapshots of a test session, gathered once."""
    if not _SHARED:
        _SHARED.append(share(["test"]))
    return _SHARED[0]


def make_parent(directory: Path, model: Path, *, slots: int = 2, num_ranks: int = 1, **changes: Any) -> Experiment:
    """Write a parent's run directory; keys of `trainer` are added to what runs of a test share."""
    own = changes.pop("trainer", {})
    tree: dict[str, Any] = {
        "name": directory.name,
        "output_dir": str(directory.parent),
        "seq_len": 64,
        "model": {"name": str(model), "dtype": "float32", "lora": {"rank": 4}},
        "orchestrator": {"sampling": {"max_tokens": 16}},
        "trainer": {
            "max_concurrent_runs": slots,
            "runs_idle_timeout_s": 0,
            "threads_per_rank": 1,
            "num_ranks": num_ranks,
            "batch_timeout_s": 60,
            "micro_batch_tokens": 128,
            **own,
        },
    } | changes
    experiment = Experiment.model_validate(tree)
    write_snapshot(experiment, directory, ["test"], shared_snapshot())
    return experiment


def child_of(parent: Experiment, directory: Path, name: str, *, lr: float = 1e-2, **changes: Any) -> Experiment:
    """A child's experiment; keys of `trainer` and `orchestrator` are added to the parent's."""
    tree = parent.model_dump(mode="json") | {"max_steps": 3}
    tree["trainer"] |= {"optim": {"lr": lr}, "keep_weights": 99, "max_concurrent_runs": 1}
    for section in ("trainer", "orchestrator"):
        tree[section] |= changes.pop(section, {})
    return as_child(Experiment.model_validate(tree | changes), directory, name)


def make_child(parent: Experiment, directory: Path, name: str, **changes: Any) -> RunPaths:
    """Write a child as `runs add` does: aside, then one rename."""
    child = child_of(parent, directory, name, **changes)
    stage = directory / f".adding-{name}"
    write_snapshot(child, stage, ["test"], shared_snapshot())
    stage.rename(directory / name)
    return RunPaths(directory / name)


def batch_of(seed: int, step: int) -> RankBatch:
    """The whole batch of a run's step, in two mini-batches for those that take them; runs differ by their seed."""
    micros = SHAPES[seed % len(SHAPES)]
    dealt = [i % 2 for i, micro in enumerate(micros) for _ in micro]
    batch = random_rank_batch(micros, seed=1000 * seed + step, step=step)
    return replace(batch, mini_batches=np.array(dealt, np.int32))


def put_batch(paths: RunPaths, step: int, batch: RankBatch, num_ranks: int, incarnation: int = 0) -> None:
    """Write one batch as an orchestrator would."""
    ranks = [redistribute([batch], r, num_ranks) for r in range(num_ranks)]
    write_batch(paths, step, ranks, state={"step": step}, incarnation=incarnation)


def put_batches(paths: RunPaths, seed: int, steps: range, num_ranks: int = 1) -> None:
    """Write the batches of steps before the run's first attempt."""
    for step in steps:
        put_batch(paths, step, batch_of(seed, step), num_ranks)


def environment(**extra: str) -> dict[str, str]:
    """Of a trainer process."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)} | extra


def start_trainer(run_dir: Path, num_ranks: int = 1, **extra: str) -> forked.ForkedProcess:
    """The trainer's ranks on a run directory, a parent's or a single run's."""
    torchrun = ["prime_hpc.trainer.torchrun", f"--nproc-per-node={num_ranks}", "-m"] if num_ranks > 1 else []
    command = [*torchrun, "prime_hpc.trainer.main", str(run_dir)]
    with (run_dir / "trainer.log").open("a") as log:
        return forked.ForkedProcess(command, env=environment(**extra), stdout=log, stderr=log)


def run_trainer(run_dir: Path, num_ranks: int = 1, timeout_s: float = 200, **extra: str) -> int:
    """Run it to its end; returns the exit code."""
    process = start_trainer(run_dir, num_ranks, **extra)
    try:
        return process.wait(timeout_s)
    finally:
        process.kill()


def log_of(run_dir: Path) -> str:
    """What the trainer said."""
    return (run_dir / "trainer.log").read_text()


def versions(paths: RunPaths) -> dict[int, dict[str, torch.Tensor]]:
    """Every published adapter."""
    folders = sorted(paths.weights.glob("step_*"))
    return {int(f.name[5:]): load_file(f / "adapter_model.safetensors") for f in folders}


def largest_difference(a: Mapping[int, Any], b: Mapping[int, Any]) -> float:
    """Over all versions and tensors, relative to the tensor's largest element; 0 only where bit for bit equal.

    Raises AssertionError where the versions or their tensors are not the same ones.
    """
    assert a.keys() == b.keys() and a, (sorted(a), sorted(b))
    worst = 0.0
    for version in a:
        assert a[version].keys() == b[version].keys()
        for name, tensor in a[version].items():
            other = b[version][name]
            if not torch.equal(tensor, other):
                scale = max(float(other.abs().max()), 1e-30)
                worst = max(worst, float((tensor.double() - other.double()).abs().max()) / scale)
    return worst


def order_of(run_dir: Path) -> list[str]:
    """Which run each of the parent's steps was of."""
    path = run_dir / "metrics" / "trainer.jsonl"
    return [json.loads(line)["run"] for line in path.read_text().splitlines()]


class Feeder:
    """Scripted orchestrators: for every run that trains, its batches in order, under its attempt's number.

    Args:
        parent_dir: where the runs are.
        seeds: of each run's batches.
        num_ranks: of the trainer.
        last: up to this step of each run (all others: their `max_steps`).
    """

    def __init__(
        self, parent_dir: Path, seeds: Mapping[str, int], num_ranks: int = 1, last: Mapping[str, int] | None = None
    ) -> None:
        self._dir, self._seeds, self._num_ranks, self._last = parent_dir, seeds, num_ranks, dict(last or {})
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        self._thread.join(10)

    def release(self, name: str) -> None:
        """From its next attempt on, a run gets all its batches."""
        self._last.pop(name, None)

    def _run(self) -> None:
        done: set[tuple[str, int]] = set()
        while not self._closing.wait(0.05):
            for name in list_children(self._dir):
                state = read_state(self._dir / name)
                if state is None or state.phase != "training" or (name, state.incarnation) in done:
                    continue
                if name not in self._seeds:
                    continue
                done.add((name, state.incarnation))
                paths = RunPaths(self._dir / name)
                last = min(self._last.get(name, state.max_steps), state.max_steps)
                for step in range((state.resume_step or 0) + 1, last + 1):
                    try:
                        batch = batch_of(self._seeds[name], step)
                        put_batch(paths, step, batch, self._num_ranks, state.incarnation)
                    except (StoreError, OSError):  # the test deleted the directory, or began another attempt
                        break


def broken(batch: RankBatch) -> RankBatch:
    """The same with an advantage that makes the loss infinite."""
    advantages = np.array(batch.advantages)
    advantages[batch.loss_mask] = 3e38
    return RankBatch(**{**vars(batch), "advantages": advantages})
