"""A package that a user wrote last night: what it raises, and what it does to the process, wherever it does."""

import asyncio
import signal

import pytest
from loguru import logger

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs import held_out
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.held_out import leave_out_trained
from prime_hpc.evals.play import task_id
from prime_hpc.observe.logs import setup_logger
from tests.support.env_world import World

pytestmark = pytest.mark.slow

ODD = "tests.support.odd_package"


def odd(kind: str, **options: int) -> EnvConfig:
    return EnvConfig(id=ODD, name="odd", args={"kind": kind}, **options)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("exits", "environment 'odd' cannot be loaded: SystemExit: set THE_KEY"),
        ("start_raises", "environment 'odd' cannot be started: KeyError: 'THE_KEY'"),
        ("start_exits", "environment 'odd' cannot be started: SystemExit: set THE_KEY"),
    ],
)
def test_what_it_raises_before_it_plays_is_told_with_its_name(world: World, kind: str, words: str) -> None:
    with pytest.raises(EnvError, match=words):
        world.play(odd(kind))


@pytest.mark.usefixtures("forked_hosts")
def test_a_worker_s_environment_that_ends_its_process_as_it_starts_is_told_too(world: World) -> None:
    """Once: no worker is started again for it."""
    with pytest.raises(EnvError, match="environment 'odd' cannot be started: SystemExit: set THE_KEY"):
        world.play(odd("start_exits", workers=1))


def test_one_that_runs_something_at_once_as_it_is_loaded(world: World) -> None:
    """On the loop that a program's first thread has."""
    (result,) = world.play(odd("loop"))
    assert result.usable, result.reason


@pytest.mark.usefixtures("forked_hosts")
@pytest.mark.parametrize("workers", [0, 1])
def test_one_that_sets_handlers_of_signals_as_it_is_loaded(world: World, workers: int) -> None:
    """On the main thread, where alone that can be done; those that end a role stay the role's."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGALRM, signal.SIGTERM)}
    try:
        (result,) = world.play(odd("signals", workers=workers))
        assert result.usable, result.reason
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is before[signal.SIGTERM]
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@pytest.mark.usefixtures("forked_hosts")
def test_one_whose_rewards_set_alarms_without_a_handler(world: World) -> None:
    """HumanEval's `time_limit` does on a thread. The process of the episodes outlives them, what it forks does not."""
    env = EnvConfig(id="tests.support.misbehaving", args={"kind": "alarms"}, workers=1)
    (result,) = world.play(env)
    assert result.usable, result.reason
    assert result.reward == 1.0


def test_an_endless_one_that_ends_the_process_fails_the_episode_of_that_task(world: World) -> None:
    results = world.play(odd("exits_later"), 3)
    assert [result.usable for result in results] == [True, True, False]
    assert "task 2 cannot be made: SystemExit: set THE_KEY" in results[2].reason


def test_data_that_is_no_json_is_told_where_tasks_must_be_told_apart(world: World) -> None:
    async def run() -> None:
        async with world.pool(odd("bytes")) as pool:
            for ask in (
                lambda: leave_out_trained(pool.sources, pool.sources, 4),
                lambda: task_id(pool.sources[0].task(3)),
            ):
                with pytest.raises(EnvError, match=r"OddData of task \d: its fields cannot be written as JSON"):
                    ask()

    asyncio.run(run())


@pytest.mark.parametrize(("seconds", "first"), [(60.0, 3), (0.0, 1)])
def test_an_endless_one_that_is_slow_is_compared_for_a_limited_time(
    world: World, monkeypatch: pytest.MonkeyPatch, seconds: float, first: int
) -> None:
    """Else a run would begin once 2,000 of its tasks are made, an hour later."""

    async def run() -> int:
        async with world.pool(odd("endless")) as train, world.pool(odd("none")) as pool:
            leave_out_trained(pool.sources, train.sources, 5)
            return pool.sources[0].number(0)

    monkeypatch.setattr(held_out, "SEEN", 3)
    monkeypatch.setattr(held_out, "MAKING_S", seconds)
    assert asyncio.run(run()) == first


def test_one_that_takes_the_logger_over_leaves_it_to_the_role(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with world.pool(odd("logs")):
            logger.info("still here")

    setup_logger("role")
    try:
        asyncio.run(run())
        said = capsys.readouterr()
        assert [line.split(maxsplit=1)[1] for line in said.out.splitlines() if "here" in line] == [
            "INFO    role still here"
        ]
        assert "theirs" not in said.err
    finally:
        logger.remove()
