"""Which tokens SFT trains, and what it says about rows that it cannot train on."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from prime_hpc.config.sections.sft import SFTDataConfig
from prime_hpc.trainer.data.messages import Conversation, SFTDataError, parse_line, parse_row
from prime_hpc.trainer.data.template import ChatTokenizer
from tests.support.sft_samples import refusal, result, sample, samples, trained_text
from tests.support.tiny_model import CHATML, QWEN3, STRIPPING
from tests.support.tiny_tokenizer import make_tokenizer

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is the name"},
    {"role": "assistant", "content": "number"},
    {"role": "tool", "content": "lower"},
    {"role": "tool", "content": "higher"},
    {"role": "assistant", "content": "add\nmultiply"},
]
DIGITS, DEEP = f"[{'9' * 5000}]", "[" * 20000
THINKING = [
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nname"},
]


def test_assistant_content_and_end_of_turn_are_trained_and_nothing_else(chat: ChatTokenizer, tokenizer: Any) -> None:
    one = sample({"messages": CONVERSATION}, chat)
    assert trained_text(one, tokenizer) == ["number<|im_end|>", "add\nmultiply<|im_end|>"]
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert one.token_ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert one.token_ids.dtype == np.int32 and one.loss_mask.dtype == bool


def test_assistant_may_begin(chat: ChatTokenizer, tokenizer: Any) -> None:
    talk = [{"role": "assistant", "content": "guess"}, {"role": "user", "content": "my"}]
    assert trained_text(sample({"messages": talk}, chat), tokenizer) == ["guess<|im_end|>"]


def test_other_roles_can_be_trained(chat: ChatTokenizer, tokenizer: Any) -> None:
    one = sample({"messages": CONVERSATION}, chat, loss_roles=("user",))
    assert trained_text(one, tokenizer) == ["what is the name<|im_end|>"]
    one = sample({"messages": CONVERSATION}, chat, loss_roles=("tool",))
    assert trained_text(one, tokenizer) == ["lower<|im_end|>", "higher<|im_end|>"]


MERGING = """
{%- if messages[0].role == 'system' and messages|length == 1 -%}{{- raise_exception('only system') -}}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- elif message.role == 'system' -%}{{- '<|im_start|>user\n' + message.content + '\n\n' -}}
{%- elif loop.index0 == 1 and messages[0].role == 'system' -%}{{- message.content + '<|im_end|>\n' -}}
{%- else -%}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""Tool results of a turn in one turn of the user, and the system message in the user's first turn."""


@pytest.mark.parametrize(
    ("trained", "apart", "merged"),
    [
        ((0,), ["be brief<|im_end|>"], ["be brief"]),
        ((1,), ["what is the name<|im_end|>"], ["what is the name<|im_end|>"]),
        ((0, 3), ["be brief<|im_end|>", "lower<|im_end|>"], ["be brief", "lower"]),
        ((4,), ["higher<|im_end|>"], ["higher\n</tool_response><|im_end|>"]),
        ((3, 4), ["lower<|im_end|>", "higher<|im_end|>"], ["lower", "higher\n</tool_response><|im_end|>"]),
    ],
)
def test_each_message_of_a_group_is_trained_by_its_own_flag(
    tokenizer: Any, trained: tuple[int, ...], apart: list[str], merged: list[str]
) -> None:
    row = {"messages": [message | {"train": i in trained} for i, message in enumerate(CONVERSATION)]}
    for template, expected in ((CHATML, apart), (MERGING, merged)):
        tokenizer.chat_template = template
        assert trained_text(sample(row, ChatTokenizer(tokenizer)), tokenizer) == expected


def test_single_messages_can_be_left_out_or_taken_in(chat: ChatTokenizer, tokenizer: Any) -> None:
    for flag, off, on in (("train", False, True), ("loss", False, True), ("weight", 0, 1.0)):
        messages = [dict(m) for m in CONVERSATION]
        messages[2][flag], messages[1][flag] = off, on
        one = sample({"messages": messages}, chat)
        assert trained_text(one, tokenizer) == ["what is the name<|im_end|>", "add\nmultiply<|im_end|>"]
    messages[2]["weight"] = 0.5
    assert "message 3: `weight` is 0.5" in refusal({"messages": messages}, chat)
    one = sample({"messages": CONVERSATION}, chat, loss_turns="last")
    assert trained_text(one, tokenizer) == ["add\nmultiply<|im_end|>"]


