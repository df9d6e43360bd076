"""Judges of packages with `load_environment`: asked on one loop, within their limits, and away."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI

from prime_hpc.envs.legacy.messages import ChatMessage, State
from prime_hpc.envs.legacy.rubrics import JudgeRubric
from tests.support.scripted_api import Fault, ScriptedApi

pytestmark = pytest.mark.slow


def test_a_judge_is_asked_on_one_loop_whoever_asks() -> None:
    """Training and evaluation share an environment, and its judge's connections, and have a loop each."""
    loops = set()

    async def create(**request: Any) -> Any:
        loops.add(asyncio.get_running_loop())
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="yes"))])

    judge = JudgeRubric(judge_client=SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create))))
    for _ in range(2):
        assert asyncio.run(judge.judge("question", "reply", "answer")) == "yes"
    assert len(loops) == 1


def test_a_judge_that_blocks_holds_up_who_asked_it_alone() -> None:
    """With a plain `OpenAI()` for its client one slow answer stopped all judges of the process."""
    threads = []

    def create(**request: Any) -> Any:
        threads.append(threading.current_thread())
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="yes"))])

    judge = JudgeRubric(judge_client=SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create))))
    assert asyncio.run(judge.judge("question", "reply", "answer")) == "yes"
    assert threads == [threading.current_thread()]


def test_a_judge_s_limit_goes_under_the_name_that_newer_models_take() -> None:
    """They answer 400 to `max_tokens`, which counted as 0 for every reply."""
    asked: list[dict[str, Any]] = []

    def create(**request: Any) -> Any:
        asked.append(request)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content="yes"))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    sampling = {"max_tokens": 10, "temperature": None, "seed": 1}
    judge = JudgeRubric(judge_client=client, judge_model="newer", judge_sampling_args=sampling)
    assert asyncio.run(judge.judge("question", "reply", "answer")) == "yes"
    assert {k: v for k, v in asked[0].items() if k != "messages"} == {
        "model": "newer",
        "max_completion_tokens": 10,
        "seed": 1,
    }


@pytest.mark.parametrize(("status", "is_scored"), [(400, True), (401, False), (429, False), (500, False)])
def test_a_judge_that_is_away_scores_nothing(status: int, is_scored: bool) -> None:
    """Its rollouts were 0, which was learned from."""

    async def ask() -> tuple[float, float]:
        judge = JudgeRubric(judge_client=AsyncOpenAI(base_url=api.url, api_key="key", max_retries=0))

        async def agrees(judge: Any, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
            return float(await judge(prompt, completion, answer, state) == "yes")

        message = [ChatMessage(role="assistant", content="reply")]
        state = State(prompt=[ChatMessage(role="user", content="question")], completion=message, answer="a")
        assert await judge.value(agrees, state, weight=0.0) == 0.0, "a metric is nothing to learn from"
        return await judge.value(agrees, state), state["reward_errors"]

    with ScriptedApi(fault=lambda conversation, number: Fault(status)) as api:
        if is_scored:
            assert asyncio.run(ask()) == (0.0, 2)
        else:
            with pytest.raises(APIStatusError):
                asyncio.run(ask())
