"""Weights & Biases: itself decides whether it is online, it sees no secret, and it can never stop a run."""

import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.config.monitors import open_metrics
from prime_hpc.observe import wandb_run
from prime_hpc.observe.metrics import MetricsWriter, read_metrics, wandb_arguments
from tests.support.runs import free_port, wait_until

CANARY = "can4ry-0f-a-k3y"
_MODES = """
import json, os, sys
from pathlib import Path
import wandb
from prime_hpc.observe.metrics import MetricsWriter, wandb_arguments
asked = []
class Run:
    def define_metric(self, *a, **k): pass
    def finish(self, exit_code): pass
wandb.init = lambda **arguments: asked.append(arguments.get("mode")) or Run()
def start(offline=None):
    arguments = wandb_arguments(project="p", name="n", run_id=None, offline=offline, run_dir=Path("."), config={})
    MetricsWriter(Path("m.jsonl"), arguments).close()
start()                                     # no credentials anywhere
start(offline=False)                        # the config's word
os.environ["WANDB_MODE"] = "online"; start(); del os.environ["WANDB_MODE"]
host = os.environ["WANDB_BASE_URL"].rpartition("/")[2]
Path(os.environ["HOME"], ".netrc").write_text(f"machine {host} login user password {'a' * 40}\\n")
Path(os.environ["HOME"], ".netrc").chmod(0o600)
start()                                     # `wandb login` was here
print(json.dumps(asked))
"""


class _Server(BaseHTTPRequestHandler):
    """Answers, if only that it has nothing."""

    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *words: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()


def modes(home: Path, url: str) -> list[str | None]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and k != "NETRC"}
    environ = {**clean, "HOME": str(home), "WANDB_BASE_URL": url}
    command = [sys.executable, "-c", _MODES]
    done = subprocess.run(command, cwd=home, env=environ, capture_output=True, text=True, timeout=120, check=True)
    found: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_wandb_is_offline_where_it_has_no_credentials(tmp_path: Path, server: str) -> None:
    assert modes(tmp_path, server) == ["offline", "online", None, None]


def test_wandb_is_offline_where_its_server_cannot_be_reached(tmp_path: Path) -> None:
    """As on compute nodes without a way to the internet, whatever credentials there are: `init` would keep nothing."""
    assert modes(tmp_path, f"http://127.0.0.1:{free_port()}") == ["offline"] * 4


def test_the_proxy_that_w_and_b_is_given_is_asked(server: str) -> None:
    settings = SimpleNamespace(base_url="http://wandb.invalid", http_proxy=server, https_proxy=None)
    through = SimpleNamespace(setup=lambda: SimpleNamespace(settings=settings))
    assert wandb_run._why_unreachable(through) == ""
    settings.http_proxy = f"http://127.0.0.1:{free_port()}"
    assert "wandb.invalid" in wandb_run._why_unreachable(through)