def test_only_the_completion_is_trained(chat: ChatTokenizer, tokenizer: Any) -> None:
    row: Any = {"prompt": CONVERSATION[:4], "completion": CONVERSATION[4:]}
    assert trained_text(sample(row, chat), tokenizer) == ["add\nmultiply<|im_end|>"]
    row = {"prompt": "my number", "completion": "higher"}
    one = sample(row, chat)
    assert trained_text(one, tokenizer) == ["higher<|im_end|>"]
    assert tokenizer.decode(one.token_ids).startswith("<|im_start|>user\nmy number<|im_end|>")
    row = {"question": "my number", "answer": "higher"}
    same = sample(row, chat, columns={"prompt": "question", "completion": "answer"})
    assert same.token_ids.tolist() == one.token_ids.tolist()


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_completion_gets_no_space_of_the_tokenizers_own(scheme: str) -> None:
    """SentencePiece's put one before whatever text they encode: "2+2=" was completed with " 4"."""
    words = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    stages = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words.decoder = decoders.Sequence(stages)
    special = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    words.train_from_iterator(["2+2=4 or 3+1= 4"] * 9, trainer)
    spaced = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="<unk>")
    chat = ChatTokenizer(spaced, chat_template="none")
    for prompt, completion in (("2+2=", "4"), ("2+2=", " 4"), ("2+2= ", "4"), ("2+2=", "\U0001f40d 4")):
        one = sample({"prompt": prompt, "completion": completion}, chat)
        assert spaced.decode(one.token_ids) == f"{prompt}{completion}</s>"
    whole = sample({"text": "2+2=4"}, chat)
    assert whole.token_ids.tolist() == [*spaced("2+2=4")["input_ids"], spaced.eos_token_id]


def test_plain_text(tokenizer: Any, chat: ChatTokenizer) -> None:
    row = {"prompt": "my ", "completion": "number"}
    plain = ChatTokenizer(tokenizer, chat_template="none")
    assert trained_text(sample(row, plain), tokenizer) == ["number<|im_end|>"]
    assert tokenizer.decode(sample(row, plain).token_ids) == "my number<|im_end|>"
    assert "needs a chat template" in refusal({"messages": CONVERSATION}, plain)
    tokenizer.chat_template = None
    assert not ChatTokenizer(tokenizer).has_template


@pytest.mark.parametrize("in_template", [True, False])
def test_a_text_begins_with_one_token_of_beginning(tmp_path: Path, in_template: bool) -> None:
    """The tokenizer puts one before every text; so may the template, which then is what the engines are given."""
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", bos)]
    )
    assert tokenizer("add")["input_ids"][0] == bos
    tokenizer.chat_template = ("{{- bos_token -}}" if in_template else "") + CHATML
    talk = sample({"messages": CONVERSATION}, ChatTokenizer(tokenizer)).token_ids.tolist()
    assert talk == tokenizer.apply_chat_template(CONVERSATION, tokenize=True, return_dict=False)
    assert [i for i, token in enumerate(talk) if token == bos] == ([0] if in_template else [])
    for prompt in ("my ", "<|begin|>my "):
        plain = sample({"prompt": prompt, "completion": "number"}, ChatTokenizer(tokenizer, chat_template="none"))
        assert [i for i, token in enumerate(plain.token_ids.tolist()) if token == bos] == [0]
        assert not plain.loss_mask[0]


