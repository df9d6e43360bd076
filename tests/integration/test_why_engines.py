"""vLLM's engines hang in a step, or are stopped: `why` names the process and its line, forked and spawned alike."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from prime_hpc.supervisor.stalls.collect import look_here, report, text_of
from tests.support import hanging_engine
from tests.support.inference_server import ServerProcess, save_model
from tests.support.runs import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(500)]
LIMIT_S = 60.0


class Server:
    """A server whose steps can be made to hang."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, inference: dict[str, Any], spawn: bool) -> None:
        for name, value in hanging_engine.environment(folder, spawn=spawn).items():
            monkeypatch.setenv(name, value)
        self.hang = folder / "hang"
        self.run_dir = folder / "run"
        self.process = ServerProcess(self.run_dir, save_model(folder / "model", tied=True, seed=0), inference)
        self.threads: list[threading.Thread] = []

    def look(self) -> dict[str, Any]:
        return report(self.run_dir, [look_here(self.run_dir, by_name=True)], patience_s=1.0)

    def ask(self) -> None:
        """A request that nobody waits for."""

        def post() -> None:
            body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 40, "temperature": 1.0}}
            with_key = {"headers": {"Authorization": f"Bearer {self.process.key}"}} if self.process.key else {}
            url = f"{self.process.url}/inference/v1/generate"
            self.answers.append(httpx.post(url, json={"model": "policy", **body}, timeout=LIMIT_S, **with_key))

        self.answers: list[httpx.Response] = []
        self.threads.append(threading.Thread(target=post, daemon=True))
        self.threads[-1].start()

    def named(self, kind: str) -> dict[str, Any]:
        """Look until somebody is named."""
        last: dict[str, Any] = {}

        def asked() -> bool:
            last.update(self.look())
            return last["diagnosis"]["kind"] == kind and bool(last["diagnosis"]["is_hang"])

        wait_until(asked, LIMIT_S, f"a cause of kind {kind} is named; last: {last}")
        return last


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    inference, spawn = request.param
    one = Server(tmp_path, monkeypatch, {"api_key": "k", **inference}, spawn)
    try:
        one.process.wait_ready()
        yield one
    finally:
        one.hang.unlink(missing_ok=True)
        one.process.close()


@pytest.mark.parametrize(
    "server",
    [({}, False), ({"gpus_per_engine": 2, "tensor_parallel_size": 2}, False)],
    indirect=True,
    ids=["one", "two-workers"],
)
def test_engines_that_hang(server: Server) -> None:
    parts = {row["word"]["part"]: row for row in server.look()["processes"] if row["word"].get("part")}
    print(parts)
