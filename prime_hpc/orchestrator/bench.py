"""`orchestrator.bench`: a few batches without a trainer, then a table of what rollouts cost. Used by `main`."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prime_hpc.config import Experiment
from prime_hpc.store.layout import RunPaths

NUM_BATCHES = 4
"""The first one warms up and is not in the table's mean."""


def bench_experiment(exp: Experiment) -> Experiment:
    """The same tree with only a few steps and no evaluation."""
    orchestrator = exp.orchestrator.model_copy(update={"eval": None})
    return exp.model_copy(update={"max_steps": min(exp.max_steps, NUM_BATCHES), "orchestrator": orchestrator})


@contextmanager
def bench_paths(run_dir: Path) -> Iterator[RunPaths]:
    """A throw-away run directory on the run's own file system, so that writing batches costs what it will cost."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=run_dir) as folder:
        yield RunPaths(Path(folder))


def bench_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line a batch and their mean without the first."""
    columns = {
        "seconds": "time/step",
        "rollouts/s": "episodes/per_second",
        "tokens/s": "tokens/sampled_per_second",
        "tokens/rollout": "completion/tokens_mean",
        "reward": "reward/mean",
    }
    measured = rows[1:] or rows
    mean = {key: sum(row[key] for row in measured) / len(measured) for key in columns.values()}
    lines = ["batch   " + "".join(f"{name:>16}" for name in columns)]
    named = [(str(i + 1), row) for i, row in enumerate(rows)] + [("mean", mean)]
    lines += [f"{name:<8}" + "".join(f"{row[key]:>16.3f}" for key in columns.values()) for name, row in named]
    return "\n".join(lines)
