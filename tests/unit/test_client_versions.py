"""Version spans of the engine become one policy version a token, or an error that says what is wrong with them."""

import numpy as np
import pytest

from prime_hpc.client.inference import InferenceError, parse_choice
from prime_hpc.client.versions import VersionSpanError, versions_from_spans


def span(version: object, start: int, end: int) -> dict[str, object]:
    return {"version": version, "start": start, "end": end}


def test_spans_become_one_version_a_token() -> None:
    versions = versions_from_spans([span("3", 0, 2), span("4", 2, 5)], 5)
    assert versions.dtype == np.int32
    assert versions.tolist() == [3, 3, 4, 4, 4]


def test_no_tokens_need_no_spans() -> None:
    assert versions_from_spans(None, 0).shape == (0,)
    assert versions_from_spans([], 0).shape == (0,)


def test_an_empty_span_is_allowed() -> None:
    """An update may fall before the first token of a request."""
    assert versions_from_spans([span("1", 0, 0), span("2", 0, 3)], 3).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        (None, "cover 0 of 3"),
        ([span("1", 0, 2)], "cover 2 of 3"),
        ([span("1", 0, 1), span("2", 2, 3)], "does not continue at token 1"),
        ([span("1", 0, 2), span("2", 1, 3)], "does not continue at token 2"),
        ([span("1", 0, 4)], "of 3"),
        ([span("default", 0, 3)], "no integer version"),
        ([{"version": "1", "start": 0}], "no integer version"),
    ],
)
def test_spans_that_do_not_fit_are_refused(spans: list | None, reason: str) -> None:
    with pytest.raises(VersionSpanError, match=reason):
        versions_from_spans(spans, 3)


def choice(**changes: object) -> dict[str, object]:
    return {
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -1.5}]},
        "weight_versions": [span("2", 0, 2)],
        **changes,
    }


def test_a_choice_becomes_arrays() -> None:
    generation = parse_choice(choice())
    assert (generation.token_ids.dtype, generation.logprobs.dtype) == (np.int32, np.float32)
    assert generation.token_ids.tolist() == [5, 6]
    assert generation.logprobs.tolist() == [-0.5, -1.5]
    assert generation.versions.tolist() == [2, 2]
    assert generation.finish_reason == "stop"


def test_logprobs_of_other_tokens_are_refused() -> None:
    with pytest.raises(InferenceError, match="of other tokens|for 1 tokens|for 2 tokens"):
        parse_choice(choice(token_ids=[5, 7]))
    with pytest.raises(InferenceError, match="of other tokens|for 1 tokens|for 2 tokens"):
        parse_choice(choice(logprobs=None))