def test_rows_of_text_are_trained_whole(tokenizer: Any, chat: ChatTokenizer) -> None:
    made = sample({"text": "add the name", "id": 7}, chat)  # also where there is a template
    assert made.token_ids.tolist() == [*chat.encode("add the name"), tokenizer.eos_token_id] and made.loss_mask.all()
    row = {"text": "name " * 30}
    assert result(row, chat, seq_len=16).counts.overlong == 1
    pieces = result(row, chat, seq_len=16, overlong="split").samples
    whole = sample(row, chat)
    assert [int(t) for n, p in enumerate(pieces) for t in p.token_ids[n > 0 :]] == whole.token_ids.tolist()
    assert {len(p.token_ids) for p in pieces[:-1]} == {16} and len(pieces) > 1
    talk = {"prompt": "a" * 90, "completion": "b"}
    assert "only what is trained whole is split" in (result(talk, chat, seq_len=16, overlong="split").error or "")
    for other in ({"prompt": "a"}, {"question": "a", "answer": "b"}, {"instruction": "a", "output": "b"}):
        assert "columns are" in refusal({"text": "rendered by somebody"} | other, chat)
    both = {"text": "rendered", "prompt": "add", "completion": "name"}
    assert trained_text(sample(both, chat), tokenizer) == ["name<|im_end|>"]
    mapped = sample({"body": "add", "answer": "b"}, chat, columns={"text": "body"})
    assert mapped.token_ids.tolist() == [*chat.encode("add"), tokenizer.eos_token_id]
    assert "expected `text` as a string" in refusal({"text": 3}, chat)


def test_a_message_that_lies_in_the_content_of_another_is_refused(chat: ChatTokenizer) -> None:
    inner = {"role": "assistant", "content": "number"}
    for part in (inner, {"type": "text", "content": "number"}):
        talk = [{"role": "user", "content": "add"}, {"role": "assistant", "content": [part]}]
        assert "a content part has no `text`" in refusal({"messages": talk}, chat)
    for part in ({"type": "text", "text": "number"}, {"text": "number"}):
        result({"messages": [{"role": "user", "content": [part]}, inner]}, chat)
    empty = {"type": "text", "text": None}
    assert not result({"messages": [{"role": "user", "content": [empty]}, inner]}, chat).error


def test_half_a_character_in_plain_text_is_refused(tokenizer: Any) -> None:
    chat = ChatTokenizer(tokenizer, chat_template="none")
    assert "half a character" in refusal({"prompt": "my \udc00", "completion": "number"}, chat)


def test_template_of_ones_own(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}")
    chat = ChatTokenizer(tokenizer, chat_template=str(file))
    row = {"messages": [{"role": "user", "content": "add"}, {"role": "assistant", "content": "name"}]}
    assert str(file) in chat.name
    assert "prefix property" not in (result(row, chat).error or "")
    with pytest.raises(SFTDataError, match=r"sft\.data\.chat_template = .*none\.jinja"):
        ChatTokenizer(tokenizer, chat_template=str(tmp_path / "none.jinja"))


