"""Tasks of training and evaluation, and environments that cannot be set up."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.held_out import content, leave_out_trained
from tests.support.env_world import World

pytestmark = pytest.mark.slow

MISBEHAVING = "tests.support.misbehaving"


def stated(split: str, num_tasks: int) -> EnvConfig:
    return EnvConfig(id="reverse-text", args={"split": split, "num_tasks": num_tasks})


def test_no_evaluation_takes_a_task_that_is_trained(world: World) -> None:
    trained = [stated("train", 40), EnvConfig(id="guess-number", args={"num_tasks": 300, "max_number": 6})]

    async def chosen(env: EnvConfig, num_examples: int) -> list[str]:
        async with world.pool(*trained) as train, world.pool(env, split="eval") as pool:
            leave_out_trained(pool.sources, train.sources, num_examples)
            count = pool.sources[0].num_tasks
            assert count is not None
            return [content(pool.sources[0].task(i)) for i in range(count)]

    async def run() -> None:
        async with world.pool(*trained) as train:
            known = {content(s.task(i)) for s in train.sources for i in range(s.num_tasks or 0)}
        # another length of the training list: its first 40 tasks are those of training, the rest are not
        assert len(await chosen(stated("train", 100), 60)) == 60
        assert not known & set(await chosen(stated("train", 100), 60))
        with pytest.raises(EnvError, match="'reverse-text': 40 of its first 50 tasks are trained on as well"):
            await chosen(stated("train", 50), 25)
        # the prompts are the same, the games are not
        games = EnvConfig(id="guess-number", args={"num_tasks": 10, "max_number": 6})
        assert len(await chosen(games, 10)) == 10

    asyncio.run(run())


def test_splits_hold_different_tasks(world: World) -> None:
    async def prompts(env: EnvConfig, split: str, **options: Any) -> list[str]:
        async with world.pool(env, split=split, **options) as pool:
            source = pool.sources[0]
            assert source.num_tasks is not None
            return [str(source.task(i).data.prompt) for i in range(source.num_tasks)]

    async def run() -> None:
        for env in ("reverse-text", "guess-number", "calculator", "reasoning-gym"):
            config = EnvConfig(id=env, args={"num_tasks": 40})
            train, held_out = await prompts(config, "train"), await prompts(config, "eval")
            assert len(train) == len(held_out) == 40
            # guess-number's prompt hides the secret that distinguishes its games
            assert env == "guess-number" or not set(train) & set(held_out)
            assert train == await prompts(config, "train")
            assert train != await prompts(config, "train", seed=1)
        # one list of tasks for both splits, of a taskset that has no `split` or whose split is stated: every tenth
        for config in (EnvConfig(id=MISBEHAVING, args={"num_tasks": 25}), stated("train", 25), stated("eval", 25)):
            both = [await prompts(config, split, beside=[config]) for split in ("eval", "train")]
            everything = await prompts(config, "eval")
            assert len(everything) == 25 and both[0] == [everything[9], everything[19]]
            assert both[1] == [prompt for prompt in everything if prompt not in both[0]]
        config = EnvConfig(id=MISBEHAVING, args={"num_tasks": 3})
        train = await prompts(config, "train", beside=[config])
        assert (await prompts(config, "eval", beside=[config]), train) == (["task 2"], ["task 0", "task 1"])
        # splits that are not the same list are whole
        other = [EnvConfig(id="reverse-text", args={"num_tasks": 25}), stated("eval", 25)]
        assert len(await prompts(stated("train", 25), "train", beside=other[1:])) == 25
        assert len(await prompts(other[0], "train", beside=other[:1])) == 25
        with pytest.raises(EnvError, match="has one task, which cannot be both trained and evaluated on"):
            await prompts(stated("train", 1), "eval", beside=[stated("train", 1)])

    asyncio.run(run())


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (EnvConfig(id="reverse-txt"), r"'reverse-txt' is not installed.*Did you mean 'reverse-text'.*pip install"),
        (EnvConfig(id="no.such.module"), r"'no.such.module' is not installed"),
        (EnvConfig(id="json"), r"not a verifiers v1 taskset"),
        (
            EnvConfig(id="reverse-text", args={"max_char": 9}),
            r"args.max_char: no such argument; did you mean 'max_chars'",
        ),
        (EnvConfig(id="reverse-text", args={"num_tasks": "many"}), r"args.num_tasks: .*integer.*'many'"),
        (EnvConfig(id="reverse-text", args={"max_chars": 2}), r"cannot be loaded.*bounds"),
        (EnvConfig(id="reverse-text", env_args={"timeot": {}}), r"env_args.timeot: no such argument; did you mean"),
        (EnvConfig(id="reasoning-gym", args={"generators": ["chain_sun"]}), r"no generator 'chain_sun'.*chain_sum"),
        (EnvConfig(id="reverse-text", harness="no-such-harness"), r"no-such-harness"),
    ],
)
def test_environments_that_cannot_be_set_up_say_why(world: World, env: EnvConfig, message: str) -> None:
    with pytest.raises(EnvError, match=re.compile(message, re.DOTALL)):
        world.play(env)
    assert world.server.requests == []


def test_a_missing_tokenizer_is_named(world: World, tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="cannot load a tokenizer"):
        world.play(EnvConfig(id="reverse-text"), tokenizer_path=str(tmp_path))
    with pytest.raises(EnvError, match="renderer"):
        world.play(EnvConfig(id="reverse-text"), renderer="no-such-renderer")
