"""`orchestrator.bench`: a few batches without a trainer, then what rollouts cost.

Measured is what a run has whose trainer never makes it wait: as many rollouts are in flight as its `async_level` lets
be, those that all began at once are not counted, and new ones begin until the end.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from prime_hpc.config import Experiment
from prime_hpc.observe.bench import NUM_WARM, build_report, mean_of, peak_rss_gib, phases_of
from prime_hpc.orchestrator.rollouts.groups import UNLIMITED_ASYNC
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.run_paths import RunPaths

NUM_MEASURED = 3
"""Batches in the means, at least, unless `max_steps` is too small."""


def in_flight(exp: Experiment) -> int:
    """Rollouts in flight at most: no more than open groups of a run have."""
    config = exp.orchestrator
    return min(config.most_in_flight, (exp.async_level + 1) * exp.episodes_per_step)


def num_warm(exp: Experiment) -> int:
    """Batches of the rollouts that begin together: they end as no later ones do."""
    return max(NUM_WARM, -(-in_flight(exp) // exp.episodes_per_step))


def bench_experiment(exp: Experiment) -> Experiment:
    """Return the same tree with only a few steps and no evaluation."""
    warm = num_warm(exp)
    measured = max(1, min(max(NUM_MEASURED, warm), exp.max_steps - warm))
    changes = {"eval": None, "max_concurrent": min(exp.orchestrator.max_concurrent, in_flight(exp))}
    orchestrator = exp.orchestrator.model_copy(update=changes)
    return exp.model_copy(update={"max_steps": warm + measured, "orchestrator": orchestrator})


def gate_of_bench(exp: Experiment) -> dict[str, Any]:
    """When groups may be opened (`GroupBook`): also for later batches than are taken, so that its end is no lull."""
    last = exp.max_steps + exp.async_level + 1
    return {"async_level": UNLIMITED_ASYNC, "ahead": exp.async_level, "last_batch": last}


@contextmanager
def bench_paths(run_dir: Path) -> Iterator[RunPaths]:
    """Yield a temporary run directory on the run's own file system, so that writing batches costs what it will cost."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=run_dir) as folder:
        yield RunPaths(Path(folder))


def batch_shape(ranks: Sequence[RankBatch]) -> list[dict[str, list[int]]]:
    """Return what the trainer's bench needs to make a batch like this one: see `trainer.data.fake.RankShape`."""
    return [
        {
            "lengths": np.diff(rank.seq_offsets).tolist(),
            "trained": [
                int(rank.loss_mask[a:b].sum())
                for a, b in zip(rank.seq_offsets[:-1].tolist(), rank.seq_offsets[1:].tolist(), strict=True)
            ],
            "micro_offsets": rank.micro_offsets.tolist(),
        }
        for rank in ranks
    ]


def bench_report(
    exp: Experiment, rows: Sequence[dict[str, Any]], shape: list[dict[str, list[int]]], incarnation: int
) -> dict[str, Any]:
    """Return the results of a bench; see `observe.bench`. `shape` is the last batch's."""
    columns = {
        "s/step": "time/step",
        "rollouts/s": "episodes/per_second",
        "sampled tokens/s": "tokens/sampled_per_second",
        "tokens/rollout": "completion/tokens_mean",
        "batch tokens": "batch/tokens",
        "reward": "reward/mean",
    }
    config = exp.orchestrator
    by_seconds = dict.fromkeys(("rollouts/s", "sampled tokens/s"), "time/step")
    warm = num_warm(exp)
    figures = {name: mean_of(rows, key, by_seconds.get(name), num_warm=warm) for name, key in columns.items()}
    return build_report(
        "orchestrator",
        kind=exp.kind,
        setting={
            "batch": f"{exp.num_prompts} prompts x {config.rollouts_per_example}",
            "environments": ", ".join(env.id for env in config.env),
            "in flight at most": in_flight(exp),
        },
        figures=figures | {"memory, GiB": peak_rss_gib()},
        phases=phases_of(rows, num_warm=warm),
        rows=rows,
        num_warm=warm,
        shape=shape,
        incarnation=incarnation,
    )
