"""Other algorithms in a real orchestrator: what one remembers outlives it, NaN rewards are named, a user's own code."""

import json
from pathlib import Path

import numpy as np
import pytest

from prime_hpc.orchestrator.algorithms import RewardGroup
from prime_hpc.orchestrator.batching.batch_builder import sample_id
from prime_hpc.store.batch.rank_batch import RankBatch
from tests.integration.test_orchestrator import log_of
from tests.support.orchestrator_world import World, make_experiment
from tests.support.scripted_server import AdminServer

pytestmark = pytest.mark.slow


def only(baselines: dict[str, float]) -> float:
    """Of an environment with one role."""
    [value] = baselines.values()
    return value


def half(group: RewardGroup, factor: float) -> np.ndarray:
    """An algorithm of the user's own."""
    return factor * (group.rewards - group.rewards.max())


def test_moving_baselines_are_stored_with_each_batch_and_go_on(
    tmp_path: Path,
    tokenizer_dir: Path,
    server: AdminServer,
) -> None:
    env = [{"id": "tests.support.trouble_taskset", "name": "trouble", "args": {"nan_every": 5}, "timeout_s": 20}]
    advantage = {"type": "rae", "decay": 0.5}
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=env, advantage=advantage, top={"max_steps": 4})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start(last=3)
        world.wait_for_batch(3)
        world.kill()
        assert "(trouble, task " in log_of(world) and "reward 'length' is nan; it counts as failed" in log_of(world)
        baselines = [only(world.state(step)["algorithm"]["trouble"]) for step in (1, 2)]
        assert baselines[0] != baselines[1]
        world.rewind(2)
        world.start(resume=2, attempt=2)
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, 5))
        # The first rollout of batch 3 moved the baseline that batch 2 left: half of it and half its reward.
        after = only(world.state(3)["algorithm"]["trouble"])
        assert after != baselines[1]
        rewards = {
            (int(s), float(a)): float(r)
            for rank in world.ranks(3)
            for s, a, r in zip(rank.sample_ids, _first_advantages(rank), rank.rewards, strict=True)
        }
        offsets = [r - 2 * a for (_, a), r in rewards.items()]
        assert min(abs(o - baselines[1]) for o in offsets) < 1e-6


def test_greedy_rollouts_are_a_baseline_and_nothing_else_over_two_attempts(
    tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    """One environment with them, in a process of its own, one without; complete groups go over to the next attempt."""
    args = {"args": {"num_tasks": 64}, "timeout_s": 20}
    envs = [
        {"id": "reverse-text", "name": "with", "rollouts_per_example": 2, "algorithm": "remax", "workers": 1, **args},
        {"id": "reverse-text", "name": "without", "rollouts_per_example": 4, **args},
    ]
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=envs, traces={})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start(last=2)
        world.wait_for_batch(4)
        world.hub.publish("stop", reason="its time is over", save=False)
        assert world.wait(60) == 0, log_of(world)
        world.kill()
        world.rewind(2)
        world.start(resume=2, attempt=2, incarnation=2)
        assert world.trainer is not None
        world.trainer.publish(2)
        assert world.wait() == 0, log_of(world)
        assert "8 groups of the attempt before need not be sampled again" in log_of(world)
        lines = [json.loads(line) for file in (tmp_path / "run" / "traces").glob("*") for line in file.open()]
        lines.sort(key=lambda row: row["time"])
        rollouts = [row for row in lines if row["kind"] == "rollout" and row["usable"]]
        greedy = {(row["position"], row["attempt"]): row["reward"] for row in rollouts if row.get("greedy")}
        taken = {
            row["position"]: row["attempt"] for row in lines if row["kind"] == "group" and row["fate"] == "in_batch"
        }
        assert {row["env"] for row in rollouts if row.get("greedy")} == {"with"} and len(greedy) > 6
        differing = 0
        for rank in (rank for step in range(1, 7) for rank in world.ranks(step)):
            columns = rank.group_ids, rank.env_ids, rank.sample_ids, rank.rewards, _first_advantages(rank)
            for position, env, ident, reward, advantage in zip(*columns, strict=True):
                if env == 0:
                    assert ident - sample_id(int(position), 0) in (0, 1), "none of them trains"
                    baseline = greedy[int(position), taken[int(position)]]
                    assert advantage == pytest.approx(reward - baseline, abs=1e-6)
                    differing += baseline != 0
        assert differing
        asked = [request["sampling_params"].get("temperature", 1.0) for request in server.requests]
        assert asked.count(0.0) >= len(greedy) and set(asked) == {0.0, 1.0}
        rows = [row for row in world.metrics() if "reward/mean" in row]
        assert any("reward/greedy" in row for row in rows)
        assert any(row.get("tokens/greedy", 0) > 0 for row in rows)  # a group carried over has its own in no row here


