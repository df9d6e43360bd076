"""Metrics of a role: `metrics/<role>.jsonl` is the truth; W&B, TensorBoard and MLflow are guests that can never stop a
run."""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loguru import logger
from pydantic_core import from_json

from prime_hpc.observe import wandb_run
from prime_hpc.observe.line_file import LineFile
from prime_hpc.observe.mlflow_run import MlflowRun

STEP_KEYS = ("time/step", "reward/mean")
"""A row with one of these is that of a step; others are evaluations, which may speak of an earlier version."""
_TAIL_BYTES = 16_384
"""More than any row is long."""
READ_BYTES = 1 << 18
"""Of a file that is read from its beginning, at once: rows are long."""


def jsonable(value: Any) -> Any:
    """Return a figure as JSON can hold it: numpy scalars are unwrapped, non-finite floats become strings."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def last_step(path: Path) -> int:
    """Step of the last row of a metrics file; 0 where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            rows = [row for row in map(parse_row, file.read().splitlines()) if row is not None]
    except OSError:
        return 0
    return next((row["step"] for row in reversed(rows) if isinstance(row.get("step"), int)), 0)


class MetricsWriter:
    """Appends one JSON object a step and forwards the numbers to W&B, TensorBoard and MLflow where asked."""

    def __init__(
        self,
        path: Path,
        wandb: dict[str, Any] | None = None,
        tensorboard: Path | None = None,
        mlflow: dict[str, Any] | None = None,
    ) -> None:
        """Open `path` for appending.

        Args:
            wandb: `wandb_arguments`, or None.
            mlflow: arguments of `MlflowRun`, or None.
        """
        self._file = LineFile(path)
        self._lock = threading.Lock()
        self._wandb: Any = None
        if wandb is not None:
            self._start_wandb(wandb)
        self._tensorboard: Any = None
        if tensorboard is not None:
            self._start_tensorboard(tensorboard)
        self._mlflow = MlflowRun(**mlflow) if mlflow is not None else None

    def _start_wandb(self, arguments: dict[str, Any]) -> None:
        try:
            self._wandb = wandb_run.begin(arguments)
        except Exception as error:  # noqa: BLE001 - whatever W&B does, the run goes on
            logger.warning(f"W&B is off for this run: {error}")

    def _start_tensorboard(self, folder: Path) -> None:
        try:
            from tensorboard.summary import Writer

            self._tensorboard = Writer(str(folder))
        except Exception as error:  # noqa: BLE001 - see _start_wandb
            logger.warning(f"TensorBoard is off for this run: {error} (pip install tensorboard)")

    def log(self, step: int, **values: Any) -> None:
        """Write one line `{"step": step, "time": unix seconds, **values}`; thread-safe. Raises as `LineFile.append`."""
        row = {"step": step, "time": round(time.time(), 3), **{k: jsonable(v) for k, v in values.items()}}
        with self._lock:
            self._file.append(json.dumps(row) + "\n")
        self._forward(step, row)

    def _forward(self, step: int, row: dict[str, Any]) -> None:
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float))}
        if self._tensorboard is not None:
            try:
                for name, value in numbers.items():
                    if name not in ("step", "time"):
                        self._tensorboard.add_scalar(name, float(value), step=step, wall_time=row["time"])
                self._tensorboard.flush()
            except Exception as error:  # noqa: BLE001 - see _start_wandb
                logger.warning(f"TensorBoard stopped accepting metrics: {error}")
                self._tensorboard = None
        if self._mlflow is not None:
            own = {name: float(value) for name, value in numbers.items() if name not in ("step", "time")}
            self._mlflow.log(step, row["time"], own)
        if self._wandb is not None:
            try:
                self._wandb.log(numbers)
            except Exception as error:  # noqa: BLE001 - see _start_wandb
                logger.warning(f"W&B stopped accepting metrics: {error}")
                self._wandb = None

    def log_samples(
        self, step: int, rows: Sequence[Mapping[str, Any]], distributions: Mapping[str, Sequence[float]]
    ) -> None:
        """Give W&B, where it is on, a table of rollouts and histograms; the file has the numbers alone.

        Args:
            rows: of one form; a column for each of their fields.
            distributions: values by name; those without any are left out.
        """
        if self._wandb is None:
            return
        try:
            import wandb

            there = {name: list(values) for name, values in distributions.items() if values}
            found: dict[str, Any] = {f"distribution/{name}": wandb.Histogram(values) for name, values in there.items()}
            if rows:
                cells = [[step, *(_cell(row.get(name)) for name in rows[0])] for row in rows]
                found["samples"] = wandb.Table(columns=["step", *rows[0]], data=cells)
            if found:
                self._wandb.log({"step": step, **found})
        except Exception as error:  # noqa: BLE001 - see _start_wandb
            logger.warning(f"W&B did not take the samples of step {step}: {error}")

    def log_bench(self, step: int, results: Mapping[str, float]) -> None:
        """Give W&B, TensorBoard and MLflow, where they are on, the results of a bench; to W&B as a table too.

        Args:
            step: its last.
            results: by name; the file does not have them, which is of steps.
        """
        row = {"step": step, "time": round(time.time(), 3)}
        self._forward(step, row | {f"bench/{name}": jsonable(value) for name, value in results.items()})
        if self._wandb is None:
            return
        try:
            import wandb

            cells = [[name, float(value)] for name, value in results.items()]
            self._wandb.log({"step": step, "bench": wandb.Table(columns=["figure", "mean"], data=cells)})
        except Exception as error:  # noqa: BLE001 - see _start_wandb
            logger.warning(f"W&B did not take the table of the bench: {error}")

    def close(self) -> None:
        """Flush and close; W&B gets the chance to finish. While an exception is on its way the role has crashed, and
        W&B and MLflow show its run as failed."""
        crashed = sys.exc_info()[0] is not None
        with self._lock:
            self._file.close()
        if self._mlflow is not None:
            self._mlflow.close("FAILED" if crashed else "FINISHED")
            self._mlflow = None
        if self._tensorboard is not None:
            try:
                self._tensorboard.close()
            except Exception as error:  # noqa: BLE001 - see _start_wandb
                logger.warning(f"TensorBoard did not finish: {error}")
            self._tensorboard = None
        if self._wandb is not None:
            wandb_run.finish(self._wandb, int(crashed))
            self._wandb = None


