"""Parts of a conversation that a chat template leaves out: refused, or counted."""

import copy
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from prime_hpc.observe.report import left_out
from prime_hpc.trainer.data.template import ChatTokenizer
from tests.support.sft_samples import refusal, result, sample, trained_text
from tests.support.tiny_model import QWEN3


def test_a_trained_message_that_the_template_leaves_out_is_refused(tokenizer: Any) -> None:
    shown = "{{- m.role + '\\n' + m.content + '<|im_end|>\\n' -}}"
    tokenizer.chat_template = f"{{%- for m in messages if m.role != 'system' -%}}{shown}{{%- endfor -%}}"
    row = {"messages": [{"role": "system", "content": "be brief", "train": True}, {"role": "user", "content": "add"}]}
    assert "message 1 (system)" in refusal(row, ChatTokenizer(tokenizer))


def test_templates_that_take_the_arguments_of_calls_as_text_get_them(tokenizer: Any) -> None:
    """DeepSeek's, which puts them together with other text."""
    calls = "{%- for call in m.tool_calls -%}{{ 'call ' + call.function.arguments }}{%- endfor -%}"
    head, end = "{{- '<|im_start|>' + m.role + '\\n' -}}", "{{- m.content + '<|im_end|>\\n' -}}"
    names = "{%- for call in m.tool_calls -%}{{ call.function.name }}{%- endfor -%}"
    opening = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    tokenizer.chat_template = f"{{%- for m in messages -%}}{head}{names}{calls}{end}{{%- endfor -%}}{opening}"
    call = {"name": "add", "arguments": {"a": "\u00e9"}}
    row = {"messages": [{"role": "user", "content": "add"}, {"role": "assistant", "tool_calls": [call]}]}
    assert trained_text(sample(row, ChatTokenizer(tokenizer)), tokenizer) == ['addcall {"a": "\u00e9"}<|im_end|>']
    mapped = "{%- for call in m.tool_calls -%}{%- for k, v in call.function.arguments|items -%}{{ k }}{%- endfor -%}"
    rule = "{%- if m.role == 'system' -%}{{ raise_exception('no system message here') }}{%- endif -%}"
    tokenizer.chat_template = f"{{%- for m in messages -%}}{mapped}{{%- endfor -%}}{rule}{end}{{%- endfor -%}}"
    row["messages"].append({"role": "system", "content": "be brief"})
    assert "no system message here" in refusal(row, ChatTokenizer(tokenizer))  # of the first way, not of the second


def test_a_reply_without_its_text_is_refused_and_beside_calls_counted(tokenizer: Any) -> None:
    """Templates of models that see images may know text in parts alone; Llama's show calls or text."""
    head, end = "{{- '<|im_start|>' + m.role + '\\n' -}}", "{{- '<|im_end|>\\n' -}}"
    parts = "{%- for part in m.content if part.type == 'text' -%}{{ part.text }}{%- endfor -%}"
    shown = "{{ m.content | replace('numb', 'Numb') }}"
    either = f"{{%- if m.tool_calls -%}}{{{{ m.tool_calls | tojson }}}}{{%- else -%}}{shown}{{%- endif -%}}"
    opening = "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    asked, call = {"role": "user", "content": "add"}, {"name": "add", "arguments": {}}
    reply = {"messages": [asked, {"role": "assistant", "content": "number"}]}
    called = {"messages": [asked, {"role": "assistant", "content": "a moment", "tool_calls": [call]}]}
    tokenizer.chat_template = f"{{%- for m in messages -%}}{head}{parts}{end}{{%- endfor -%}}{opening}"
    said = refusal(reply, ChatTokenizer(tokenizer))
    assert "message 2 (assistant)" in said and "leaves out its text" in said
    tokenizer.chat_template = f"{{%- for m in messages -%}}{head}{either}{end}{{%- endfor -%}}{opening}"
    shows = ChatTokenizer(tokenizer)
    assert trained_text(sample(reply, shows), tokenizer) == ["Number<|im_end|>"]
    assert [result(row, shows).counts.unshown for row in (reply, called)] == [0, 1]


def test_a_template_that_never_ends_a_turn_is_counted(chat: ChatTokenizer, tokenizer: Any, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "add"}, {"role": "assistant", "content": "name"}]}
    assert result(row, chat).counts.unended == 0
    file = tmp_path / "mine.jinja"
    text = "{% for m in messages %}[{{ m.role }}]<think>{{ m.content }}END\n{% endfor %}"
    text += "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
    file.write_text(text)
    own = ChatTokenizer(tokenizer, chat_template=str(file))
    assert result(row, own).counts.unended == 1 and result(row, own, split_turns=True).counts.unended == 1
    only_user = result(row, own, loss_roles=("user",))
    assert only_user.samples and only_user.counts.unended == 0
    file.write_text(text.replace("END", "{% if loop.last %}{{ eos_token }}{% endif %}"))
    assert result(row, ChatTokenizer(tokenizer, chat_template=str(file))).counts.unended == 0
    plain = result({"prompt": "a", "completion": "b"}, ChatTokenizer(tokenizer, chat_template="none"))
    assert plain.samples and plain.counts.unended == 0
    assert "nothing teaches the model to stop" in left_out({"data/rows": 1.0, "data/unended": 1.0})


