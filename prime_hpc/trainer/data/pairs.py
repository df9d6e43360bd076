"""A row of preferences as its two conversations, which begin with the same prompt.

`chosen` and `rejected` are replies to `prompt`: texts, messages, or one message; or they are whole conversations, whose
common beginning is the prompt (what `prompt` says beside them is not read). Two texts without a `prompt` are plain
text, cut at the last blank before they differ; beside a column that may be the prompt by another name they are refused.
All else is as in rows of `prompt` and `completion` (`messages.py`).
"""

import json
import math
from typing import Any

from prime_hpc.config.sections.sft import MARGIN, SIDES, SFTDataConfig, SFTSourceConfig
from prime_hpc.store.dataset.files import ASKED, has_columns, missing_columns
from prime_hpc.trainer.data.messages import Conversation, PlainText, SFTDataError, conversation_of

Pair = tuple[Conversation | PlainText, Conversation | PlainText]


def parse_pair(
    row: Any, source: SFTSourceConfig, config: SFTDataConfig, has_template: bool, *, sees_images: bool = False
) -> Pair:
    """Return what is tokenised of the preferred reply and of the other one. Arguments as of `messages.parse_row`.

    Raises:
        SFTDataError: columns are missing (names those it has), a side is empty, both are the same, they have no prompt
            in common, or a value is not what its column holds.
    """
    if not isinstance(row, dict):
        raise SFTDataError(f"expected a JSON object, got {type(row).__name__}")
    if not has_columns(list(row), source):
        raise SFTDataError(missing_columns(list(row), source))
    names = [source.columns.get(side, side) for side in SIDES]
    sides = [_value(row[name], name) for name in names]
    if sides[0] == sides[1]:
        raise SFTDataError(f"`{names[0]}` and `{names[1]}` are equal: such a pair teaches nothing")
    prompt_name = source.columns.get("prompt", "prompt")
    prompt = row.get(prompt_name)
    begins = [isinstance(side, list) and _begins_with_prompt(side) for side in sides]
    if all(begins):
        cut = next((i for i, (a, b) in enumerate(zip(*sides, strict=False)) if a != b), min(map(len, sides)))
        if not cut:
            raise SFTDataError(f"`{names[0]}` and `{names[1]}` do not begin with the same message: what is the prompt?")
        prompt, sides = sides[0][:cut], [side[cut:] for side in sides]
    elif any(begins):
        whole, reply = names if begins[0] else names[::-1]
        raise SFTDataError(f"`{whole}` begins with the prompt and `{reply}` does not: state both alike")
    elif prompt is None and all(isinstance(side, str) for side in sides):
        beside = [name for name in (*ASKED, source.columns.get("system", "system")) if row.get(name)]
        if beside and "prompt" not in source.columns:
            raise SFTDataError(
                f"`{beside[0]}` stands beside two texts without a `prompt`: map what is asked, such as "
                f'{source.key}.columns = {{"prompt": "question"}}; of plain text {{"prompt": "none"}}'
            )
        return _plain(sides, names)
    elif prompt in (None, "", []):
        raise SFTDataError(f"`{names[0]}` and `{names[1]}` are replies, and there is no `{prompt_name}` to them")
    replaced = {source.columns.get("messages", "messages"): None, prompt_name: prompt}
    parsed = []
    for name, side in zip(names, sides, strict=True):
        if _is_empty(side):
            raise SFTDataError(f"`{name}` is empty: there is no reply to learn from")
        own = {**row, **replaced, source.columns.get("completion", "completion"): side}
        try:
            parsed.append(conversation_of(own, source, config, has_template, sees_images=sees_images))
        except SFTDataError as error:
            raise SFTDataError(f"`{name}`: {error}") from error
    return parsed[0], parsed[1]


def margin_of(row: dict[str, Any], source: SFTSourceConfig) -> float:
    """Return by how much a row's chosen side should score higher; 0: it does not say.
    Raises SFTDataError: that is no number."""
    name = source.columns.get(MARGIN, MARGIN)
    value = row.get(name)
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise SFTDataError(f"expected `{name}` as a number, got {value!r:.120}")
    return float(value)


def _value(value: Any, name: str) -> Any:
    """Return a side as text or as a list of messages."""
    if isinstance(value, str) and value.startswith("[{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            pass  # text that happens to begin so
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, str | list):
        raise SFTDataError(f"expected `{name}` as a string or a list of messages, got {value!r:.120}")
    return value


def _begins_with_prompt(messages: list[Any]) -> bool:
    first = messages[0] if messages and isinstance(messages[0], dict) else {}
    return str(first.get("role") or first.get("from")).lower() in ("system", "user", "human")


def _is_empty(side: str | list[Any]) -> bool:
    """Return whether a reply says nothing: its last message has neither text nor calls."""
    if isinstance(side, str):
        return not side.strip()
    last = side[-1] if side and isinstance(side[-1], dict) else {}
    content = last.get("content") or last.get("value") or last.get("tool_calls") or last.get("function_call")
    if isinstance(content, list):
        content = [part for part in content if not isinstance(part, dict) or part.get("text", part)]
    return not (content.strip() if isinstance(content, str) else content)


def _plain(texts: list[Any], names: list[str]) -> Pair:
    """Return two texts that begin alike."""
    chosen, rejected = texts
    shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    shared = min(len(chosen), len(rejected)) if shared is None else shared
    cut = max((i for i in range(shared) if chosen[i].isspace()), default=0)
    if not chosen[:cut].strip():
        raise SFTDataError(f"`{names[0]}` and `{names[1]}` do not begin with the same words: state `prompt`")
    for name, text in zip(names, texts, strict=True):
        if not text[cut:].strip():
            raise SFTDataError(f"`{name}` has nothing after what both begin with: there is no reply to learn from")
    return PlainText(chosen[:cut], chosen[cut:]), PlainText(rejected[:cut], rejected[cut:])
