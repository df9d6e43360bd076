"""Rows of supervised data that are tokenised already."""

from typing import Any

import numpy as np
import pytest

from prime_hpc.trainer.data.template import ChatTokenizer
from tests.support.sft_samples import refusal, result, sample

TALK = [{"role": "user", "content": "what is the name"}, {"role": "assistant", "content": "number"}]


@pytest.mark.parametrize(
    ("row", "ids", "trained"),
    [
        ({"input_ids": [5, 6, 7]}, [5, 6, 7], [1, 1, 1]),
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}, [5, 6, 7], [0, 1, 0]),
        ({"input_ids": [5, 6, 7], "loss_mask": [False, True, True]}, [5, 6, 7], [0, 1, 1]),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, [5, 6, 7], [0, 0, 1]),
        ({"input_ids": [0, 5, 6, 0, 0], "attention_mask": [0, 1, 1, 0, 0]}, [5, 6], [1, 1]),
        ({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "labels": [-100, 6, 0]}, [5, 6], [0, 1]),
        ({"input_ids": np.array([5, 6, 7]), "loss_mask": None, "labels": None}, [5, 6, 7], [1, 1, 1]),
    ],
)
def test_rows_of_tokens_are_trained_as_they_are(tokenizer: Any, row: Any, ids: list[int], trained: list[int]) -> None:
    tokenizer.chat_template = None
    for config in ({}, {"split_turns": True, "loss_roles": ("user",), "loss_turns": "last"}):
        one = sample(row, ChatTokenizer(tokenizer), **config)
        assert (one.token_ids.tolist(), one.loss_mask.tolist()) == (ids, [bool(flag) for flag in trained])
        assert one.token_ids.dtype == np.int32 and one.loss_mask.dtype == bool


def test_tokens_beside_text_count_only_where_they_are_named(chat: ChatTokenizer, tokenizer: Any) -> None:
    tokens = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    talk = {"prompt": "a", "completion": "b"}
    for text in (talk, {"text": "a"}, {"messages": TALK}):
        assert np.array_equal(sample(text | tokens, chat).token_ids, sample(text, chat).token_ids)
        assert sample(text | tokens, chat, columns={"input_ids": "input_ids"}).token_ids.tolist() == [5, 6, 7]
    assert "Map them with" in refusal({"instruction": "a", "output": "b"} | tokens, chat)
    named = {"ids": [5, 6, 7], "completion_mask": [0, 0, 1]}
    one = sample(named, chat, columns={"input_ids": "ids", "loss_mask": "completion_mask"})
    assert one.loss_mask.tolist() == [False, False, True]
    unread = {"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}
    assert '{"loss_mask": "completion_mask"}' in refusal(unread, chat)
    assert sample(tokens | {"loss_mask": [1, 1, 1]}, chat, columns={"labels": "none"}).loss_mask.all()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [5, "a"]}, "expected `input_ids` as a list of integers, got [5, 'a']"),
        ({"input_ids": [5.0, 6.0]}, "expected `input_ids` as a list of integers"),
        ({"input_ids": [[5, 6]]}, "expected `input_ids` as a list of integers"),
        ({"input_ids": [[5], [6, 7]]}, "expected `input_ids` as a list of integers"),
        ({"input_ids": "5 6"}, "expected `input_ids` as a list of integers"),
        ({"input_ids": None}, "expected `input_ids` as a list of integers"),
        ({"input_ids": [5, -1]}, "`input_ids` holds -1, which is no token"),
        ({"input_ids": [5, 2**40]}, f"`input_ids` holds {2**40}, which is no token"),
        ({"input_ids": [5, 2**70]}, "expected `input_ids` as a list of integers"),
        ({"input_ids": [5, 300]}, "token 300 is beyond the model's vocabulary of 300"),
        ({"input_ids": [5, 6], "loss_mask": [1]}, "`loss_mask` has 1 entries, and the row 2 tokens"),
        ({"input_ids": [5, 6], "loss_mask": [1, 2]}, "`loss_mask` holds 2: only true, false, 0 and 1 are known"),
        ({"input_ids": [5, 6], "labels": [6, -100]}, "`labels` has 6 at place 0, where the token is 5"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, "`attention_mask` has 1 entries, and the row 2 tokens"),
        ({"input_ids": [5, 6], "labels": [5, 6], "loss_mask": [1, 1]}, "`loss_mask` and `labels` both say"),
    ],
)
def test_rows_of_tokens_that_cannot_be_trained_are_refused(chat: ChatTokenizer, row: Any, words: str) -> None:
    assert words in refusal(row, chat, vocab_size=300)
    assert result(row, chat, vocab_size=300, bad_rows="skip").counts.bad == 1


def test_long_rows_of_tokens(chat: ChatTokenizer) -> None:
    whole, masked = {"input_ids": [*range(10)]}, {"input_ids": [*range(10)], "loss_mask": [0, 0, *[1] * 8]}
    pieces = result(whole, chat, 4, overlong="split").samples
    assert [one.token_ids.tolist() for one in pieces] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert "only what is trained whole is split" in (result(masked, chat, 4, overlong="split").error or "")
    assert result(masked, chat, 4, overlong="drop").counts.overlong == 1
    assert result(masked, chat, 4, overlong="truncate").samples[0].loss_mask.tolist() == [False, False, True, True]
    nothing: tuple[dict[str, list[int]], ...] = (
        {"input_ids": [5, 6], "loss_mask": [1, 0]},
        {"input_ids": [5]},
        {"input_ids": []},
    )
    assert [result(row, chat).counts.untrained for row in nothing] == [1, 1, 1]
