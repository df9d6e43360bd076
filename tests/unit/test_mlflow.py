"""MLflow beside the JSON-lines file: against its real client and a file store, and against a server that hangs."""

import socket
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from prime_hpc.config import Experiment
from prime_hpc.config.monitors import open_metrics
from prime_hpc.observe import mlflow_run


def experiment(**mlflow: str) -> Experiment:
    tree = {"name": "try", "max_steps": 7, "orchestrator": {"env": [{"id": "reverse-text"}]}, "mlflow": mlflow}
    return Experiment.model_validate({**tree, "inference": {"api_key": "sk-secret-of-the-engines"}})


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)


def test_a_later_attempt_goes_on_in_the_same_runs(tmp_path: Path) -> None:
    for attempt, role in ((1, "trainer"), (2, "trainer"), (1, "orchestrator")):
        writer = open_metrics(experiment(experiment="mine"), role, tmp_path / f"{role}.jsonl", tmp_path)
        for step in (2 * attempt - 1, 2 * attempt):
            writer.log(step, loss=0.5 / step, text="no number", **{"tokens/s, all": 3})
        writer.close()
    client = MlflowClient(f"file:{tmp_path / 'mlflow' / 'store'}")
    found = client.get_experiment_by_name("mine")
    assert found is not None
    runs = {run.info.run_name: run for run in client.search_runs([found.experiment_id])}
    assert set(runs) == {"try-trainer", "try-orchestrator"}
    trainer = runs["try-trainer"]
    history = client.get_metric_history(trainer.info.run_id, "loss")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [(n, 0.5 / n) for n in (1, 2, 3, 4)]
    assert trainer.data.metrics["tokens/s_ all"] == 3 and "text" not in trainer.data.metrics
    assert trainer.data.params["max_steps"] == "7" and trainer.data.params["orchestrator.env.0.id"] == "reverse-text"
    assert "sk-secret" not in str(trainer.data.params) and trainer.info.status == "FINISHED"


def test_a_role_that_crashes_has_failed_with_all_that_it_logged(tmp_path: Path) -> None:
    writer = open_metrics(experiment(experiment="mine"), "trainer", tmp_path / "trainer.jsonl", tmp_path)
    with pytest.raises(RuntimeError, match="in step 2"):
        try:
            writer.log(1, loss=0.5)
            raise RuntimeError("in step 2")
        finally:
            writer.close()
    client = MlflowClient(f"file:{tmp_path / 'mlflow' / 'store'}")
    found = client.get_experiment_by_name("mine")
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    assert (run.info.status, run.data.metrics["loss"]) == ("FAILED", 0.5)
    open_metrics(experiment(experiment="mine"), "trainer", tmp_path / "trainer.jsonl", tmp_path).close()
    assert client.get_run(run.info.run_id).info.status == "FINISHED", "of its next attempt"


def test_a_server_that_hangs_or_is_not_there_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_run, "CLOSE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        writer = open_metrics(experiment(tracking_uri=uri), "trainer", tmp_path / "t.jsonl", tmp_path)
        began = time.monotonic()
        for step in range(1, mlflow_run.MOST_WAITING + 10):
            writer.log(step, loss=1.0)
        writer.close()
        assert time.monotonic() - began < 60
    assert len((tmp_path / "t.jsonl").read_text().splitlines()) == mlflow_run.MOST_WAITING + 9


def test_a_run_that_the_server_does_not_know_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "trainer.id").write_text("0123456789abcdef0123456789abcdef\n")
    writer = open_metrics(experiment(experiment="mine"), "trainer", tmp_path / "trainer.jsonl", tmp_path)
    writer.log(1, loss=0.5)
    writer.close()
    client = MlflowClient(f"file:{tmp_path / 'mlflow' / 'store'}")
    found = client.get_experiment_by_name("mine")
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    assert run.data.metrics["loss"] == 0.5
    assert (tmp_path / "mlflow" / "trainer.id").read_text().strip() == run.info.run_id