def _first_advantages(rank: RankBatch) -> np.ndarray:
    found = []
    for s in range(rank.num_sequences):
        part = slice(int(rank.seq_offsets[s]), int(rank.seq_offsets[s + 1]))
        found.append(rank.advantages[part][rank.loss_mask[part]][0])
    return np.array(found)


REWARDS = """
def correct(completion):
    return 3.0 * ("a" in completion)


def short(completion):
    return -float(len(completion))
"""


def test_each_reward_function_is_normalised_by_itself_and_weighs_what_it_is_to(
    tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    rows = "".join(json.dumps({"question": f"{n}?", "answer": "a"}) + "\n" for n in range(32))
    (tmp_path / "rows.jsonl").write_text(rows)
    functions = [f"{tmp_path}/mine.py:{name}" for name in ("correct", "short")]
    args = {"files": [str(tmp_path / "rows.jsonl")], "reward": functions, "weights": [2.0, 0.5]}
    exp = make_experiment(
        tokenizer_dir,
        tmp_path / "run",
        env=[{"id": "rows", "args": args, "timeout_s": 20}],
        advantage={"type": "gdpo", "scale": "batch", "zero": "keep"},
        traces={},
        top={"max_steps": 1},
    )
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        lines = [json.loads(line) for file in (tmp_path / "run" / "traces").glob("*") for line in file.open()]
        played = {(r["position"], r["rollout"]): r["metrics"] for r in lines if r["kind"] == "rollout"}
        ranks = world.ranks(1)
        positions = sorted({int(position) for rank in ranks for position in rank.group_ids})
        summed = []
        for position in positions:
            values = [[played[position, i][f"reward/{name}"] for name in ("correct", "short")] for i in range(4)]
            scores = np.array(values) / [2.0, 0.5]
            summed.append((scores - scores.mean(0)) / (scores.std(0) + 1e-6) @ [2.0, 0.5])
        wanted = np.array(summed) / np.std(summed)
        found = {
            int(ident): float(advantage)
            for rank in ranks
            for ident, advantage in zip(rank.sample_ids, _first_advantages(rank), strict=True)
        }
        by_rollout = [[found[sample_id(position, i)] for i in range(4)] for position in positions]
        np.testing.assert_allclose(by_rollout, wanted, rtol=1e-5, atol=1e-6)
        assert np.abs(wanted).max() > 1


def test_own_algorithm_scores_every_group(
    tmp_path: Path,
    tokenizer_dir: Path,
    server: AdminServer,
) -> None:
    name = f"{__name__}:half"
    exp = make_experiment(
        tokenizer_dir, tmp_path / "run", advantage={"type": name, "args": {"factor": 0.5}}, top={"max_steps": 2}
    )
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        for rank in world.ranks(1):
            assert (rank.advantages <= 0).all()
            for s, advantage in enumerate(_first_advantages(rank)):
                group = np.concatenate([r.rewards[r.group_ids == rank.group_ids[s]] for r in world.ranks(1)])
                assert advantage == pytest.approx(0.5 * (rank.rewards[s] - group.max()), abs=1e-6)


def test_own_algorithm_that_fails_ends_the_run_with_its_name(
    tmp_path: Path,
    tokenizer_dir: Path,
    server: AdminServer,
) -> None:
    name = f"{__name__}:half"  # its argument is missing
    exp = make_experiment(tokenizer_dir, tmp_path / "run", advantage={"type": name}, top={"max_steps": 2})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 1
        assert f"orchestrator.advantage.type = {name} failed on the group of prompt" in world.status()["error"]
        assert "factor" in world.status()["error"]
