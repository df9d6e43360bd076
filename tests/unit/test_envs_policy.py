"""Reading the engine's answers, and tools that run in this process."""

import asyncio
from typing import Any

import numpy as np
import pytest
from verifiers.v1.errors import ProviderError

from prime_hpc.envs.policy import parse_choice
from prime_hpc.envs.tools import local_tool


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


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [5, 6]},
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
    with pytest.raises(ProviderError):
        parse_choice(choice(**changes))


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
