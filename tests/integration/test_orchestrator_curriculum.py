"""Gates and pools in a real orchestrator: full batches of admitted groups, over a kill and a resume."""

import base64
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_hpc.orchestrator.curriculum import CompletedGroup
from tests.integration.test_orchestrator import log_of
from tests.support.orchestrator_world import World, make_experiment
from tests.support.scripted_server import AdminServer

pytestmark = pytest.mark.slow

ENV = [{"id": "tests.support.trouble_taskset", "name": "trouble", "args": {"num_tasks": 12}, "timeout_s": 20}]
"""Rewards replies of 1 to 30 letters by their length up to 20; the mean of a group of four is 0.68 +- 0.16."""
LOW = 0.7


def broken(group: CompletedGroup) -> bool:
    """A gate of the user's own."""
    raise KeyError(group.task)


def group_rewards(world: World, step: int) -> dict[int, np.ndarray]:
    """Rewards of each group that trains in batch `step` (one sequence a rollout here)."""
    ranks = world.ranks(step)
    groups = np.concatenate([rank.group_ids for rank in ranks])
    rewards = np.concatenate([rank.rewards for rank in ranks])
    return {int(group): rewards[groups == group] for group in set(groups)}


def test_batches_are_full_of_admitted_groups_over_two_lives(
    tmp_path: Path,
    tokenizer_dir: Path,
    server: AdminServer,
) -> None:
    curriculum: dict[str, Any] = {
        "sampler": {"type": "difficulty_pool", "easy_above": 0.7, "hard_below": 0.65, "easy_probability": 0.2},
        "gates": [{"type": "reward_range", "low": LOW, "name": "good_enough"}, {"type": "advantage_range"}],
        "max_rejected": 50,
    }
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=ENV, curriculum=curriculum, top={"max_steps": 6})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start(last=3)
        world.wait_for_batch(3)
        world.kill()
        world.rewind(2)
        stored = world.state(2)["curriculum"]["sampler"]
        assert stored["type"] == "difficulty_pool" and stored["state"]["0"]["walk"] >= 8
        world.start(resume=2, attempt=2)
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, 7))  # every prompt used or dropped once, the staleness bound
        rejected = [entry for step in range(1, 7) for entry in world.state(step)["curriculum"].get("rejected", [])]
        dropped = [position for step in range(1, 7) for position in world.state(step)["dropped"]]
        assert sorted(position for position, _ in rejected) == sorted(dropped)
        assert {gate for _, gate in rejected} <= {"good_enough", "advantage_range"} and len(rejected) >= 4
        for step in range(1, 7):
            groups = group_rewards(world, step)
            assert len(groups) == exp.num_prompts
            assert all(rewards.mean() >= LOW - 1e-6 and np.ptp(rewards) > 0 for rewards in groups.values())
        last = world.state(6)["curriculum"]["sampler"]["state"]["0"]
        assert last["walk"] > stored["state"]["0"]["walk"]
        pools = zlib.decompress(base64.b64decode(last["pools"]))
        assert any(pools)  # which of them, the order of answers decides
        rows = [row for row in world.metrics() if "reward/mean" in row]
        assert sum(row["groups/rejected"] for row in rows if row["step"] > 2) >= 1
        names = ("curriculum/reward_of_all", "reward/mean")  # the first: not where all groups were done earlier
        of_all, admitted = (np.mean([row[name] for row in rows if name in row]) for name in names)
        assert of_all < admitted, "what was rejected is in the one mean and not in the other"
        assert rows[-1]["curriculum/trouble/easy"] + rows[-1]["curriculum/trouble/hard"] > 0
        assert sum(row["curriculum/rejected/good_enough"] for row in rows) >= 4


def test_a_gate_that_admits_nothing_does_not_hold_up_the_run(
    tmp_path: Path,
    tokenizer_dir: Path,
    server: AdminServer,
) -> None:
    curriculum = {"gates": [{"type": "reward_range", "low": 2.0}], "max_rejected": 0.5}
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=ENV, curriculum=curriculum, top={"max_steps": 3})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, 4))
        rejected = [len(world.state(step).get("curriculum", {}).get("rejected", [])) for step in (1, 2, 3)]
        # half a batch of four prompts; later ones may have been admitted while an earlier batch was still open
        assert rejected[0] == 2 and max(rejected) == 2
        assert "what completes until the batch is full is admitted" in world.log.read_text()
        rows = [row for row in world.metrics() if "reward/mean" in row]
        assert sum(row["curriculum/admitted_anyway"] for row in rows) >= 12


def test_own_gate_that_fails_ends_the_run_with_its_name(
    tmp_path: Path,
    tokenizer_dir: Path,
    server: AdminServer,
) -> None:
    gates = [{"type": f"{__name__}:broken"}]
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=ENV, curriculum={"gates": gates}, top={"max_steps": 2})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 1
        assert f"orchestrator.curriculum.gates: {__name__}:broken failed on the group" in world.status()["error"]
        assert "KeyError" in world.status()["error"]
