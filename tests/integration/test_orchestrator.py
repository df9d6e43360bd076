"""A real orchestrator process against scripted servers and a scripted trainer; they meet through store and bus."""

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from prime_hpc.observe.bench import read_report
from prime_hpc.store.batches import list_batches
from prime_hpc.store.leases import min_floor
from tests.support.orchestrator_world import World, make_experiment, read_samples, varied_reply
from tests.support.runs import free_port
from tests.support.sampled import sampled
from tests.support.scripted_server import AdminServer, SleepingServer

pytestmark = pytest.mark.slow


def log_of(world: World) -> str:
    return world.log.read_text()[-4000:]


@pytest.mark.parametrize("async_level", sampled([2, 1, 0], 2))
def test_a_run_keeps_the_staleness_bound_and_ends_with_the_last_version(
    async_level: int, tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    evaluation = {"interval": 3, "num_examples": 6}
    exp = make_experiment(tokenizer_dir, tmp_path / "run", top={"async_level": async_level}, eval=evaluation)
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, 7))
        assert world.status()["state"] == "done"
        assert server.version == 6
        assert [v for v, _ in server.updates] == sorted(v for v, _ in server.updates)
        assert min_floor(world.paths) == 6
        rows = world.metrics()
        steps = [row for row in rows if "reward/mean" in row]
        assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
        assert all(row["lag/max"] <= async_level for row in steps)
        evals = [row for row in rows if "eval/reverse-text/mean_reward" in row]
        assert evals[0]["step"] == 0 and evals[-1]["step"] == 6
        assert evals[-1]["eval/version_min"] == evals[-1]["eval/version_max"] == 6
        assert {s["step"] for s in read_samples(world) if s["kind"] == "train"} == {1, 2, 3, 4, 5, 6}
        if async_level == 0:
            assert sum(row["groups/stale"] for row in steps) == 0


class LongReplyServer(AdminServer):
    """The first reply begins with version 0 and ends once version 3 is served, its second half sampled by that."""

    holds = True

    async def _generate(self, request: web.Request) -> web.Response:
        is_first, self.holds = self.holds, False
        answer = await super()._generate(request)
        if not is_first:
            return answer
        while self.version < 3:
            await asyncio.sleep(0.02)
        found = json.loads(answer.text or "")
        (choice,) = found["choices"]
        half = len(choice["token_ids"]) // 2
        choice["weight_versions"] = [
            {"version": "0", "start": 0, "end": half},
            {"version": str(self.version), "start": half, "end": len(choice["token_ids"])},
        ]
        return web.json_response(found)


@pytest.mark.parametrize("stale", ["mask", "resample"])
def test_a_long_reply_is_neither_waited_for_nor_thrown_away_where_old_tokens_are_masked(
    stale: str, tmp_path: Path, tokenizer_dir: Path, tokenizer: Any
) -> None:
    """With `resample` its group is sent back before version 3 comes."""
    exp = make_experiment(tokenizer_dir, tmp_path / "run", stale=stale, max_concurrent=64)
    with (
        LongReplyServer(tokenizer, varied_reply(1), update_delay_s=0.3) as server,
        World(tmp_path / "run", exp, [server]) as world,
    ):
        world.start()
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, 7))
        rows = [row for row in world.metrics() if "reward/mean" in row]
        masked = [row["step"] for row in rows if row.get("tokens/stale")]
        num_asked = sum(request["token_ids"] == server.requests[0]["token_ids"] for request in server.requests)
        if stale == "resample":
            assert num_asked == 2 * exp.orchestrator.rollouts_per_example and not masked
            return
        assert num_asked == exp.orchestrator.rollouts_per_example
        assert masked and masked[0] > 3 and all(row["tokens/stale"] < 1 for row in rows)


