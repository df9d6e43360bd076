"""Where the tinker service listens, how clients learn it, and what plan, lint and status say of it."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.cli.verbs.run.status import render_one
from prime_hpc.config import Experiment
from prime_hpc.config.run_files import RUN_YAML, TINKER_URL
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.sections.trainer import TinkerConfig
from prime_hpc.launch.lint.lint import lint
from prime_hpc.launch.monitor.status import status_of
from prime_hpc.launch.plan.plan import slurm_plan
from prime_hpc.launch.plan.plan_text import plan_text
from prime_hpc.runtime.role_context import LED, NODE, RoleContext
from prime_hpc.store.messaging.bus import BusClient, BusServer
from prime_hpc.store.messaging.network import VARIABLE
from prime_hpc.store.messaging.sockets import is_free
from prime_hpc.trainer.tinker import address
from prime_hpc.trainer.tinker.server import EngineUrls
from tests.support.runs import free_port, wait_until


def taken(config: TinkerConfig, **environ: str) -> tuple[str, int, str]:
    """Address and port that a service takes, and its URL for clients."""
    sock, url = address.listen(config, Path("/shared/runs/service"), environ)
    with sock:
        return sock.getsockname()[0], sock.getsockname()[1], url


def test_on_this_machine_it_stays_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    free = free_port()
    monkeypatch.setattr(address, "PORT", free)
    assert taken(TinkerConfig()) == ("127.0.0.1", free, f"http://127.0.0.1:{free}")
    assert taken(TinkerConfig(port=0))[1] != free
    host, port, url = taken(TinkerConfig(host="0.0.0.0", port=0))
    assert (host, url) == ("0.0.0.0", f"http://{socket.gethostname()}:{port}")


def test_in_a_job_it_is_found_on_its_node() -> None:
    host, port, url = taken(TinkerConfig(), **{LED: "1"})
    assert host in ("::", "0.0.0.0") and port != address.PORT
    assert url == f"http://{socket.gethostname()}:{port}"
    assert taken(TinkerConfig(), **{LED: "1", NODE: "run-0.run"})[2].startswith("http://run-0.run:")
    first = next(port for port in range(21000, 30000, 10) if all(is_free(port + i, "0.0.0.0") for i in range(4)))
    stated = json.dumps({"serving": "127.0.0.0/8", "port_range": f"{first}-{first + 3}"})
    host, port, url = taken(TinkerConfig(), **{LED: "1", VARIABLE: stated})
    assert host == "127.0.0.1" and port in range(first, first + 4) and url == f"http://127.0.0.1:{port}"
    assert taken(TinkerConfig(host="127.0.0.1", port=first), **{LED: "1", VARIABLE: stated})[1] == first


def test_the_file_says_where_until_that_service_ends(tmp_path: Path) -> None:
    address.forget(tmp_path)
    address.announce(tmp_path, "http://n1:1")
    assert (tmp_path / TINKER_URL).read_text() == "http://n1:1\n"
    address.announce(tmp_path, "http://n2:2")
    address.forget(tmp_path, "http://n1:1")  # an attempt that wakes up late
    assert (tmp_path / TINKER_URL).read_text() == "http://n2:2\n"
    address.forget(tmp_path, "http://n2:2")
    assert not (tmp_path / TINKER_URL).exists()


def test_the_engines_are_where_the_supervisor_says_that_they_are(tmp_path: Path) -> None:
    hub, bus = BusServer(), None
    experiment = Experiment.model_validate({"model": {"name": "m"}, "inference": {"num_replicas": 2}})
    urls = ["http://n2:1/v1", "http://n3:1/v1"]
    context = RoleContext("trainer", tmp_path, bus_address=hub.address, inference_urls=urls)
    try:
        bus = BusClient(hub.address, "trainer[0]")
        engines = EngineUrls(experiment, context, bus)
        assert engines.expected and engines.known() == urls
        hub.publish("server", role="teacher", index=0, state="lost")
        hub.publish("server", role="inference", index=0, state="lost", url="http://n2:1/v1")
        wait_until(lambda: engines.known() == ["http://n3:1/v1"], 200, "one is lost")
        hub.publish("server", role="inference", index=0, state="starting", url="http://n4:7/v1")
        wait_until(lambda: engines.known() == ["http://n4:7/v1", "http://n3:1/v1"], 200, "it is back elsewhere")
    finally:
        if bus is not None:
            bus.close()
        hub.close()


SITE = SiteConfig.model_validate({"name": "test", "scratch": "/", "partitions": {"gpu": {"gpus_per_node": 8}}})


def service(folder: Path, **tinker: Any) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "service",
            "output_dir": str(folder),
            "launch": "slurm",
            "model": {"name": "org/model", "lora": {}},
            "trainer": {"max_concurrent_runs": 2, "num_ranks": 16, "tinker": tinker},
            "slurm": {"partition": "gpu", "time": "1:00:00"},
        }
    )


def test_plan_and_lint_hold_it_to_nothing_that_is_a_runs(tmp_path: Path) -> None:
    planned = slurm_plan(service(tmp_path), SITE)
    plan, text = planned.as_dict(), plan_text(planned)
    assert "served where tinker.url says when it is ready" in text
    assert "inference     none: clients can train, not sample" in text
    assert "checkpoints  as the clients ask for them" in text
    assert plan["restart"]["events"]["time limit"].endswith("goes on from what is saved")
    assert plan["paths"]["checkpoints"] == str(tmp_path / "service" / "tinker" / "<adapter>" / "checkpoints")
    assert not {f.code for f in lint(service(tmp_path), SITE)} & {"PH205", "PH210", "PH312"}
    (found,) = [f for f in lint(service(tmp_path, host="127.0.0.1"), SITE) if f.code == "PH312"]
    assert found.key == "trainer.tinker.host" and "own node alone" in found.message


def test_status_says_where_it_answers_and_promises_no_last_step(tmp_path: Path) -> None:
    (tmp_path / RUN_YAML).write_text("max_steps: 100\ntrainer:\n  num_ranks: 1\n  max_concurrent_runs: 2\nslurm:\n")
    (tmp_path / TINKER_URL).write_text("http://n3:4567\n")
    assert status_of(tmp_path).service is None  # nothing runs: it was left by a service that was killed
    row = {"attempt": 1, "began": 1.0, "ended": None, "host": "elsewhere", "pid": 1, "incarnation": 1}
    (tmp_path / "attempts.jsonl").write_text(json.dumps(row) + "\n")
    word = {"attempt": 1, "state": "running", "time": 4e9, "roles": {"trainer": "ready"}, "max_steps": None}
    (tmp_path / "status.json").write_text(json.dumps(word))
    found = status_of(tmp_path)
    assert (found.state, found.service, found.max_steps) == ("running", "http://n3:4567", None)
    assert "service    http://n3:4567 for the tinker client; its key is in tinker.key" in render_one(found)
