"""A resumed run says where its environments have other tasks than before."""

from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from loguru import logger

from prime_hpc.orchestrator.rollouts.same_tasks import digests, warn_of_others


def source(name: str, prompts: list[str] | None, fails_at: int | None = None) -> Any:
    def task(index: int) -> Any:
        if index == fails_at:
            raise RuntimeError("the taskset's own")
        return vf.Task(vf.TaskData(idx=index, prompt=(prompts or [])[index]), vf.TaskConfig())

    return SimpleNamespace(name=name, num_tasks=None if prompts is None else len(prompts), task=task)


def warned(then: dict[str, str], now: dict[str, str]) -> str:
    said: list[str] = []
    sink = logger.add(lambda message: said.append(message.record["message"]), level="WARNING")
    warn_of_others(then, now)
    logger.remove(sink)
    return "".join(said)


def test_other_prompts_another_order_and_what_cannot_be_told() -> None:
    prompts = [f"say {number}" for number in range(100)]
    endless, broken = source("endless", None), source("broken", ["a", "b"], fails_at=1)
    then = digests([source("a", prompts), source("b", ["one"]), endless, broken])
    assert then.keys() == {"a", "b"}
    assert not warned(then, digests([source("a", list(prompts)), source("b", ["one"]), endless]))
    for others in (list(reversed(prompts)), [f"{prompt}?" for prompt in prompts]):
        assert warned(then, digests([source("a", others), source("b", ["one"])])).startswith("a: as many tasks as when")
    assert not warned({}, then), "a state of an earlier version has none"


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 10_000])
def test_few_tasks_are_looked_at_the_first_among_them(count: int) -> None:
    asked: list[int] = []
    one = source("a", ["x"] * count)
    own = one.task

    def task(index: int) -> Any:
        asked.append(index)
        return own(index)

    one.task = task
    digests([one])
    assert asked[0] == 0 and len(asked) == min(count, 32) and len(set(asked)) == len(asked) and max(asked) < count