def test_a_turn_ends_with_its_last_special_token_wherever_others_are(tokenizer: Any) -> None:
    """Gemma's end of turn has no name (`eos_token` is another); GLM's turns have none, but special tokens within."""
    tokenizer = copy.deepcopy(tokenizer)
    ends = [AddedToken("<end_of_turn>", special=True), AddedToken("<box>", special=True)]
    tokenizer.add_special_tokens({"extra_special_tokens": ["<box>"]})
    tokenizer.add_tokens(ends)
    assert "<end_of_turn>" not in tokenizer.all_special_tokens
    said = "add <box> number <box> is the name"
    row = {"messages": [{"role": "user", "content": "add"}, {"role": "assistant", "content": said}]}
    for end, trained in (("<end_of_turn>\n", "<end_of_turn>"), ("<|im_end|>\n \n", "<|im_end|>"), ("\n\n", "\n\n")):
        header = "{% if add_generation_prompt %}assistant:{% endif %}"
        turn = "{{ m.role + ':' + m.content + " + repr(end) + " }}"
        tokenizer.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}{header}"
        chat = ChatTokenizer(tokenizer)
        assert trained_text(sample(row, chat), tokenizer) == [said + trained]
        assert result(row, chat).counts.unended == (end == "\n\n")


def test_reasoning_and_tools_that_a_template_leaves_out_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}}
    asked, reply = {"role": "user", "content": "add"}, {"role": "assistant", "content": "3"}
    thought = {"messages": [asked, {**reply, "reasoning_content": " one and two\n"}]}
    offered = {"messages": [asked, reply], "tools": [tool]}
    file = tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}")
    plain = ChatTokenizer(tokenizer, chat_template=str(file))
    tokenizer.chat_template = "{%- if tools -%}{{ tools | tojson }}{%- endif -%}" + QWEN3
    shows = ChatTokenizer(tokenizer, enable_thinking=True)
    assert [result(row, plain).counts.unshown for row in (thought, offered, {"messages": [asked, reply]})] == [1, 1, 0]
    assert [result(row, shows).counts.unshown for row in (thought, offered)] == [0, 0]
    assert result(thought, plain, loss_roles=("user",)).counts.unshown == 0, "it is not trained"
    inline = {"messages": [asked, {**reply, "content": "<think>one and two</think>3"}]}
    file.write_text(file.read_text().replace("m.content", "m.content.split('</think>')[-1]"))
    stripped = ChatTokenizer(tokenizer, chat_template=str(file))
    assert [result(inline, one).counts.unshown for one in (plain, stripped)] == [0, 1]
    tokenizer.chat_template = {"default": QWEN3, "tool_use": tokenizer.chat_template}
    several = ChatTokenizer(tokenizer, enable_thinking=True)
    made = [tokenizer.decode(sample(row, several).token_ids) for row in (offered, thought)]
    assert ["weather" in text for text in made] == [True, False], "as engines take them"
    assert "without their reasoning" in left_out({"data/rows": 2.0, "data/unshown": 1.0})


def test_a_message_that_the_template_leaves_out_for_its_role_is_refused(tokenizer: Any) -> None:
    shown = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}"
    known = "{%- if m.role in ('user', 'assistant', 'critic') -%}" + shown + "{%- endif -%}"
    tokenizer.chat_template = f"{{%- for m in messages -%}}{known}{{%- endfor -%}}"
    chat = ChatTokenizer(tokenizer)
    talk = [{"role": "user", "content": "add"}, {"role": "critic", "content": "name"}]
    answer = {"role": "assistant", "content": "number"}
    assert "name" in tokenizer.decode(sample({"messages": [*talk, answer]}, chat).token_ids)
    said = refusal({"messages": [*talk, {"role": "asistant", "content": "number"}, answer]}, chat)
    assert said.startswith("message 3: ") and "leaves out messages of the role 'asistant'" in said


def test_older_forms_of_calls_are_calls_and_a_template_without_them_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = QWEN3
    chat = ChatTokenizer(tokenizer, enable_thinking=True)
    call = {"name": "add", "arguments": {"a": 1}}
    asked, told, said = (
        {"role": "user", "content": "add"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nname"},
    )

    def row(made: dict[str, Any]) -> dict[str, Any]:
        return {"messages": [asked, {"role": "assistant", "reasoning_content": "hm"} | made, told, said]}

    plain = sample(row({"tool_calls": [call]}), chat)
    older = row({"function_call": call}), row({"role": "function_call", "content": json.dumps(call)})
    llama = row({"content": None, "tool_calls": [{"name": "add", "parameters": {"a": 1}}]})
    for other in (*older, llama):
        same = sample(other, chat)
        assert (same.token_ids.tolist(), same.loss_mask.tolist()) == (
            plain.token_ids.tolist(),
            plain.loss_mask.tolist(),
        )
    several = sample(row({"role": "function_call", "content": json.dumps([call, call])}), chat)
    assert several.token_ids.tolist() == sample(row({"tool_calls": [call, call]}), chat).token_ids.tolist()
    assert "`function_call` as a call or as JSON" in refusal(row({"role": "function_call", "content": "add(1)"}), chat)
    file = tmp_path / "chatml.jinja"
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    file.write_text(text + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    chatml = ChatTokenizer(tokenizer, chat_template=str(file))
    assert "message 2" in (error := refusal(older[0], chatml)) and "shows 0 of its 1 tool calls" in error
    first = "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}"
    (tmp_path / "first.jinja").write_text(file.read_text().replace("{{ m.content }}", first + "{{ m.content }}"))
    of_one = ChatTokenizer(tokenizer, chat_template=str(tmp_path / "first.jinja"))
    assert "shows 1 of its 2 tool calls" in refusal(row({"tool_calls": [call, call]}), of_one)
    assert sample(row({"tool_calls": [call]}), of_one)
    context = sample(row({"train": False, "tool_calls": [call]}), chatml)
    assert trained_text(context, tokenizer) == [f"{said['content']}<|im_end|>"]
