"""Environment evaluations of an SFT run: a real orchestrator process, scripted servers, versions as the trainer's."""

from pathlib import Path
from typing import Any

import pytest

from prime_hpc.orchestrator.sft_eval_loop import due_versions
from prime_hpc.store.leases import min_floor
from prime_hpc.store.weights import list_versions
from tests.support.orchestrator_world import World, make_experiment
from tests.support.runs import wait_until
from tests.support.scripted_server import AdminServer

pytestmark = pytest.mark.slow


def test_every_due_version_is_evaluated_by_itself_and_kept_until_then(
    tmp_path: Path, tokenizer: Any, server: AdminServer
) -> None:
    folder = tmp_path / "tokenizer"
    tokenizer.save_pretrained(folder)
    env = {"id": "reverse-text", "args": {"num_tasks": 64}, "timeout_s": 20}
    evaluation = {"interval": 2, "num_examples": 6, "env": [env], "sampling": {"max_tokens": 40}}
    top = {"kind": "sft", "max_steps": 5, "sft": {"data": {"type": "fake"}}}
    exp = make_experiment(folder, tmp_path / "run", top=top, env=[], eval=evaluation)
    with World(tmp_path / "run", exp, [server]) as world:
        world.start(last=0)
        wait_until(lambda: min_floor(world.paths) is not None, 200, "the evaluator says what it needs")
        assert world.trainer is not None
        for version in (2, 4, 5):  # faster than the evaluations: each waits for its turn
            world.trainer.publish(version)
        assert world.wait() == 0, world.log.read_text()[-4000:]
        rows = [row for row in world.metrics() if "eval/reverse-text/mean_reward" in row]
        assert [row["step"] for row in rows] == [0, 2, 4, 5]
        assert all(row["eval/version_min"] == row["eval/version_max"] == row["step"] for row in rows)
        assert all(row["eval/reverse-text/num_episodes"] == 6 for row in rows)
        assert [version for version, _ in server.updates] == [2, 4, 5]
        assert world.status()["state"] == "done" and list_versions(world.paths)[-1] == 5


def test_a_later_life_catches_up_on_what_is_on_disk_and_not_evaluated() -> None:
    assert due_versions([10], 25, 0, [], set()) == [0, 10, 20, 25]
    assert due_versions([10], 20, 0, [], set()) == [0, 10, 20]
    assert due_versions([10], 25, 12, [10], {0}) == [10, 20, 25]
    assert due_versions([10], 25, 12, [], {0}) == [20, 25]
    assert due_versions([10], 25, 20, [10, 20], {0, 10, 20}) == [25]
    assert due_versions([10], 25, 25, [25], {0, 10, 20}) == [25]