def test_a_server_that_takes_nothing_holds_no_role_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`finish` waits for as long as the network is away; the job would hold its nodes for that."""
    import wandb

    taken = threading.Event()

    class Run:
        id, settings = "1", SimpleNamespace(sync_dir="/run/wandb/offline-1")

        def define_metric(self, *arguments: Any, **options: Any) -> None: ...
        def finish(self, exit_code: int) -> None:
            taken.wait(60)

    monkeypatch.setattr(wandb, "init", lambda **arguments: Run())
    monkeypatch.setattr(wandb_run, "FINISH_S", 0.05)
    writer, said = MetricsWriter(tmp_path / "m.jsonl", {"project": "p", "mode": "offline"}), list[str]()
    heard = logger.add(said.append, format="{message}")
    try:
        writer.close()
    finally:
        logger.remove(heard)
        taken.set()
    assert "wandb sync /run/wandb/offline-1" in said[0]


def test_wandb_gets_the_numbers_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    exp = Experiment.model_validate({"inference": {"api_key": CANARY}, "slurm": {"env": {"HF_TOKEN": CANARY}}})
    arguments = wandb_arguments(
        project="p", name="n", run_id=None, offline=True, run_dir=tmp_path, config=exp.model_dump(mode="json")
    )
    writer = MetricsWriter(tmp_path / "m.jsonl", arguments)
    assert writer._wandb is not None, "it did not start"
    writer.log(1, loss=0.25)
    writer.close()
    stored = [path for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in stored)
    assert b"seq_len" in content and b"loss" in content, "it kept neither the config nor the numbers"
    assert CANARY.encode() not in content
    assert [row["loss"] for row in read_metrics(tmp_path / "m.jsonl")] == [0.25]


def test_a_wandb_that_fails_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    def fail(**arguments: object) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(wandb, "init", fail)
    writer = MetricsWriter(tmp_path / "m.jsonl", {"project": "p", "mode": "offline"})
    writer.log(1, loss=0.5)
    writer.close()
    assert [row["loss"] for row in read_metrics(tmp_path / "m.jsonl")] == [0.5]


def test_a_later_life_goes_on_in_the_roles_w_and_b_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    asked: list[tuple[str, Any, Any]] = []

    class Run:
        def __init__(self, name: str, id: str | None = None, resume: str | None = None, **arguments: Any) -> None:
            self.id = id or f"new-{len(asked)}"
            asked.append((name, id, resume))

        def define_metric(self, *arguments: Any, **options: Any) -> None: ...
        def finish(self, exit_code: int) -> None: ...

    monkeypatch.setattr(wandb, "init", Run)
    monkeypatch.setenv("WANDB_MODE", "offline")

    def life(**stated: Any) -> None:
        exp = Experiment.model_validate({"name": "x", "wandb": stated})
        for role in ("trainer", "orchestrator"):
            open_metrics(exp, role, tmp_path / f"{role}.jsonl", tmp_path).close()

    life()
    life()
    life(id="mine", orchestrator_id="theirs")
    life()
    assert asked == [
        *(("x-trainer", None, None), ("x-orchestrator", None, None)),
        *(("x-trainer", "new-0", "allow"), ("x-orchestrator", "new-1", "allow")),
        *(("x-trainer", "mine-trainer", "allow"), ("x-orchestrator", "theirs", "allow")),
        *(("x-trainer", "mine-trainer", "allow"), ("x-orchestrator", "theirs", "allow")),
    ]


def test_wandb_gets_rollouts_as_a_table_and_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    arguments = wandb_arguments(
        project="p", name="n", run_id=None, offline=True, run_dir=tmp_path, config={}, role="orchestrator"
    )
    writer = MetricsWriter(tmp_path / "m.jsonl", arguments)
    assert writer._wandb is not None and (tmp_path / "wandb" / "orchestrator.id").read_text().strip()
    sent: list[str] = []
    log = writer._wandb.log

    def note(values: dict[str, Any]) -> None:
        sent.extend(values)
        log(values)

    monkeypatch.setattr(writer._wandb, "log", note)
    rows = [{"env": "reverse-text", "reward": 0.5, "versions": [3, 4], "completion": "a sign of life"}]
    writer.log_samples(4, rows, {"reward": [0.0, 0.5, 1.0], "nothing": []})
    writer.log_samples(5, [], {"reward": [float("nan")]})  # cannot be drawn: the run goes on
    writer.close()
    (table,) = (tmp_path / "wandb").rglob("*.table.json")
    found = json.loads(table.read_text())
    assert found["columns"] == ["step", "env", "reward", "versions", "completion"]
    assert found["data"] == [[4, "reverse-text", 0.5, "[3, 4]", "a sign of life"]]
    assert sent == ["step", "distribution/reward", "samples"]


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    exp = Experiment.model_validate({"tensorboard": True})
    writer = open_metrics(exp, "trainer", tmp_path / "m.jsonl", tmp_path)
    writer.log(1, loss=0.25, note="words stay out")
    writer.log(2, loss=0.5)
    writer.close()
    found = accumulators.EventAccumulator(str(tmp_path / "tensorboard" / "trainer"))
    found.Reload()
    assert found.Tags()["tensors"] == ["loss"]
    assert [(event.step, event.tensor_proto.float_val[0]) for event in found.Tensors("loss")] == [(1, 0.25), (2, 0.5)]


def test_without_tensorboard_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    writer = MetricsWriter(tmp_path / "m.jsonl", None, tmp_path / "tensorboard")
    writer.log(1, loss=0.5)
    writer.close()
    assert [row["loss"] for row in read_metrics(tmp_path / "m.jsonl")] == [0.5]


def exit_codes(folder: Path) -> list[int]:
    """How W&B's files in a folder say that their runs ended; its process writes that some time after `finish`."""
    return list(wait_until(lambda: codes_so_far(folder), 120, f"W&B has written the end of the run in {folder}"))


def codes_so_far(folder: Path) -> list[int]:
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(folder.rglob("*.wandb")):
        data, at, part = file.read_bytes(), 7, b""  # after a head of 7 bytes: blocks of pieces of records
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            if at + 7 + size > len(data):  # it is being written
                break
            part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
            if kind in (1, 4):  # whole, or the last piece
                record: Any = getattr(wandb_internal_pb2, "Record")()  # noqa: B009 - made as it is imported
                record.ParseFromString(part)
                found += [record.exit.exit_code] if record.WhichOneof("record_type") == "exit" else []
                part = b""
    return found


def test_w_and_b_knows_a_role_that_crashed_from_one_that_finished(tmp_path: Path) -> None:
    def play(name: str, *, crashes: bool) -> list[int]:
        folder = tmp_path / name
        folder.mkdir()
        writer = MetricsWriter(folder / "m.jsonl", {"project": "p", "mode": "offline", "dir": str(folder)})
        try:
            writer.log(1, loss=0.5)
            if crashes:
                raise RuntimeError("in step 2")
        finally:
            writer.close()
        return exit_codes(folder)

    assert play("whole", crashes=False) == [0]
    with pytest.raises(RuntimeError, match="in step 2"):
        play("broken", crashes=True)
    assert exit_codes(tmp_path / "broken") == [1]
