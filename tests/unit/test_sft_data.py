"""Which tokens SFT trains, and what it says about rows that it cannot train on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prime_hpc.config.sections.sft import SFTDataConfig
from prime_hpc.trainer.sft_data import ChatTokenizer, SFTData, SFTDataError, SFTSample, load_samples, tokenize_row
from tests.support.tiny_model import CHATML, STRIPPING
from tests.support.tiny_tokenizer import make_tokenizer

CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is the name"},
    {"role": "assistant", "content": "number"},
    {"role": "tool", "content": "lower"},
    {"role": "tool", "content": "higher"},
    {"role": "assistant", "content": "add\nmultiply"},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def chat(tokenizer: Any) -> ChatTokenizer:
    tokenizer.chat_template = CHATML
    return ChatTokenizer(tokenizer)


def trained_text(sample: SFTSample, tokenizer: Any) -> list[str]:
    """The runs of trained tokens, decoded."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.loss_mask, [False]])))
    return [tokenizer.decode(sample.token_ids[a:b]) for a, b in edges.reshape(-1, 2)]


def test_assistant_content_and_end_of_turn_are_trained_and_nothing_else(chat: ChatTokenizer, tokenizer: Any) -> None:
    sample = tokenize_row({"messages": CONVERSATION}, "row", chat, ("assistant",))
    assert trained_text(sample, tokenizer) == ["number<|im_end|>", "add\nmultiply<|im_end|>"]
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert sample.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert sample.token_ids.dtype == np.int32 and sample.loss_mask.dtype == bool


def test_other_roles_can_be_trained(chat: ChatTokenizer, tokenizer: Any) -> None:
    sample = tokenize_row({"messages": CONVERSATION}, "row", chat, ("user",))
    assert trained_text(sample, tokenizer) == ["what is the name<|im_end|>"]


def test_only_the_completion_is_trained(chat: ChatTokenizer, tokenizer: Any) -> None:
    row = {"prompt": CONVERSATION[:4], "completion": CONVERSATION[4:]}
    assert trained_text(tokenize_row(row, "row", chat, ("assistant",)), tokenizer) == ["add\nmultiply<|im_end|>"]
    row = {"prompt": "my number", "completion": "higher"}
    sample = tokenize_row(row, "row", chat, ("assistant",))
    assert trained_text(sample, tokenizer) == ["higher<|im_end|>"]
    assert tokenizer.decode(sample.token_ids).startswith("<|im_start|>user\nmy number<|im_end|>")


def test_plain_text_without_a_template(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    sample = tokenize_row({"prompt": "my ", "completion": "number"}, "row", ChatTokenizer(tokenizer), ("assistant",))
    assert trained_text(sample, tokenizer) == ["number<|im_end|>"]


def test_template_that_rewrites_the_past_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = STRIPPING
    chat = ChatTokenizer(tokenizer)
    single = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nname"}]
    sample = tokenize_row({"messages": single}, "row", chat, ("assistant",))
    assert trained_text(sample, tokenizer) == ["<think>\nhm\n</think>\n\nname<|im_end|>"]
    with pytest.raises(SFTDataError) as caught:
        tokenize_row({"messages": single * 2}, "data.jsonl:7", chat, ("assistant",))
    message = str(caught.value)
    assert message.startswith("data.jsonl:7: the chat template of")
    assert "prefix property at message 3" in message and "<think>" in message and "name<|im_end|>" in message


def test_header_that_is_not_in_the_conversation_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML.replace("assistant\\n' -}}{%- endif", "assistant\\n<think>' -}}{%- endif")
    with pytest.raises(SFTDataError, match="prefix property at message 2"):
        tokenize_row({"prompt": "my", "completion": "number"}, "row", ChatTokenizer(tokenizer), ("assistant",))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "a", "answer": "b"}, ["`messages`", "answer, question"]),
        ({"messages": [{"role": "user", "content": "add"}]}, ["no token of this row", "assistant"]),
        ({"messages": ["add"]}, ["list of messages"]),
        ([1], ["JSON object"]),
        ({"prompt": 3, "completion": "x"}, ["string or a list of messages"]),
    ],
)
def test_bad_rows_are_named(chat: ChatTokenizer, row: Any, words: list[str]) -> None:
    with pytest.raises(SFTDataError) as caught:
        tokenize_row(row, "data.jsonl:12", chat, ("assistant",))
    assert all(word in str(caught.value) for word in ["data.jsonl:12", *words])


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_overlong_rows(chat: ChatTokenizer, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b" * 100}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert len(load_samples(SFTDataConfig(path=path, overlong="drop"), chat, 60)) == 1
    cut = load_samples(SFTDataConfig(path=path, overlong="truncate"), chat, 60)
    assert [len(s.token_ids) for s in cut][1] == 60
    with pytest.raises(SFTDataError, match=r"rows\.jsonl:2.*more than seq_len = 60"):
        load_samples(SFTDataConfig(path=path, overlong="error"), chat, 60)
    with pytest.raises(SFTDataError, match="no usable row"):
        load_samples(SFTDataConfig(path=path, overlong="drop"), chat, 3)


def test_files_that_cannot_be_read(chat: ChatTokenizer, tmp_path: Path) -> None:
    with pytest.raises(SFTDataError, match=r"sft\.data\.path"):
        load_samples(SFTDataConfig(), chat, 60)
    with pytest.raises(SFTDataError, match="No such file"):
        load_samples(SFTDataConfig(path=tmp_path / "none.jsonl"), chat, 60)
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt"', encoding="utf-8")
    with pytest.raises(SFTDataError, match=r"broken\.jsonl:2: not JSON"):
        load_samples(SFTDataConfig(path=tmp_path / "broken.jsonl"), chat, 60)


def samples_of(count: int) -> list[SFTSample]:
    return [SFTSample(np.full(3 + i % 5, i, np.int32), np.ones(3 + i % 5, bool)) for i in range(count)]


def used(data: SFTData, position: int, world_size: int) -> list[int]:
    ranks = [data.batch(position, r, world_size) for r in range(world_size)]
    assert len({r.num_micro_batches for r in ranks}) == 1
    for rank in ranks:
        sizes = [rank.tokens_of(m).stop - rank.tokens_of(m).start for m in range(rank.num_micro_batches)]
        assert max(sizes, default=0) <= 16
    return sorted(int(i) for r in ranks for i in r.sample_ids)


def test_every_epoch_is_a_permutation_whatever_the_ranks() -> None:
    config = SFTDataConfig(batch_size=5)
    data = SFTData(samples_of(20), config, seed=3, micro_batch_tokens=16)
    epochs = [[i for p in range(e * 20, e * 20 + 20, 5) for i in used(data, p, 2)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert epochs[0] != epochs[1]
    again = SFTData(samples_of(20), config, seed=3, micro_batch_tokens=16)
    assert [used(again, p, 3) for p in (25, 10)] == [used(data, p, 1) for p in (25, 10)]
