"""Run directories with known costs, for the tests of `prime-hpc simulate`."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from prime_hpc.config.experiment import Experiment
from prime_hpc.observe.metrics import MetricsWriter
from prime_hpc.simulate.calibration import Calibration, calibrate
from prime_hpc.simulate.measured import read_measured
from prime_hpc.store.attempts import Attempt, write_attempt
from prime_hpc.store.run_paths import RunPaths


def tree_of(name: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """An experiment, small; keys with `__` between sections."""
    tree: dict[str, Any] = {
        "name": name,
        "output_dir": str(folder),
        "launch": "local",
        "max_steps": 40,
        "async_level": 1,
        "model": {"name": str(folder / "model")},
        "trainer": {"num_ranks": 2},
        "orchestrator": {
            "batch_size": 32,
            "rollouts_per_example": 4,
            "max_concurrent": 32,
            "sampling": {"max_tokens": 200},
            "env": [{"id": "reverse-text", "max_turns": 1}],
        },
        "inference": {"data_parallel_size": 2},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


TOKEN_S, SHARED_S, OUTSIDE_S = 0.01, 0.002, 0.3


def rows_of(step: int, rng: random.Random, level: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """A step's rows of trainer and orchestrator, by costs that are known."""
    served: dict[str, Any] = {
        "time/step": 4.0,
        "time/wait_weights": 0.5,
        "time/wait_rollouts": 3.3,
        "time/wait_servers": 0.0,
    }
    episodes = []
    for _ in range(8):
        tokens, in_flight = rng.randrange(20, 200), rng.uniform(4, 32)
        seconds = OUTSIDE_S + tokens * (TOKEN_S + SHARED_S * in_flight / 2)  # two engines a server
        episodes.append([seconds / (1 - 0.1 / 4.0 if level else 1), tokens, in_flight])
    served |= {"reward/mean": 0.5, "completion/tokens_mean": 100.0, "batch/tokens": 6400.0, "groups/in_batch": 8}
    served |= {"groups/completed": 8, "queue/idle_share": 0.1, "lag/mean": 0.9, "episode_sample": episodes}
    served |= {"time/weight_update": 0.4, "time/weight_pause": 0.1, "policy/served_version": step}
    trained = {"time/step": 4.0, "time/wait": 1.0, "time/forward_backward": 2.0, "time/optim": 0.2}
    trained |= {"time/publish": 0.6, "num_tokens": 6400.0, "loss": 0.1}
    return trained, served


def make_measured(folder: Path, steps: Sequence[int] = range(1, 31), *, is_over: bool = True, **changes: Any) -> Path:
    """A run directory by the product's own writers."""
    experiment = Experiment.model_validate(tree_of(folder.name, folder.parent, **changes))
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(experiment.model_dump(mode="json")))
    (folder / "lock.json").write_text(json.dumps({"host": "other-node"}))
    attempt = Attempt(1, 1, 100.0, "first start", seconds={"start": 30.0})
    attempt.ended, attempt.outcome = (500.0, "completed") if is_over else (None, None)
    write_attempt(RunPaths(folder).attempts, attempt)
    rng = random.Random(0)
    writers = [MetricsWriter(RunPaths(folder).metrics(role)) for role in ("trainer", "orchestrator")]
    for step in steps:
        for writer, row in zip(writers, rows_of(step, rng, experiment.async_level), strict=True):
            writer.log(step, **row)
    for writer in writers:
        writer.close()
    return folder


def calibrated(*folders: Path) -> Calibration:
    found = calibrate([read_measured(folder, folder.name) for folder in folders])
    assert isinstance(found, Calibration), found
    return found
