"""vLLM's engines hang in a step, or are stopped: `why` names the process and its line, forked and spawned alike."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from prime_hpc.supervisor.stalls.collect import look_here, report
from prime_hpc.supervisor.stalls.engines import part_name
from tests.support import hanging_engine, inference_server
from tests.support.inference_server import ServerProcess, save_model
from tests.support.runs import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(1200)]
LIMIT_S = 120.0


class Server:
    """A server whose steps can be made to hang."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, inference: dict[str, Any], spawn: bool) -> None:
        for name, value in hanging_engine.environment(folder, spawn=spawn).items():
            monkeypatch.setenv(name, value)
        self.hang = folder / "hang"
        self.run_dir = folder / "run"
        self.process = ServerProcess(self.run_dir, save_model(folder / "model", tied=True, seed=0), inference)
        self.answers: list[int] = []

    def look(self) -> dict[str, Any]:
        return report(self.run_dir, [look_here(self.run_dir, by_name=True)], patience_s=1.0)

    def ask(self) -> None:
        """Send a request without waiting for its answer."""
        self.answers.clear()

        def post() -> None:
            body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 40, "temperature": 1.0}}
            headers = {"Authorization": f"Bearer {self.process.key}"}
            url = f"{self.process.url}/inference/v1/generate"
            answer = httpx.post(url, json={"model": "policy", **body}, timeout=2 * LIMIT_S, headers=headers)
            self.answers.append(answer.status_code)

        threading.Thread(target=post, daemon=True).start()

    def goes_on(self) -> None:
        """The request is answered."""
        wait_until(lambda: self.answers, LIMIT_S, "the request is answered")
        assert self.answers == [200]

    def named(self, kind: str) -> dict[str, Any]:
        """Look until somebody is named."""
        last: dict[str, Any] = {}

        def asked() -> bool:
            last.update(self.look())
            return last["diagnosis"]["kind"] == kind and bool(last["diagnosis"]["is_hang"])

        try:
            wait_until(asked, LIMIT_S, f"a cause of kind {kind} is named")
        except AssertionError as error:
            raise AssertionError(f"{error}; last: {last}") from None
        return last


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    inference, spawn = request.param
    one = Server(tmp_path, monkeypatch, {"api_key": "k", **inference}, spawn)
    monkeypatch.setattr(inference_server, "READY_S", 700)
    try:
        one.process.wait_ready()
        yield one
    finally:
        one.hang.unlink(missing_ok=True)
        one.process.close()


TWO_WORKERS = {"tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("server", "who", "others"),
    [
        (({}, False), "engine core 0", set()),
        ((TWO_WORKERS, False), "worker 1", {"engine core 0", "worker 0"}),
        ((TWO_WORKERS, True), "worker 0", {"engine core 0", "worker 1"}),
    ],
    indirect=["server"],
    ids=["one-process", "forked-workers", "spawned-workers"],
)
def test_the_process_that_hangs_is_named_with_its_line(server: Server, who: str, others: set[str]) -> None:
    calm = server.look()
    there = {part_name(row["word"]): row for row in calm["processes"] if row["word"].get("part")}
    assert there.keys() == {who} | others
    assert all(row["word"]["phase"] == "serving" and row["answer"]["threads"]["MainThread"] for row in there.values())
    assert not calm["diagnosis"]["is_hang"]

    server.ask()  # what is compiled for the first request hangs nowhere
    server.goes_on()
    server.hang.write_text(f"{who} sleep")
    server.ask()
    found = server.named("engine")
    call = "step" if who.startswith("engine") else "execute_model"
    told = "\n".join(found["diagnosis"]["evidence"])
    assert found["diagnosis"]["culprit"].startswith(f"{who} of inference server 0 on "), told
    assert f"does not come back from `{call}`" in found["headline"]
    assert "stand_still (support/hanging_engine.py:" in found["diagnosis"]["where"]
    assert found["diagnosis"]["pid"] == there[who]["pid"]
    assert all(f"{other} on " in told for other in others), told
    server.hang.unlink()
    server.goes_on()

    core = psutil.Process(there["engine core 0"]["pid"])
    core.suspend()
    try:
        server.ask()
        found = server.named("stopped")
        assert found["diagnosis"]["culprit"].startswith("engine core 0 of inference server 0 on ")
        assert found["diagnosis"]["pid"] == core.pid
    finally:
        core.resume()
    server.goes_on()

    server.hang.write_text(f"{who} C")  # it never comes back: the last of this server
    server.ask()
    found = server.named("engine")
    assert found["diagnosis"]["pid"] == there[who]["pid"]
    assert "stand_still (support/hanging_engine.py:" in found["diagnosis"]["where"]
    assert "a call in C holds its interpreter" in "\n".join(found["diagnosis"]["evidence"])