def test_engines_sleep_between_a_batch_and_the_version_that_comes_of_it(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: Any
) -> None:
    """A scripted server in a GPU's place: asleep before batch n is on disk, awake with version n, never in between."""
    top = {"async_level": 0, "max_steps": 4, "inference": {"sleep": True}}
    evaluation = {"interval": 2, "num_examples": 6}
    exp = make_experiment(tokenizer_dir, tmp_path / "run", top=top, eval=evaluation)
    with SleepingServer(tokenizer, varied_reply(1)) as server, World(tmp_path / "run", exp, [server]) as world:
        server.paths = world.paths
        world.start()
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, 5))
        turns = [event for event in server.events if event[0] != "waits"]
        expected = [[("sleep", n - 1, n - 1), ("update", n, n)] for n in (1, 2, 3, 4)]
        assert turns == [turn for both in expected for turn in both]
        evals = [row for row in world.metrics() if "eval/reverse-text/mean_reward" in row]
        assert [row["step"] for row in evals] == [0, 2, 4]
        assert all(row["eval/version_min"] == row["eval/version_max"] == row["step"] for row in evals)


def test_a_server_that_cannot_sleep_ends_the_run(tmp_path: Path, tokenizer_dir: Path, server: AdminServer) -> None:
    top = {"async_level": 0, "max_steps": 2, "inference": {"sleep": True}}
    exp = make_experiment(tokenizer_dir, tmp_path / "run", top=top)
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() != 0 and "does not sleep, as inference.sleep wants" in log_of(world)


def test_samples_that_take_a_row_each_are_dealt_out_by_length(
    tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tokenizer_dir, model)
    (model / "config.json").write_text('{"model_type": "lfm2"}')
    exp = make_experiment(
        model, tmp_path / "run", top={"max_steps": 2, "trainer": {"num_ranks": 2, "micro_batch_tokens": 160}}
    )
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 0, world.log.read_text()[-3000:]
        world.check_batches(range(1, 3))
        for step in (1, 2):
            for rank in world.ranks(step):
                lengths = np.diff(rank.seq_offsets)
                for i in range(rank.num_micro_batches):
                    own = lengths[rank.sequences_of(i)]
                    assert len(own) * own.max(initial=0) <= 160


def test_two_lives_use_every_prompt_exactly_once(tmp_path: Path, tokenizer_dir: Path, server: AdminServer) -> None:
    exp = make_experiment(tokenizer_dir, tmp_path / "run", top={"async_level": 2})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start(last=3)
        world.wait_for_batch(3)
        world.kill()
        batches = sorted(p.name for p in world.paths.rollouts.iterdir() if p.name.startswith("step_"))
        for name in batches:  # the supervisor removes what comes after the step that is resumed
            if int(name.removeprefix("step_")) > 2:
                for file in (world.paths.rollouts / name).iterdir():
                    file.unlink()
                (world.paths.rollouts / name).rmdir()
        for late in (2, 3, 4):
            for file in world.paths.weights_step(late).glob("*"):
                file.unlink()
            if world.paths.weights_step(late).exists():
                world.paths.weights_step(late).rmdir()
        world.hub.close()
        world.hub = type(world.hub)()
        world.start(resume=2, attempt=2)
        time.sleep(1.0)  # version 2 was lost: the trainer publishes it from the checkpoint, the orchestrator waits
        assert world.process is not None and world.process.poll() is None, log_of(world)
        assert world.trainer is not None
        world.trainer.publish(2)
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, 7))
        assert world.status(attempt=2)["state"] == "done"
        first_update = next(i for i, (v, _) in enumerate(server.updates) if v == 2)
        assert server.updates[-1][0] == 6 and first_update >= 0


