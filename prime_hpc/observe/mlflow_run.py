"""A role's MLflow run: its numbers, sent by a thread of their own, so that no server can hold a role up.

MLflow's HTTP calls wait and are repeated for minutes where a server hangs: what is not sent within `CLOSE_S` of the end
is lost there (the JSON-lines file has it). Needs `pip install mlflow-skinny`.
"""

import os
import queue
import re
import threading
from pathlib import Path
from typing import Any

from loguru import logger

CLOSE_S = 10.0
MOST_WAITING = 10_000
_NOT_ALLOWED = re.compile(r"[^\w\-./ ]")
"""MLflow takes letters, digits and these signs in the names of metrics."""


class MlflowRun:
    """One run of an MLflow experiment, begun, or gone on with where `id_file` names one.

    Args:
        tracking_uri: a server's address, or `file:...` of a folder.
        experiment: name under which runs are collected.
        parameters: the config, flat.
        id_file: keeps the run's id for later attempts.
    """

    def __init__(
        self, *, tracking_uri: str, experiment: str, name: str, parameters: dict[str, str], id_file: Path
    ) -> None:
        self._arguments = (tracking_uri, experiment, name, parameters, id_file)
        self._status = "FINISHED"
        self._waiting: queue.Queue[tuple[int, float, dict[str, float]] | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, step: int, at: float, numbers: dict[str, float]) -> None:
        """Hand one step's numbers over; returns at once. `at`: epoch seconds."""
        try:
            self._waiting.put_nowait((step, at, numbers))
        except queue.Full:
            pass

    def close(self, status: str = "FINISHED") -> None:
        """Wait `CLOSE_S` for what is on its way. `status`: how the run ended, in MLflow's words."""
        self._status = status
        try:
            self._waiting.put(None, timeout=1.0)
        except queue.Full:
            return
        self._thread.join(timeout=CLOSE_S)
        if self._thread.is_alive():
            logger.warning(f"MLflow did not take everything within {CLOSE_S:.0f} s")

    def _run(self) -> None:
        try:
            client, run_id = self._begin()
            while (item := self._waiting.get()) is not None:
                self._send(client, run_id, *item)
            client.set_terminated(run_id, self._status)
        except Exception as error:  # noqa: BLE001 - whatever MLflow does, the run goes on
            logger.warning(f"MLflow is off from here: {error} (needs pip install mlflow-skinny)")

    def _begin(self) -> tuple[Any, str]:
        if self._arguments[0].startswith("file:"):  # newer ones take a folder from those alone who insist
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        uri, experiment, name, parameters, id_file = self._arguments
        client = MlflowClient(tracking_uri=uri)
        if id_file.exists():
            run_id = id_file.read_text(encoding="ascii", errors="replace").strip()
            try:
                client.update_run(run_id, status="RUNNING")
                return client, run_id
            except MlflowException as error:  # of another server, or deleted there
                logger.warning(f"MLflow does not know the run of {id_file} ({error}); a new one begins")
        found = client.get_experiment_by_name(experiment)
        where = found.experiment_id if found is not None else client.create_experiment(experiment)
        run_id = client.create_run(where, run_name=name).info.run_id
        entries = [Param(key, value[:500]) for key, value in parameters.items()]
        for start in range(0, len(entries), 100):  # as many as one request may hold
            client.log_batch(run_id, params=entries[start : start + 100])
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(run_id + "\n", encoding="ascii")
        return client, run_id

    @staticmethod
    def _send(client: Any, run_id: str, step: int, at: float, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        entries = [Metric(_NOT_ALLOWED.sub("_", key), value, int(at * 1000), step) for key, value in numbers.items()]
        for start in range(0, len(entries), 1000):
            client.log_batch(run_id, metrics=entries[start : start + 1000])
