"""Environment evaluations of an SFT run: the version they wait for, how long, and servers that are lost meanwhile."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.config import Experiment
from prime_hpc.config.sections.sft import SFTConfig, SFTDataConfig
from prime_hpc.orchestrator import sft_eval_loop, weight_sync
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.sft_eval_loop import EvalLoop, with_last_version
from prime_hpc.store.errors import ArtifactTimeout
from prime_hpc.store.leases import clear_leases, min_floor, set_last_version
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.trainer.sft import _is_published
from tests.support.checkpoints import make_weights
from tests.support.policy_servers import Bus, Server

TIMEOUT_S = 100.0


class World:
    """An evaluation loop around stand-ins; `evaluated`: version, and the servers that were ready when it began."""

    def __init__(self, folder: Path, *envs: dict[str, Any], last: int = 4, start_step: int = 0) -> None:
        tree = {
            "kind": "sft",
            "max_steps": last,
            "sft": {"data": {"type": "fake"}},
            "orchestrator": {"weights_timeout_s": TIMEOUT_S, "eval": {"interval": 2, "env": list(envs)}},
        }
        self.servers, self.bus = [Server(), Server()], Bus()
        pool = SimpleNamespace(
            sources=[SimpleNamespace(name=env["id"], num_tasks=4) for env in envs], move_server=lambda *_: None
        )
        status = SimpleNamespace(beat=lambda **_: None, ready=lambda **_: None)
        parts: Any = SimpleNamespace(
            paths=RunPaths(folder),
            train_pool=None,
            eval_pool=pool,
            urls=["http://a/v1", "http://b/v1"],
            clients=self.servers,
            bus=self.bus,
            status=status,
            incarnation=1,
            ready_timeout_s=50.0,
            served_as="policy",
            teacher=None,
        )
        self.loop = EvalLoop(Experiment.model_validate(tree), parts, start_step=start_step)
        self.evaluated: list[tuple[int, list[int]]] = []


def test_the_last_version_is_what_the_trainer_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the data decide the steps: the loop waits for the trainer's word in this attempt, not in one before."""
    monkeypatch.setattr(sft_eval_loop, "LOOK_S", 0.01)
    world = World(tmp_path, {"id": "a"})
    stated, parts = world.loop._exp, world.loop._parts
    assert asyncio.run(with_last_version(stated, parts)) is stated
    data = SFTDataConfig(path="rows.jsonl", num_epochs=2)
    counted = stated.model_copy(update={"sft": SFTConfig(data=data)})
    set_last_version(parts.paths, 3)
    clear_leases(parts.paths)

    async def waits() -> int:
        waiting = asyncio.create_task(with_last_version(counted, parts))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        set_last_version(parts.paths, 7)
        return (await waiting).max_steps

    assert asyncio.run(waits()) == 7
    assert min_floor(parts.paths) is None  # no reader's


def test_an_evaluation_of_a_version_that_is_made_anew_does_not_count(tmp_path: Path) -> None:
    """A run that goes back to step 2, with other data maybe, had evaluated version 4 before."""
    path = RunPaths(tmp_path).metrics("orchestrator")
    path.parent.mkdir()
    path.write_text("".join(json.dumps({"step": step, "eval/seconds": 1.0}) + "\n" for step in (0, 2, 4)))
    assert World(tmp_path, {"id": "a"}, last=6, start_step=2).loop.versions == [4, 6]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sft_eval_loop, weight_sync):
        monkeypatch.setattr(module, "set_floor", lambda *args: None)
    monkeypatch.setattr(sft_eval_loop, "drop_lease", lambda *args: None)