def test_groups_that_were_complete_at_the_stop_are_not_sampled_again(
    tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    exp = make_experiment(tokenizer_dir, tmp_path / "run")

    def rollouts(world: World) -> dict[int, bytes]:
        """Tokens, log-probabilities and versions of each sample of batches 3 and 4."""
        found = {}
        for rank in (rank for step in (3, 4) for rank in world.ranks(step)):
            for i, sample in enumerate(rank.sample_ids.tolist()):
                part = slice(int(rank.seq_offsets[i]), int(rank.seq_offsets[i + 1]))
                parts = (rank.token_ids[part], rank.logprobs[part], rank.versions[part])
                found[sample] = b"".join(np.ascontiguousarray(part).tobytes() for part in parts)
        return found

    with World(tmp_path / "run", exp, [server]) as world:
        world.start(last=2)
        world.wait_for_batch(4)
        world.hub.publish("stop", reason="its time is over", save=False)
        assert world.wait(60) == 0, log_of(world)
        assert "8 complete groups are kept for the next attempt" in log_of(world)
        first = rollouts(world)
        world.kill()
        world.rewind(2)
        world.start(resume=2, attempt=2, last=2, incarnation=2)
        assert world.trainer is not None
        world.trainer.publish(2)
        world.wait_for_batch(4)
        assert "8 groups of the attempt before need not be sampled again" in log_of(world)
        assert rollouts(world) == first, "two batches of them, and no other"
        assert not world.paths.carried_groups.exists(), "nobody else will take them"
        world.kill()
        world.rewind(2)
        world.start(resume=2, attempt=3, incarnation=3)
        assert world.trainer is not None
        world.trainer.publish(2)
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, 7))
        assert rollouts(world) != first, "a killed one keeps nothing"


def test_a_server_of_an_earlier_run_goes_back_to_the_base_model(
    tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    server.version = 40
    exp = make_experiment(
        tokenizer_dir, tmp_path / "run", top={"max_steps": 2, "trainer": {"num_ranks": 2, "micro_batch_tokens": 160}}
    )
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        assert server.updates[0] == (0, "base")
        world.check_batches(range(1, 3))


def test_every_third_reward_raises_and_the_run_goes_on(
    tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    env = [{"id": "tests.support.trouble_taskset", "name": "trouble", "args": {"raise_every": 3}, "timeout_s": 20}]
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=env, top={"max_steps": 4})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, 5))
        rows = world.metrics()
        assert sum(row["episodes/failed"] for row in rows) >= 15
        assert 0.2 < rows[-1]["failed/share"] < 0.45


def test_rewards_that_always_raise_end_the_run_with_the_reason(
    tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    env = [{"id": "tests.support.trouble_taskset", "args": {"raise_every": 1}, "timeout_s": 20}]
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=env)
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 1, log_of(world)
        status = world.status()
        assert status["state"] == "failed"
        assert "no answer key for task" in status["error"]


def test_an_environment_that_never_returns_is_ended_by_its_deadline(
    tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    env = [{"id": "tests.support.trouble_taskset", "args": {"hang_every": 5}, "timeout_s": 2}]
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=env, top={"max_steps": 3})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, 4))
        assert sum(row["episodes/timeout"] for row in world.metrics()) >= 3


def test_groups_that_all_come_to_nothing_end_the_run_though_none_of_their_rollouts_failed(
    tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    env = [{"id": "tests.support.trouble_taskset", "args": {"hang_every": 1}, "timeout_s": 0.2}]
    advantage = {"type": "grpo_no_std", "timeout": "penalize"}
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=env, advantage=advantage, max_concurrent=100)
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 1, log_of(world)
        assert "groups in a row were dropped" in log_of(world)
        assert "no end after 0.2 s" in world.status()["error"]
        assert not list_batches(world.paths)


def test_two_environments_mix_by_their_ratios(tmp_path: Path, tokenizer_dir: Path, server: AdminServer) -> None:
    trouble = {"id": "tests.support.trouble_taskset", "name": "trouble", "ratio": 3.0, "timeout_s": 20}
    env = [{"id": "reverse-text", "ratio": 1.0, "timeout_s": 20}, trouble]
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=env, top={"max_steps": 4, "async_level": 0})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, 5))
        counts = world.state(4)["prompts"]["counts"]
        assert counts == [4, 12]