def test_forms_that_data_sets_have(tokenizer: Any) -> None:
    tokenizer.chat_template = QWEN3
    chat = ChatTokenizer(tokenizer, enable_thinking=True)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
    calls: list[dict[str, Any]] = [
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3", "reasoning_content": "so"},
    ]
    plain = sample({"messages": calls, "tools": [{"type": "function"}]}, chat)
    assert trained_text(plain, tokenizer) == [
        "<think>\nhm\n</think>\n\n\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call><|im_end|>',
        "<think>\nso\n</think>\n\n3<|im_end|>",
    ]
    in_text = {"type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":[2]}'}}
    other: list[Any] = [dict(m) for m in calls]
    other[0]["content"] = [{"type": "text", "text": "a"}, {"type": "text", "text": "dd"}]
    other[1] |= {"content": None, "tool_calls": [in_text], "name": None}
    same = [sample({"messages": m}, chat) for m in (other, json.dumps(other))]
    assert all(s.token_ids.tolist() == plain.token_ids.tolist() for s in same)
    sharegpt = [{"from": "human", "value": "add"}, {"from": "gpt", "value": "name"}]
    one = sample({"conversations": sharegpt}, chat, columns={"messages": "conversations"})
    assert trained_text(one, tokenizer) == ["<think>\n\n</think>\n\nname<|im_end|>"]
    alpaca = {"instruction": "add", "input": "the name", "output": "name"}
    mapped = {"columns": {"prompt": "instruction", "completion": "output"}}
    asked = sample({"prompt": "add\n\nthe name", "completion": "name"}, chat)
    assert sample(alpaca, chat, **mapped).token_ids.tolist() == asked.token_ids.tolist()
    assert sample(alpaca | {"input": " "}, chat, **mapped).token_ids.tolist() != asked.token_ids.tolist()
    assert "what `input` holds is put after" in refusal(alpaca, chat)
    before = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "one"}]
    led = sample({"prompt": [*before, {"role": "user", "content": "add\n\nthe name"}], "completion": "name"}, chat)
    told = sample(alpaca | {"history": [["add", "one"]]}, chat, **mapped)
    assert (told.token_ids.tolist(), told.loss_mask.tolist()) == (led.token_ids.tolist(), led.loss_mask.tolist())
    for nothing in ([], ["add"], "add"):  # of Alpaca's form alone
        alone = sample(alpaca | {"history": nothing}, chat, **mapped)
        assert alone.token_ids.tolist() == asked.token_ids.tolist()
    begun = [{"role": "system", "content": "be brief"}, *({"role": "user", "content": "add"}, THINKING[1])]
    led = sample({"messages": begun}, chat)
    rows: list[dict[str, Any]] = [{"messages": begun[1:]}, {"prompt": "add", "completion": begun[2]["content"]}]
    for row in (*rows, {"messages": begun}):
        whole = sample(row | {"system": "be brief"}, chat)
        assert (whole.token_ids.tolist(), whole.loss_mask.tolist()) == (led.token_ids.tolist(), led.loss_mask.tolist())
    other_name = sample(rows[0] | {"system_prompt": "be brief"}, chat, columns={"system": "system_prompt"})
    assert other_name.token_ids.tolist() == led.token_ids.tolist()
    renamed = [{("reasoning" if k == "reasoning_content" else k): v for k, v in m.items()} for m in calls]
    same = [sample({"messages": renamed, "tools": [{"type": "function"}]}, chat)]
    assert same[0].token_ids.tolist() == plain.token_ids.tolist()
    for own in ("model", "Assistant"):  # of a template that knows it so, or prints any
        named = [{**m, "role": own if m["role"] == "assistant" else m["role"]} for m in THINKING]
        shown = sample({"messages": named}, chat, loss_roles=[own])
        assert trained_text(shown, tokenizer) == ["name<|im_end|>"]
        assert f"<|im_start|>{own}" in tokenizer.decode(shown.token_ids)
    capitals = [{**m, "role": m["role"].title()} for m in THINKING]
    assert trained_text(sample({"messages": capitals}, chat), tokenizer) == [THINKING[1]["content"] + "<|im_end|>"]


def test_template_that_rewrites_the_past_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = STRIPPING
    chat = ChatTokenizer(tokenizer)
    assert trained_text(sample({"messages": THINKING}, chat), tokenizer) == ["<think>\nhm\n</think>\n\nname<|im_end|>"]
    message = refusal({"messages": THINKING * 2}, chat)
    assert message.startswith("the chat template of")
    assert "prefix property at message 3" in message and "<think>" in message and "name<|im_end|>" in message
    assert "sft.data.split_turns" in message


