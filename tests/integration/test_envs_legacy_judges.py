"""Judges of packages with `load_environment`: asked on one loop, within their limits, away, and without a verdict."""

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, OpenAI

from prime_hpc.envs.legacy.failures import ModelError
from prime_hpc.envs.legacy.messages import ChatMessage, State
from prime_hpc.envs.legacy.rubrics import JudgeRubric
from tests.support.scripted_api import Fault, ScriptedApi

pytestmark = pytest.mark.slow

JSON = {"Content-Type": "application/json"}


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


def ask(judge: JudgeRubric) -> tuple[float, float]:
    """The value of a reward that asks the judge, and how many rewards raised."""

    async def agrees(judge: Any, prompt: Any, completion: Any, answer: Any, state: Any) -> float:
        return float(await judge(prompt, completion, answer, state) == "yes")

    async def value() -> float:
        assert await judge.value(agrees, state, weight=0.0) == 0.0, "a metric is nothing to learn from"
        return await judge.value(agrees, state)

    message = [ChatMessage(role="assistant", content="reply")]
    state = State(prompt=[ChatMessage(role="user", content="question")], completion=message, answer="a")
    return asyncio.run(value()), state.get("reward_errors", 0)


@pytest.mark.parametrize(("status", "is_scored"), [(400, True), (401, False), (429, False), (500, False)])
def test_a_judge_that_is_away_scores_nothing(status: int, is_scored: bool) -> None:
    """Its rollouts were 0, which was learned from."""

    with ScriptedApi(fault=lambda conversation, number: Fault(status)) as api:
        judge = JudgeRubric(judge_client=AsyncOpenAI(base_url=api.url, api_key="key", max_retries=0))
        if is_scored:
            assert ask(judge) == (0.0, 2)
        else:
            with pytest.raises(APIStatusError):
                ask(judge)


def answer_of(**message: Any) -> bytes:
    choice = {"index": 0, "finish_reason": message.pop("finish_reason", "stop"), "message": message}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"id": "1", "choices": [{"mess', "cannot be read.*JSONDecodeError"),
        (b'{"error": {"message": "upstream overloaded", "code": 502}}', "cannot be read.*upstream overloaded"),
        (b'{"id": "1", "choices": []}', "cannot be read"),
        (b'"busy"', "cannot be read.*busy"),
        (answer_of(role="assistant", content=None, finish_reason="length"), "says nothing.*length"),
        (answer_of(role="assistant", content=" "), "says nothing"),
    ],
)
def test_a_judge_that_answers_without_a_verdict_scores_nothing(body: bytes, said: str) -> None:
    """Its answer was an error of the reward function, or the word None: 0, which was learned from."""
    with ScriptedApi(fault=lambda conversation, number: Fault(200, body, headers=JSON)) as api:
        for client in (AsyncOpenAI, OpenAI):
            judge = JudgeRubric(judge_client=client(base_url=api.url, api_key="key", max_retries=0), judge_model="j")
            with pytest.raises(ModelError, match=f"(?s)judge j .*{said}"):
                ask(judge)


def test_what_a_judge_does_not_want_to_judge_is_the_reply_s_fault() -> None:
    refused = answer_of(role="assistant", content=None, refusal="I cannot help with that.")
    filtered = answer_of(role="assistant", content=None, finish_reason="content_filter")
    bodies = iter((refused, filtered))
    with ScriptedApi(fault=lambda conversation, number: Fault(200, next(bodies), headers=JSON)) as api:
        judge = JudgeRubric(judge_client=AsyncOpenAI(base_url=api.url, api_key="key", max_retries=0))
        assert [ask(judge), ask(judge)] == [(0.0, 0)] * 2
