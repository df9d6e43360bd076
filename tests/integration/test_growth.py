"""Roles over many steps: nothing of them gains an entry with every step, so that weeks take no more than minutes.

Where something does, the failure names the attribute. See `tests.support.growth`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_trainer import run_trainer, write_batches, write_run
from tests.support import forked
from tests.support.growth import STEPS, VARIABLE
from tests.support.orchestrator_world import World, make_experiment
from tests.support.runs import ENVIRONMENT
from tests.support.scripted_server import AdminServer
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def small_processes() -> Iterator[None]:
    """Forks of a server that holds no test: a look goes through all that there is, of thousands of tests a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(forked.WORKER_SERVER, raising=False)
        patch.setattr(forked, "_running", [])
        yield
        for server, _ in forked._running:  # it holds as much memory as all that it has imported
            server.communicate(timeout=60)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)  # 100 s of a core, among others on a slow machine
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_an_orchestrator(
    workers: int, tmp_path: Path, tokenizer_dir: Path, server: AdminServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path / "found.json"
    monkeypatch.setenv(VARIABLE, " ".join(map(str, ["prime_hpc.orchestrator.main", *STEPS, found])))
    options: dict[str, Any] = {"top": {"max_steps": STEPS[-1]}, "env_servers": {"workers": workers}}
    options |= {"eval": {"interval": 10, "num_examples": 4}, "traces": {}}
    exp = make_experiment(tokenizer_dir, tmp_path / "run", **options)
    with World(tmp_path / "run", exp, [server]) as world:
        world.start(step_s=0.0, module="tests.support.growth")
        assert world.wait(840.0) == 0, world.log.read_text()[-3000:]
    assert json.loads(found.read_text()) == []


def test_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "found.json"
    monkeypatch.setenv(VARIABLE, " ".join(map(str, ["prime_hpc.trainer.main", *STEPS, found])))
    paths = write_run(tmp_path / "run", make_tiny_model(tmp_path / "model"), max_steps=STEPS[-1], ckpt={"interval": 20})
    write_batches(paths, range(1, STEPS[-1] + 1), 1)
    result = run_trainer(paths, module="tests.support.growth")
    assert result.returncode == 0, result.stdout[-3000:]
    assert json.loads(found.read_text()) == []


@pytest.mark.exhaustive
def test_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "found.json"
    monkeypatch.setenv(VARIABLE, " ".join(map(str, ["prime_hpc.trainer.main", *STEPS, found])))
    model = make_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"reverse {word} {i}", "completion": word[::-1]} for i, word in enumerate(["alpha", "beta"] * 8)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = {"data": {"path": str(tmp_path / "data.jsonl"), "batch_size": 4}}
    paths = write_run(tmp_path / "run", model, kind="sft", sft=data, max_steps=STEPS[-1])
    result = run_trainer(paths, module="tests.support.growth")
    assert result.returncode == 0, result.stdout[-3000:]
    assert json.loads(found.read_text()) == []


def test_a_supervisor(tmp_path: Path) -> None:
    assert alone("a_supervisor", tmp_path / "run") == []


@pytest.mark.exhaustive
def test_environments(tokenizer_dir: Path) -> None:
    """The code that plays episodes, in the orchestrator's process or a worker's; a step is sixteen of them."""
    assert alone("environments", tokenizer_dir) == []


def alone(name: str, folder: Path) -> Any:
    """What a function of `tests.support.growth_alone` finds, in a process of its own."""
    done = forked.run(["tests.support.growth_alone", name, str(folder)], env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
