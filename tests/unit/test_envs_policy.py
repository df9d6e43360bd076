"""Reading the engine's answers, and tools that run in this process."""

import asyncio
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from verifiers.v1.errors import ProviderError

from prime_hpc.envs.harness import local_tool
from prime_hpc.envs.model_client import PolicyClient, parse_choice
from prime_hpc.orchestrator.rollouts.episodes import is_retryable, is_server_error
from tests.support.episodes import failed_result
from tests.support.scripted_server import Reply, ScriptedServer
from tests.support.tiny_tokenizer import make_tokenizer


def choice(**changes: Any) -> dict[str, Any]:
    made = {
        "token_ids": [5, 6, 7],
        "logprobs": {"content": [{"token_id": t, "logprob": -0.1 * t, "rank": 1} for t in (5, 6, 7)]},
        "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
        "finish_reason": "stop",
    }
    return made | changes


def test_versions_of_a_reply_that_spans_a_weight_update() -> None:
    ids, logprobs, versions = parse_choice(choice())
    assert ids == [5, 6, 7]
    assert logprobs == pytest.approx([-0.5, -0.6, -0.7])
    assert versions.tolist() == [3, 3, 4] and versions.dtype == np.int32


def test_older_vllm_spells_the_token_differently() -> None:
    content = [{"token": f"token_id:{t}", "logprob": -1.0} for t in (5, 6, 7)]
    assert parse_choice(choice(logprobs={"content": content}))[1] == [-1.0] * 3


def test_log_probabilities_may_come_as_bare_numbers() -> None:
    ids, logprobs, versions = parse_choice(choice(logprobs={"values": [-0.5, -0.6, -0.7]}))
    assert (ids, logprobs, versions.tolist()) == ([5, 6, 7], [-0.5, -0.6, -0.7], [3, 3, 4])


def test_log_probabilities_that_nobody_asked_for_are_not_missed() -> None:
    ids, logprobs, versions = parse_choice(choice(logprobs=None), with_logprobs=False)
    assert (ids, logprobs, versions.tolist()) == ([5, 6, 7], [], [3, 3, 4])
    with pytest.raises(ProviderError):
        parse_choice(choice(logprobs=None, weight_versions=None), with_logprobs=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [5, 6]},
        {"logprobs": {"values": [-1.0, -1.0]}},
        {"logprobs": {"values": [-1.0, -9999.0, -1.0]}},
        {"logprobs": {"values": [-1.0, None, -1.0]}},
        {"token_ids": [5, 6, 8]},
        {"logprobs": None},
        {"logprobs": {"content": [{"token_id": t, "logprob": -9999.0} for t in (5, 6, 7)]}},
        {"logprobs": {"content": [{"token_id": t, "logprob": None} for t in (5, 6, 7)]}},
        {"logprobs": {"content": [{"token": f"token_id:{t}", "logprob": -1.0} for t in (5, 6, 8)]}},
        {"weight_versions": None},
        {"weight_versions": [{"version": "3", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "default", "start": 0, "end": 3}]},
    ],
)
def test_answers_that_cannot_be_trained_on_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProviderError) as caught:
        parse_choice(choice(**changes))
    no_logprob = "the server sent the log-probability" in str(caught.value)
    result = failed_result(error_type=type(caught.value).__name__)
    assert is_retryable(result) and is_server_error(result) is not no_logprob


@pytest.mark.parametrize(
    ("status", "suspect", "again"),
    [(400, False, False), (422, False, False), (404, True, True), (500, True, True), (503, True, True)],
)
def test_the_status_says_whether_the_server_is_to_be_looked_at(
    status: int, suspect: bool, again: bool, tmp_path: Path
) -> None:
    async def ask(server: ScriptedServer) -> ProviderError:
        client = PolicyClient(server.url, "key", None, 100, patience_s=0)  # type: ignore[arg-type]
        try:
            with pytest.raises(ProviderError) as caught:
                await client._generate(
                    {"model": "policy", "token_ids": [1], "sampling_params": {"max_tokens": 1}}, None
                )
            return caught.value
        finally:
            await client.close()

    with ScriptedServer(make_tokenizer(tmp_path), lambda prompt, number: Reply(status=status)) as server:
        error = asyncio.run(ask(server))
    assert error.status_code == status
    result = failed_result(error_type=type(error).__name__)
    assert (is_server_error(result), is_retryable(result)) == (suspect, again)


def test_local_tools_tell_the_model_what_is_wrong() -> None:
    def divide(a: int, b: int) -> float:
        """Divide a by b."""
        return a / b

    tool = local_tool(divide)
    assert tool.declaration.name == "divide" and tool.declaration.description == "Divide a by b."
    assert tool.declaration.parameters == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }
    call = lambda arguments: asyncio.run(tool.call(arguments))  # noqa: E731
    assert call('{"a": 6, "b": "3"}') == "2.0"
    assert "b" in call('{"a": 6}') and call('{"a": 6}').startswith("error")
    assert call('{"a": 1, "b": 0}').startswith("error: ZeroDivisionError")
    assert call("{not json").startswith("error")
    assert call("[1, 2]").startswith("error")


def test_a_local_tool_may_be_asked_for_half_a_character() -> None:
    """JSON can spell one, and no tokenizer takes it: the episode failed."""

    def backwards(text: str) -> str:
        """Say it backwards."""
        return text[::-1]

    assert asyncio.run(local_tool(backwards).call('{"text": "a\\ud800\\u00e9"}')) == "\u00e9\ufffda"


def test_a_local_tools_arguments_are_declared_whole() -> None:
    """Of an optional one, a list, one of some words: `type` alone says too little, or is not there."""

    def stock(names: list[str], unit: Literal["kg", "g"] | None = None) -> str:
        """How many there are."""
        return f"{names} {unit}"

    tool = local_tool(stock)
    properties: Any = tool.declaration.parameters["properties"]
    assert properties["names"] == {"type": "array", "items": {"type": "string"}}
    assert properties["unit"]["anyOf"][0]["enum"] == ["kg", "g"] and tool.declaration.parameters["required"] == [
        "names"
    ]
    assert asyncio.run(tool.call('{"names": ["a"], "unit": "kg"}')) == "['a'] kg"
    assert asyncio.run(tool.call('{"names": "a"}')).startswith("error: names")
