"""The supervisor's look at its servers: real HTTP with the key of the attempt, rates, and servers that say nothing."""

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest

from prime_hpc.client.keys import KEY_VARIABLES
from prime_hpc.supervisor.roles.process import Role
from prime_hpc.supervisor.roles.spec import RoleSpec
from prime_hpc.supervisor.server_loads import ServerLoads, doing

WAIT_S = 280
TEXT = """\
# HELP vllm:num_requests_running Requests.
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 4.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:generation_tokens_total{engine="0"} %d
something else
vllm:num_requests_waiting{engine="1"} nonsense
"""


class Server:
    """Answers /metrics to those who send the key."""

    def __init__(self) -> None:
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path == "/metrics" and self.headers["Authorization"] == "Bearer secret"
                outer.asked += known
                body = (TEXT % (1000 * outer.asked)).encode() if known else b""
                self.send_response(200 if known else 401)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *words: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def role(self, tmp_path: Any, index: int, state: str = "ready", port: int | None = None) -> Role:
        url = f"http://127.0.0.1:{port or self.http.server_port}/health"
        spec = RoleSpec(name="inference", index=index, command=["true"], start_timeout_s=1, health_url=url)
        role = Role(spec, tmp_path, {})
        role.state = cast(Any, state)
        return role


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.http.shutdown()
    found.http.server_close()


def until(question: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not question():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_servers_tell_how_busy_they_are(tmp_path: Any, server: Server) -> None:
    roles = [server.role(tmp_path, 0), server.role(tmp_path, 1, "starting"), server.role(tmp_path, 2, port=1)]
    loads = ServerLoads(roles, {KEY_VARIABLES["inference"]: "secret"}, every_s=0.05)
    try:
        until(lambda: "sampled_per_s" in loads.facts().get("inference[0]", {}) and "inference[2]" in loads.facts())
        found = loads.facts()
    finally:
        loads.close()
    first = found["inference[0]"]
    assert (first["running"], first["waiting"], first["kv_use"]) == (7.0, 2.0, 0.75)
    assert cast(float, first["sampled_per_s"]) > 0
    assert set(found) == {"inference[0]", "inference[2]"} and "refused" in str(found["inference[2]"]["error"])
    roles[0].state = "dead"
    assert "inference[0]" not in loads.facts()


def test_without_the_key_the_reason_is_told(tmp_path: Any, server: Server) -> None:
    loads = ServerLoads([server.role(tmp_path, 0)], {}, every_s=0.05)
    try:
        until(loads.facts)
    finally:
        loads.close()
    assert "401" in str(loads.facts()["inference[0]"]["error"]) and server.asked == 0


def test_processes_that_do_the_same_are_told_as_one() -> None:
    wait = {"phase": "wait", "awaits": "batch 3"}
    statuses: dict[tuple[str, int], dict[str, Any]] = {
        ("trainer", 1): {"doing": wait | {"since": 5.0}},
        ("trainer", 0): {"doing": wait | {"since": 4.0}},
        ("trainer", 2): {"doing": {"phase": "optim", "awaits": "", "since": 7.0}},
        ("orchestrator", 0): {"doing": {}},
    }
    told = doing(statuses)
    assert told == {
        "trainer": [
            wait | {"since": 4.0, "count": 2},
            {"phase": "optim", "awaits": "", "since": 7.0, "count": 1},
        ]
    }
