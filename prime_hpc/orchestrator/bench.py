"""`orchestrator.bench`: a few batches without a trainer, then what rollouts cost."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from prime_hpc.config import Experiment
from prime_hpc.observe.bench import build_report, mean_of, peak_rss_gib, phases_of
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.run_paths import RunPaths

NUM_BATCHES = 4
"""The first one warms up and is not in the means."""


def bench_experiment(exp: Experiment) -> Experiment:
    """Return the same tree with only a few steps and no evaluation."""
    orchestrator = exp.orchestrator.model_copy(update={"eval": None})
    return exp.model_copy(update={"max_steps": min(exp.max_steps, NUM_BATCHES), "orchestrator": orchestrator})


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
    figures = {name: mean_of(rows, key, by_seconds.get(name)) for name, key in columns.items()}
    return build_report(
        "orchestrator",
        kind=exp.kind,
        setting={
            "batch": f"{exp.num_prompts} prompts x {config.rollouts_per_example}",
            "environments": ", ".join(env.id for env in config.env),
            "in flight at most": config.max_concurrent,
        },
        figures=figures | {"memory, GiB": peak_rss_gib()},
        phases=phases_of(rows, skip=("time/step",)),
        rows=rows,
        shape=shape,
        incarnation=incarnation,
    )
