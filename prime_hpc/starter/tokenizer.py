"""The tiny starter's tokenizer: bytes, ChatML tokens and a chat template with the prefix property.

Tokens are single bytes (no merges: reversing a text is a task about characters) plus Qwen3's control tokens under
Qwen3's names, so that the `qwen3` renderer of the `renderers` package (which the environments use) and this template
(which supervised fine-tuning uses) give the same ids. Where declarations of tools come before every question, the
phrases that the demonstrations repeat are tokens too.
"""

import re
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"
CONTROL_TOKENS = (PAD_TOKEN, "<|im_start|>", EOS_TOKEN)
"""Special: left out when a reply is decoded."""
TEXT_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""One id each, but part of a reply's text, as in Qwen3."""

# A model that never thinks: every reply opens with an empty think section, in the generation prompt as in the history.
# Qwen3's own template takes it out of earlier turns, which breaks the prefix property (a conversation's tokens must
# begin with the tokens of its first part); the `qwen3` renderer with enable_thinking=False keeps it, and so does this.
CHAT_TEMPLATE = r"""
{%- set ns = namespace(system='') -%}
{%- if messages[0].role == 'system' -%}{%- set ns.system = messages[0].content -%}{%- endif -%}
{%- if tools -%}
{{- '<|im_start|>system\n' -}}
{%- if messages[0].role == 'system' -%}{{- ns.system + '\n\n' -}}{%- endif -%}
{{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' -}}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' -}}{{- tool | tojson -}}{%- endfor -%}
{{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' -}}
{{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' -}}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|im_start|>system\n' + ns.system + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\n<think>\n' -}}
{%- if message.reasoning_content -%}{{- message.reasoning_content.strip('\n') -}}{%- endif -%}
{%- set content = (message.content or '').lstrip('\n') -%}
{{- '\n</think>\n\n' + content -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{%- if message.content or not loop.first -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
{%- if function.arguments is string -%}{{- function.arguments -}}
{%- else -%}{{- function.arguments | tojson -}}
{%- endif -%}
{{- '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' -}}{%- endif -%}
""".strip()


_BETWEEN_PHRASES = re.compile("|".join([*map(re.escape, (*CONTROL_TOKENS, *TEXT_TOKENS)), r"\d|\n"]))
PHRASE_SHARE = 0.1
"""A phrase is a token when it is in this share of the conversations."""


def find_phrases(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Find what the conversations repeat within a line, between control tokens and digits; most frequent first.

    As tokens of their own they make short what says little (declarations of tools, the form of a call), while numbers
    stay digit by digit. Lines bound them because renderers encode a conversation in pieces that end with one.
    `rows`: conversations with `messages` and, where there are any, `tools`.
    """
    bare, count, num_rows = build_tokenizer(max_len=1), Counter[str](), 0
    for row in rows:
        text = bare.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        assert isinstance(text, str)
        count.update(set(_BETWEEN_PHRASES.split(text)))
        num_rows += 1
    # a single character is a token anyway; the decoder takes other alphabets' characters for bytes
    frequent = [phrase for phrase, number in count.items() if number >= PHRASE_SHARE * num_rows]
    return sorted((p for p in frequent if len(p) > 1 and p.isascii()), key=lambda p: (-count[p], p))


def build_tokenizer(max_len: int, phrases: Iterable[str] = ()) -> "PreTrainedTokenizerFast":
    """Return the tokenizer: 256 bytes and 9 control tokens, ids 0..264, then the phrases.
    `phrases`: texts that become one token each wherever they stand."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in (*TEXT_TOKENS, *phrases)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
