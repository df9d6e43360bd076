"""Rows of a run's metrics, as its roles write them."""

import json
from pathlib import Path


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def trainer_row(step: int) -> dict:
    return {
        "step": step, "loss": -0.1, "kl": 1e-4, "ratio": 1.0, "reward": 0.5, "tokens_per_s": 1500.0, "lr": 1e-4,
        "grad_norm": 1.0, "mfu": 0.1, "time/step": 2.0, "time/wait": 1.0,
    }  # fmt: skip
