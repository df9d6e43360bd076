"""A real orchestrator whose episodes are played by workers: batches, evaluations, deaths of all kinds, resuming."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.orchestrator_world import World, make_experiment
from tests.support.scripted_server import AdminServer

pytestmark = pytest.mark.slow

WAIT_S = 200.0


def test_two_lives_with_workers_that_die_use_every_prompt_once(
    tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    """One environment's reward calls `os._exit` at every 20th task; the orchestrator is killed after batch 3."""
    exits: dict[str, Any] = {"kind": "exits", "every": 20, "num_tasks": 200}
    envs = [
        {"id": "reverse-text", "args": {"num_tasks": 64}, "timeout_s": 20},
        {"id": "tests.support.misbehaving", "name": "exits", "args": exits, "timeout_s": 20},
    ]
    evaluation = {"interval": 6, "num_examples": 4, "env": [{"id": "reverse-text", "timeout_s": 20}]}
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=envs, eval=evaluation, env_servers={"workers": 1})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        world.wait_for_batch(3)
        assert world.process is not None
        family = psutil.Process(world.process.pid).children(recursive=True)
        world.kill()
        assert not psutil.wait_procs(family, timeout=WAIT_S)[1]
        world.rewind(3)
        world.start(resume=3, attempt=2)
        assert world.wait() == 0, world.log.read_text()[-4000:]
        world.check_batches(range(1, 7))
        rows = world.metrics()
        last = [row for row in rows if "reward/mean" in row][-1]
        assert last["env_workers/reverse-text/episodes"] > 0 and last["env_workers/exits/episodes"] > 0
        assert any("eval/reverse-text/mean_reward" in row for row in rows)
        logs = {path.name for path in world.paths.logs(2, "orchestrator").rglob("env_*.log")}
        assert {"env_host.log", "env_reverse-text_0.log", "env_exits_0.log"} <= logs
