"""The metrics writer of a role, as the experiment asks for it: its file, W&B, TensorBoard, MLflow."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prime_hpc.config.experiment import Experiment
from prime_hpc.observe.metrics import MetricsWriter, wandb_arguments


def open_metrics(
    experiment: Experiment, role: str, path: Path, run_dir: Path, *, beside: bool = False
) -> MetricsWriter:
    """Open a role's metrics; W&B and TensorBoard can never stop it.

    A bench is `<role>-bench` there, W&B's run a new one each time: the curves of a training run of the same directory
    stay its own.

    Args:
        role: `trainer` or `orchestrator`: its own W&B run.
        run_dir: keeps the files of W&B and TensorBoard.
        beside: other runs of this process have writers too.
    """
    bench = {"trainer": experiment.trainer.bench, "orchestrator": experiment.orchestrator.bench}[role]
    name = f"{role}-bench" if bench else role
    wandb, stated = None, experiment.wandb
    if stated is not None:
        wandb = wandb_arguments(
            project=stated.project,
            name=f"{stated.name or experiment.name}-{name}",
            run_id=None if bench else stated.run_id(role),
            offline=stated.offline,
            run_dir=run_dir,
            config=experiment.model_dump(mode="json"),
            role="" if bench else role,
        )
        if beside:  # W&B's own default is one run a process
            wandb["reinit"] = "create_new"
    tensorboard = run_dir / "tensorboard" / name if experiment.tensorboard else None
    return MetricsWriter(path, wandb, tensorboard, _mlflow(experiment, name, run_dir))


def _mlflow(experiment: Experiment, role: str, run_dir: Path) -> dict[str, Any] | None:
    """Return the arguments of the role's MLflow run; None: it is not asked for."""
    stated = experiment.mlflow
    if stated is None:
        return None
    folder = run_dir / "mlflow"
    uri = stated.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or f"file:{folder / 'store'}"
    return {
        "tracking_uri": uri,
        "experiment": stated.experiment,
        "name": f"{experiment.name}-{role}",
        "parameters": dict(_flat(experiment.model_dump(mode="json", exclude_defaults=True))),
        "id_file": folder / f"{role}.id",
    }


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a tree with their dotted paths; secrets are masked in the dump already."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list) and tree and isinstance(tree[0], dict):
        for index, value in enumerate(tree):
            yield from _flat(value, f"{path}.{index}")
    else:
        yield path, str(tree)