@pytest.mark.parametrize("template", [STRIPPING, QWEN3])
def test_split_turns_are_what_the_template_shows_at_each_turn(tokenizer: Any, template: str) -> None:
    tokenizer.chat_template = template
    chat = ChatTokenizer(tokenizer, enable_thinking=True)
    talk = [
        *THINKING,
        {"role": "user", "content": "lower"},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nmy"},
    ]
    assert "prefix property" in refusal({"messages": talk}, chat)
    first, second = samples({"messages": talk}, chat, split_turns=True)
    assert trained_text(first, tokenizer) == ["<think>\nhm\n</think>\n\nname<|im_end|>"]
    assert trained_text(second, tokenizer) == ["<think>\nso\n</think>\n\nmy<|im_end|>"]
    history = tokenizer.apply_chat_template(talk[:3], tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert tokenizer.decode(second.token_ids).startswith(history) and "hm" not in history
    only_last = sample({"messages": talk}, chat, loss_turns="last")
    assert only_last.token_ids.tolist() == second.token_ids.tolist()


def test_qwen3s_own_template_breaks_and_is_helped(tokenizer: Any) -> None:
    trl = pytest.importorskip("trl", reason="brings Qwen3's chat template")
    own = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    chat = ChatTokenizer(tokenizer, enable_thinking=True, chat_template=str(own))
    message = refusal({"messages": THINKING * 2}, chat)
    assert "qwen3.jinja" in message and "message 3" in message and "hm" in message
    assert [trained_text(s, tokenizer) for s in samples({"messages": THINKING * 2}, chat, split_turns=True)] == [
        ["<think>\nhm\n</think>\n\nname<|im_end|>"]
    ] * 2


def test_header_that_is_not_in_the_conversation_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML.replace("assistant\\n' -}}{%- endif", "assistant\\n<think>' -}}{%- endif")
    message = refusal({"prompt": "my", "completion": "number"}, ChatTokenizer(tokenizer))
    assert "prefix property at message 2" in message and "before: '<think>'" in message


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "a", "answer": "b"}, ["`messages`", "answer, question", "sft.data.columns"]),
        ({"messages": ["add"]}, ["list of messages"]),
        ({"messages": [{"content": "add"}]}, ["`role` and `content`"]),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, ["image", "only text"]),
        ({"messages": [{"role": "user", "content": 3}]}, ["content as text"]),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": ["x"]}]}, ["tool call with a name"]),
        ({"messages": [{"role": "assistant", "content": "a", "tool_calls": 3}]}, ["`tool_calls` as a list, got 3"]),
        ({"messages": [{"role": "user", "content": [{"text": ["a"]}]}]}, ["`text` of a content part as a string"]),
        ({"messages": CONVERSATION, "tools": "[{"}, ["`tools`", "JSON"]),
        ({"messages": CONVERSATION, "tools": DIGITS}, ["`tools`", "JSON", "4300 digits"]),
        ({"messages": CONVERSATION, "tools": DEEP}, ["`tools`", "JSON", "recursion"]),
        ({"messages": [{"role": "assistant", "function_call": DEEP}]}, ["`function_call`", "JSON", "recursion"]),
        ([1], ["JSON object"]),
        ({"prompt": 3, "completion": "x"}, ["string or a list of messages"]),
        ({"messages": []}, ["list of messages is empty"]),
        ({"messages": ""}, ["string or a list of messages"]),
        ({"prompt": "a", "completion": "my number \ud83d"}, [r"half a character (\ud83d)", "number"]),
    ],
)
def test_bad_rows_are_named(chat: ChatTokenizer, row: Any, words: list[str]) -> None:
    message = refusal(row, chat)
    assert all(word in message for word in words)
    skipped = result(row, chat, bad_rows="skip")
    assert (skipped.error, skipped.samples, skipped.counts.bad) == (None, [], 1)


@pytest.mark.parametrize("text", [DIGITS, DEEP], ids=["digits", "deep"])
def test_json_that_python_cannot_hold_is_text(text: str) -> None:
    """In a call of a model, which may be malformed in any way, as in a prompt that may be a list of messages."""
    data = SFTDataConfig(path="rows.jsonl")
    function = {"name": "f", "arguments": text}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    talk = parse_row({"messages": [call]}, data, data, True)
    assert isinstance(talk, Conversation) and talk.messages[0]["tool_calls"][0]["function"] == function
    asked = text.replace("[", "[{", 1)
    talk = parse_row({"prompt": asked, "completion": "number"}, data, data, True)
    assert isinstance(talk, Conversation) and talk.messages[0]["content"] == asked
    with pytest.raises(SFTDataError, match="not JSON"):
        parse_line(text.encode(), Path("rows.jsonl"))


def test_rows_without_anything_to_train_are_left_out_and_counted(chat: ChatTokenizer) -> None:
    made = result({"messages": [{"role": "user", "content": "add"}]}, chat)
    assert made.samples == [] and made.error is None and made.counts.untrained == 1


def test_overlong_rows(chat: ChatTokenizer) -> None:
    row = {"prompt": "a", "completion": "b" * 100}
    assert result(row, chat, 60, overlong="drop").counts.overlong == 1
    cut = result(row, chat, 60, overlong="truncate")
    assert len(cut.samples[0].token_ids) == 60 and cut.counts.truncated == 1
    assert "more than seq_len = 60" in (result(row, chat, 60, overlong="error").error or "")
    nothing_left = result({"prompt": "b" * 100, "completion": "a"}, chat, 60, overlong="truncate").counts
    assert (nothing_left.truncated, nothing_left.untrained) == (1, 1)