def _cell(value: Any) -> Any:
    """Return what a table's cell can hold: numbers and text; anything else as text."""
    value = jsonable(value)
    return value if isinstance(value, (int, float, str)) or value is None else json.dumps(value, default=str)


def wandb_arguments(
    *,
    project: str,
    name: str,
    run_id: str | None,
    offline: bool | None,
    run_dir: Path,
    config: dict[str, Any],
    role: str = "",
) -> dict[str, Any]:
    """`MetricsWriter`'s W&B arguments from the experiment's values; files stay in the run directory.

    Args:
        project: as in the experiment, like `offline` (None: as W&B itself decides) and `config`.
        run_id: stated; None: that of the role's earlier life in this run directory, else a new one.
        run_dir: keeps `wandb/`.
        role: whose run it is, for the file that keeps its id; "" keeps none.
    """
    arguments: dict[str, Any] = {"project": project, "name": name, "dir": str(run_dir), "config": config}
    if role:
        arguments["id_file"] = run_dir / "wandb" / f"{role}.id"
        run_id = run_id or _stored_id(arguments["id_file"])
    if run_id:
        arguments |= {"id": run_id, "resume": "allow"}
    if offline is not None:
        arguments["mode"] = "offline" if offline else "online"
    return arguments


def _stored_id(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def number_of(value: Any) -> float | None:
    """Return a metric's value as a float, "nan" and "inf" too, as the writer spells them; None: it is no number."""
    if type(value) is float:
        return value
    if type(value) is not int and value not in ("nan", "inf", "-inf"):
        return None
    try:
        return float(value)
    except OverflowError:  # JSON's integers have any length
        return math.inf if value > 0 else -math.inf


def parse_row(line: bytes) -> dict[str, Any] | None:
    """One line of a metrics file; None for a torn one (a killed writer)."""
    try:
        row = from_json(line, cache_strings="keys")  # a third of the time of `json`
    except ValueError:  # torn, or half of a surrogate pair, which Python can write and read
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


def read_metrics(path: Path, wants: Callable[[str], bool] | None = None) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; torn lines are left out.

    `wants`: says which values to keep; all those of a hundred thousand steps take a gigabyte.
    """
    rows = iterate_metrics(path)
    if wants is None:
        return list(rows)
    kept: dict[tuple[str, ...], list[str]] = {}  # most rows have the same metrics
    found = []
    for row in rows:
        if (names := tuple(row)) not in kept:
            kept[names] = [name for name in names if wants(name)]
        found.append({name: row[name] for name in kept[names]})
    return found


def iterate_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the same one after another, of a file that may be too large for the memory."""
    if not path.exists():
        return
    with path.open("rb", buffering=READ_BYTES) as file:
        yield from (row for row in map(parse_row, file) if row is not None)