def test_a_server_that_dies_comes_back_with_the_right_version(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: Any
) -> None:
    exp = make_experiment(tokenizer_dir, tmp_path / "run", top={"max_steps": 8})
    first = AdminServer(tokenizer, varied_reply(1), port=free_port())
    first.__enter__()
    with World(tmp_path / "run", exp, [first]) as world:
        world.start()
        world.wait_for_batch(3)
        port = first.port
        first.__exit__()
        with AdminServer(tokenizer, varied_reply(2), port=port) as second:
            assert second.version == 0
            assert world.wait() == 0, log_of(world)
            assert second.updates and second.updates[0][0] >= 2
            assert second.version == 8
        world.check_batches(range(1, 9))


def test_one_of_two_servers_dies_for_good_and_the_other_carries_on(
    tmp_path: Path, tokenizer_dir: Path, tokenizer: Any
) -> None:
    env = [{"id": "reverse-text", "timeout_s": 6}]
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=env, top={"max_steps": 8})
    doomed = AdminServer(tokenizer, varied_reply(1))
    doomed.__enter__()
    with AdminServer(tokenizer, varied_reply(2)) as server, World(tmp_path / "run", exp, [doomed, server]) as world:
        world.start()
        world.wait_for_batch(2)
        doomed.__exit__()
        assert world.wait() == 0, log_of(world)
        world.check_batches(range(1, 9))
        assert doomed.requests and server.version == 8


def test_told_to_stop_it_ends_orderly(tmp_path: Path, tokenizer_dir: Path, server: AdminServer) -> None:
    exp = make_experiment(tokenizer_dir, tmp_path / "run", top={"max_steps": 1000})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        world.wait_for_batch(2)
        world.hub.publish("stop", reason="the test says so", save=False)
        assert world.wait(60) == 0, log_of(world)
        assert world.status()["state"] == "done"
        assert "the test says so" in log_of(world)


def test_sigterm_ends_it_within_seconds(tmp_path: Path, tokenizer_dir: Path, server: AdminServer) -> None:
    exp = make_experiment(tokenizer_dir, tmp_path / "run", top={"max_steps": 1000})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start(in_shell=True)
        world.wait_for_batch(1)
        assert world.process is not None
        world.process.terminate()
        assert world.wait(60) == 0, log_of(world)