texts = st.text(alphabet="ab \n<>|é\u3000", max_size=8)
roles = st.sampled_from(["user", "assistant", "tool", "assistant"])
talks = st.lists(st.tuples(roles, texts), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(talk=talks, newline=st.sampled_from(["\\n", "", " "]))
def test_masks_are_those_of_tokenising_every_prefix_by_itself(tokenizer: Any, talk: Any, newline: str) -> None:
    """The definition, at the cost of a tokenisation a message: tokens of the header and of the closed turn."""
    tokenizer.chat_template = CHATML.replace("<|im_end|>\\n", "<|im_end|>" + newline).replace(
        "\\n' + (m", newline + "' + (m"
    )
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n", "assistant" + newline)
    chat = ChatTokenizer(tokenizer)
    messages = [{"role": role, "content": text} for role, text in [("user", "add"), *talk]]
    trained = tuple(m["role"] == "assistant" for m in messages)
    whole = chat.encode(chat.render(messages, None))
    mask, broken = np.zeros(len(whole), bool), False
    for i in np.flatnonzero(trained):
        opened = chat.encode(chat.render(messages[:i], None, header=True))
        closed = chat.encode(chat.render(messages[: i + 1], None))
        broken |= whole[: len(opened)] != opened or whole[: len(closed)] != closed
        ends = [j for j in range(len(opened), len(closed)) if closed[j] == tokenizer.eos_token_id]
        mask[len(opened) : ends[-1] + 1 if ends else len(closed)] = True
    try:
        ids, found, _ = chat.conversation(Conversation(messages, None, trained))
    except SFTDataError as error:
        assert broken and "prefix property" in str(error)
        return
    assert not broken and ids.tolist() == whole and np.array_equal(found, mask)


def test_tokens_that_the_model_has_no_embedding_of_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    """Tokens were added and the model's embeddings not resized: what is split over ranks would take them for zeros."""
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    grown = AutoTokenizer.from_pretrained(tmp_path)
    vocab_size = len(grown)
    grown.add_tokens(["<new>"])
    grown.add_special_tokens({"pad_token": "<filling>"})
    chat = ChatTokenizer(grown, chat_template="none")
    row = {"prompt": "a <new>", "completion": "b"}
    assert result(row, chat, vocab_size=vocab_size + 1).error is None
    said = result(row, chat, vocab_size=vocab_size)
    assert said.error is not None and f"token {vocab_size} ('<new>')" in said.error and "Resize" in said.error
    assert result(row, chat, vocab_size=vocab_size, bad_rows="skip").counts.bad == 1
    assert result({"prompt": "a", "completion": "b"}, chat, vocab_size=vocab_size).error is None
    assert chat.pad_id(vocab_size + 2) == vocab_size + 1
    assert chat.pad_id(vocab_size) == grown.eos_token_id  # no row can be filled with what the model has not


def test_of_several_chat_templates_one_is_the_default_or_stated(tokenizer: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(CHATML)
    tokenizer.chat_template = {"rag": CHATML, "tool_use": CHATML}
    with pytest.raises(SFTDataError, match=r"chat templates \(rag, tool_use\), and none .*sft.data.chat_template"):
        ChatTokenizer(tokenizer)
    stated = ChatTokenizer(tokenizer, chat_template=str(own))
    tokenizer.chat_template = {"default": CHATML, "rag": "{{ raise_exception('another') }}"}
    ones = [sample({"messages": CONVERSATION}, one) for one in (stated, ChatTokenizer(tokenizer))]
    assert ones[0].token_ids.tolist() == ones[1].token_ids.tolist()


def test_a_reply_of_nothing_is_no_empty_reply(chat: ChatTokenizer, tokenizer: Any) -> None:
    asked = {"role": "user", "content": "add"}
    empty: list[dict[str, Any]] = [{"content": None}, {}, {"content": None, "tool_calls": [], "reasoning": None}]
    for nothing in empty:
        assert "no content (null)" in refusal({"messages": [asked, {"role": "assistant", **nothing}]}, chat)
    talk = [{"from": "human", "value": "add"}, {"from": "gpt", "value": None}]
    assert "no content (null)" in refusal({"messages": talk}, chat)
    said = sample({"messages": [asked, {"role": "assistant", "content": ""}]}, chat)
    assert trained_text(said, tokenizer) == ["<|im_end|>"]
    history = [asked, {"role": "assistant", "content": None, "train": False}, asked, CONVERSATION[-1]]
    assert trained_text(sample({"messages": history}, chat), tokenizer) == trained_text(
        sample({"messages": [asked, CONVERSATION[-1]]}, chat), tokenizer
    )