@pytest.mark.parametrize(
    ("start", "intervals", "version", "steps"), [(0, [500], 500, 500), (12, [100], 100, 88), (0, [3, 5], 6, 1)]
)
def test_a_version_may_take_as_long_as_its_steps_do(
    start: int, intervals: list[int], version: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Due versions come of each environment's own interval."""
    clock = [0.0]

    def wait(*args: Any, **kwargs: Any) -> None:
        clock[0] += TIMEOUT_S / 2
        raise ArtifactTimeout("not yet")

    monkeypatch.setattr(sft_eval_loop, "loop_time", lambda: clock[0])
    monkeypatch.setattr(sft_eval_loop, "wait_for_artifact", wait)
    monkeypatch.setattr(sft_eval_loop, "newest_of_attempt", lambda *args: None)
    envs = [{"id": "reverse-text", "interval": interval, "name": f"env{i}"} for i, interval in enumerate(intervals)]
    loop = World(tmp_path, *envs, last=600, start_step=start).loop
    with pytest.raises(OrchestratorError, match=f"no weights version {version} within {steps * TIMEOUT_S:.0f} s"):
        asyncio.run(loop._wait_for(version))


def test_the_trainer_publishes_just_what_is_waited_for(tmp_path: Path) -> None:
    world = World(tmp_path, {"id": "reverse-text", "interval": 3}, {"id": "calculator"}, last=12)
    trainer: Any = SimpleNamespace(experiment=world.loop._exp)
    published = [step for step in range(1, 12) if _is_published(trainer, step)]
    assert published == world.loop.versions[1:-1] == [2, 3, 4, 6, 8, 9, 10]


def test_it_goes_on_with_the_servers_that_are_left_and_finds_the_others_where_they_are_started(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        world = World(tmp_path, {"id": "reverse-text"})
        loop, table = world.loop, world.loop._table

        async def wait_for(version: int) -> bool:
            if version == 2:  # its node is lost while nothing is evaluated
                world.servers[0].is_up = False
                world.bus.say("server", role="inference", index=0, state="lost", url="http://a/v1")
            if version == 4:
                world.bus.say("server", role="inference", index=0, state="starting", url="http://elsewhere/v1")
            await asyncio.sleep(0)
            return True

        async def evaluate(version: int) -> None:
            world.evaluated.append((version, table.ready_indices))

        monkeypatch.setattr(loop, "_wait_for", wait_for)
        monkeypatch.setattr(loop, "_evaluate", evaluate)
        await loop.run()
        assert world.evaluated == [(0, [0, 1]), (2, [1]), (4, [1])]
        assert [server.version for server in world.servers] == [0, 4]
        assert world.servers[0].base_url == table.servers[0].url == "http://elsewhere/v1"

    asyncio.run(main())


def test_servers_that_were_lost_between_evaluations_have_their_time_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(sft_eval_loop, "loop_time", lambda: clock[0])
    loop = World(tmp_path, {"id": "reverse-text"}).loop
    clock[0] = 10_000.0  # hours without a due version
    loop._check_servers(began=9_990.0)
    with pytest.raises(OrchestratorError, match="no inference server answered"):
        loop._check_servers(began=9_900.0)
    loop._fail(KeyError("index"))
    with pytest.raises(KeyError):
        loop._check_servers(began=9_990.0)


def test_what_broke_beside_it_ends_the_wait_for_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*args: Any, **kwargs: Any) -> None:
        raise ArtifactTimeout("not yet")

    monkeypatch.setattr(sft_eval_loop, "wait_for_artifact", wait)
    monkeypatch.setattr(sft_eval_loop, "newest_of_attempt", lambda *args: None)
    loop = World(tmp_path, {"id": "reverse-text"}).loop
    loop._fail(KeyError("index"))
    with pytest.raises(KeyError):
        asyncio.run(asyncio.wait_for(loop._wait_for(2), TIMEOUT_S))


def test_an_evaluation_takes_no_version_of_a_fenced_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what this attempt makes anew; what was there when it began counts, whoever made it."""
    monkeypatch.setattr(sft_eval_loop, "LOOK_S", 0.05)
    paths = RunPaths(tmp_path / "run")
    claim_incarnation(paths)
    for version in (40, 80, 100):  # the last two came after attempt 2 had begun
        make_weights(paths, version, 1)
    claim_incarnation(paths)
    own: Any = SimpleNamespace(
        _exp=SimpleNamespace(orchestrator=SimpleNamespace(weights_timeout_s=0.0)),
        _steps_to=lambda version: 1,
        _parts=SimpleNamespace(paths=paths, bus=None, incarnation=2, status=SimpleNamespace(beat=lambda **_: None)),
        _start_step=60,
        _broken=None,
    )

    def wait_for(version: int) -> bool:
        return asyncio.run(EvalLoop._wait_for(own, version))

    assert wait_for(40) and not wait_for(20)
    for version in (70, 80):
        with pytest.raises(OrchestratorError, match=f"no weights version {version}"):
            wait_for(version)
    make_weights(paths, 80, 2)
    assert wait_for(80) and not wait_for(70)