def test_weights_that_never_come_end_the_run_with_the_reason(
    tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    exp = make_experiment(tokenizer_dir, tmp_path / "run", weights_timeout_s=3, top={"async_level": 0})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start(last=1)
        assert world.wait() == 1, log_of(world)
        assert "weights version 2" in world.status()["error"]


@pytest.mark.exhaustive
def test_a_bench_needs_no_trainer_and_leaves_nothing_behind(
    tmp_path: Path, tokenizer_dir: Path, server: AdminServer
) -> None:
    wandb = {"offline": True, "samples_interval": 1, "samples": False}
    exp = make_experiment(tokenizer_dir, tmp_path / "run", bench=True, top={"wandb": wandb, "tensorboard": True})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start(last=-1)
        assert world.wait() == 0, log_of(world)
        assert "rollouts/s" in log_of(world)
        report = read_report(world.paths.root, "orchestrator")
        assert report is not None and report["figures"]["tokens/rollout"] > 0 and report["figures"]["batch tokens"] > 0
        # rollouts are sampled as they are used, until the end: no batch is there from the beginning, and none a lull
        assert (exp.async_level + 1) * exp.orchestrator.batch_size > exp.orchestrator.max_concurrent
        assert report["setting"]["in flight at most"] == exp.orchestrator.max_concurrent
        assert (report["num_warm"], report["num_steps"]) == (2, 3)
        measured = report["steps"][report["num_warm"] :]
        assert report["figures"]["rollouts/s"] > 0
        assert any(row["episodes/per_second"] > 0 for row in measured)
        # as the trainer would get it: groups without a signal are left out
        assert 0 < len(report["shape"][0]["lengths"]) <= exp.orchestrator.batch_size
        assert not world.paths.rollouts.exists()
        assert not list(world.paths.root.glob(".bench-*"))
        # W&B has its figures as a table and as numbers, in a run that no later attempt goes on with
        (table,) = (world.paths.root / "wandb").rglob("*.table.json")
        assert "rollouts/s" in [name for name, _ in json.loads(table.read_text())["data"]]
        sent = b"".join(path.read_bytes() for path in (world.paths.root / "wandb").rglob("*.wandb"))
        assert b"bench/rollouts/s" in sent and b"distribution/reward" in sent and b"run-orchestrator-bench" in sent
        assert not list((world.paths.root / "wandb").glob("*.id"))
        assert list((world.paths.root / "tensorboard" / "orchestrator-bench").iterdir())


def test_environments_with_settings_of_their_own(tmp_path: Path, tokenizer_dir: Path, server: AdminServer) -> None:
    own = {"rollouts_per_example": 2, "algorithm": "reinforce", "sampling": {"temperature": 0.5, "max_tokens": 9}}
    reverse = {"id": "reverse-text", "args": {"num_tasks": 64}, "timeout_s": 20}
    held_out = {"id": "reverse-text", "name": "held", "interval": 2, "num_examples": 3, "sampling": {"max_tokens": 7}}
    exp = make_experiment(
        tokenizer_dir,
        tmp_path / "run",
        env=[reverse | {"name": "whole"}, reverse | {"name": "short"} | own],
        eval={"interval": 4, "num_examples": 5, "env": [held_out, held_out | {"name": "rare", "interval": 4}]},
        top={"max_steps": 4},
    )
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        rows = world.metrics()
        assert {row["step"] for row in rows if "eval/held/mean_reward" in row} == {0, 2, 4}
        assert {row["step"] for row in rows if "eval/rare/mean_reward" in row} == {0, 4}
        assert {row["eval/held/num_episodes"] for row in rows if "eval/held/num_episodes" in row} == {3}
    asked = [(p["temperature"], p["max_tokens"]) for p in (r["sampling_params"] for r in server.requests)]
    assert set(asked) == {(1.0, 40), (0.5, 9), (0.0, 7)}
    assert abs(asked.count((1.0, 40)) - 2 * asked.count((0.5, 9))) <= 8, "groups of 4 and of 2, prompts in turn"


def test_every_rollout_leaves_a_trace(tmp_path: Path, tokenizer_dir: Path, server: AdminServer) -> None:
    """Also those that failed; one file a step, bounded, the newest ones kept."""
    env = [{"id": "tests.support.trouble_taskset", "name": "trouble", "args": {"raise_every": 3}, "timeout_s": 20}]
    traces = {"keep_steps": 3, "tokens": True}
    exp = make_experiment(tokenizer_dir, tmp_path / "run", env=env, traces=traces, top={"max_steps": 4})
    with World(tmp_path / "run", exp, [server]) as world:
        world.start()
        assert world.wait() == 0, log_of(world)
        files = sorted((tmp_path / "run" / "traces").iterdir())
        assert 1 <= len(files) <= 3
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        rollouts = [row for row in rows if row["kind"] == "rollout"]
        failed = [row for row in rollouts if not row["usable"]]
        assert failed and all(row["state"] == "failed" and "no answer key" in row["reason"] for row in failed)
        good = next(row for row in rollouts if row["usable"])
        assert good["prompt"] and good["completion"] and len(good["samples"][0]["token_ids"]) > 3
        taken = [row for row in rows if row["kind"] == "group" and row["fate"] == "in_batch" and row["step"] == 4]
        assert len(taken) == 4 and {row["env"] for row in rows} == {"trouble"}
