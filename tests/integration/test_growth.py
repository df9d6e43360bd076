"""Roles over many steps: nothing of them gains an entry with every step, so that weeks take no more than minutes.

Where something does, the failure names the attribute. See `tests.support.growth`.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs import rendering
from prime_hpc.envs.patches import lookups
from prime_hpc.observe.console import Console
from tests.integration.test_supervisor import role, supervise
from tests.integration.test_trainer import run_trainer, write_batches, write_run
from tests.support.env_world import World as EnvWorld
from tests.support.growth import VARIABLE, Growth
from tests.support.orchestrator_world import World, make_experiment
from tests.support.scripted_server import AdminServer
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow
STEPS = [20, 40, 60]


@pytest.mark.parametrize("workers", [0, 1])
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
        assert world.wait(240.0) == 0, world.log.read_text()[-3000:]
    assert json.loads(found.read_text()) == []


def test_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path / "found.json"
    monkeypatch.setenv(VARIABLE, " ".join(map(str, ["prime_hpc.trainer.main", *STEPS, found])))
    paths = write_run(tmp_path / "run", make_tiny_model(tmp_path / "model"), max_steps=STEPS[-1], ckpt={"interval": 20})
    write_batches(paths, range(1, STEPS[-1] + 1), 1)
    result = run_trainer(paths, module="tests.support.growth")
    assert result.returncode == 0, result.stdout[-3000:]
    assert json.loads(found.read_text()) == []


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


def test_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    growth, shown = Growth(STEPS), Console._show_step

    def show(console: Console, row: dict[str, Any]) -> None:
        shown(console, row)
        growth.look(row["step"])

    monkeypatch.setattr(Console, "_show_step", show)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    trainer = role("trainer", run_dir, "ready", f"train:{STEPS[-1]}", "done")
    code, _ = supervise(run_dir, [role("orchestrator", run_dir, "ready", "done"), trainer])
    assert code == 0 and growth.found == []


def test_environments(world: EnvWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that plays episodes, in the orchestrator's process or a worker's; a step is sixteen of them."""
    for module, name in ((rendering, "MAX_TEXTS"), (rendering, "CACHE_PROMPTS"), (lookups, "MAX_DECODED")):
        monkeypatch.setattr(module, name, 16)
    growth = Growth([10, 30, 50])

    async def play() -> None:
        async with world.pool(EnvConfig(id="reverse-text", args={"num_tasks": 64})) as pool:
            for step in range(1, 51):
                await asyncio.gather(*(pool.run_episode(0, (16 * step + i) % 64) for i in range(16)))
                world.server.requests.clear()
                world.server.headers.clear()
                growth.look(step)

    asyncio.run(play())
    assert growth.found == []
