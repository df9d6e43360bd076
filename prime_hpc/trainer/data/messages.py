"""A data set's row as a conversation: columns, roles, content parts, tool calls, and which messages are trained.

A row holds `messages` (and optionally `tools`), or `prompt` and `completion`: two lists of messages, of which only the
completion is trained, or two strings, which become a user and an assistant message (plain text where there is no chat
template), or `text` alone, all of which is trained, whatever the template, or tokens (`store/dataset/token_rows.py`).
Beside a conversation, `system` begins it.
Accepted besides the plain form, because data sets are written so:

- Alpaca's `input` and `history` beside a prompt in `instruction`;
- content as a list of text parts; `messages`, `tools` or a call's arguments as a JSON string; no content beside
  calls or reasoning;
- `from`/`value` messages with the roles human, gpt, model, function; roles with capitals;
- a call in `function_call` of a message (OpenAI's older form), or as a message of that role, with JSON as its content;
- a call's `parameters` in the place of `arguments` (Llama's name);
- `train: false`, `loss: false` or `weight: 0` on a message: context only (`true`/1: trained, whatever its role);
- `reasoning` (servers' newer name) in the place of `reasoning_content`;
- message keys that are null.

With `model.vision` content parts may be images: `{"type": "image_url", "image_url": {"url": ...}}`, or `{"type":
"image", "image": ...}`. A part without a source, or `<image>` in the text of a message, takes the next of the row's
column `images`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_hpc.config.sections.sft import IMAGE_PARTS, SFTDataConfig, SFTSourceConfig
from prime_hpc.store.dataset.files import has_columns, is_text, is_tokenised, missing_columns, prompt_of
from prime_hpc.store.dataset.row_images import as_sources, image_parts, other_media, place_images

if TYPE_CHECKING:
    from prime_hpc.store.dataset.token_rows import TokenRow

Message = dict[str, Any]
COMMON_ROLES = ("system", "user", "assistant", "tool")
_ROLES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}
_FLAGS = ("train", "loss", "weight")
_NOTHING = "\0nothing"
"""Key of a message that had no content (null), calls or reasoning, which is no harm where it does not train."""
_CALL = "function_call"
_NOT_READ = (ValueError, RecursionError)
"""Of text that is no JSON, or that Python cannot hold: a number of thousands of digits, brackets a thousand deep."""


class SFTDataError(ValueError):
    """Data that cannot be trained on; the message names file and line, what is wrong and what to do."""


class DataChangedError(SFTDataError):
    """Another file has the path of one that is trained on: no row of it can be told any more."""


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template."""

    messages: list[Message]
    tools: list[Any] | None
    trained: tuple[bool, ...]
    """Of each message."""
    images: tuple[Any, ...] = ()
    """Source of the image of each content part `{"type": "image"}`, in their order."""

    def up_to(self, stop: int, trained: tuple[bool, ...]) -> "Conversation":
        """Return its beginning of so many messages."""
        messages = self.messages[:stop]
        images = self.images[: len(list(image_parts(messages)))]
        return replace(self, messages=messages, trained=trained, images=images)


@dataclass(frozen=True)
class PlainText:
    """A prompt, and the completion that is trained, without a template."""

    prompt: str
    completion: str


def parse_line(line: bytes, path: Path) -> Any:
    """Return a line of JSON lines as Python; `path` is its file. Raises SFTDataError: it is no JSON, or no UTF-8."""
    try:
        return json.loads(line)
    except UnicodeDecodeError as error:
        raise SFTDataError(
            f"byte {error.object[error.start]:#04x} at {error.start} of the line is no UTF-8: if the "
            f"file is Latin-1, iconv -f ISO-8859-1 -t UTF-8 {path.name} > utf8.jsonl"
        ) from error
    except _NOT_READ as error:
        raise SFTDataError(f"not JSON ({error})") from error


def parse_row(
    row: Any, source: SFTSourceConfig, config: SFTDataConfig, has_template: bool, *, sees_images: bool = False
) -> "Conversation | PlainText | TokenRow":
    """Return a row as what is tokenised, or its tokens.

    Args:
        row: the parsed JSON or Arrow row.
        has_template: whether conversations can be rendered.
        sees_images: whether rows may hold images (`model.vision`).

    Raises:
        SFTDataError: columns are missing (names those it has), or a value is not what its column holds.
    """
    if not isinstance(row, dict):
        raise SFTDataError(f"expected a JSON object, got {type(row).__name__}")
    if not has_columns(list(row), source):
        raise SFTDataError(missing_columns(list(row), source))
    if is_tokenised(list(row), source):
        from prime_hpc.store.dataset.token_rows import token_row  # numpy: on a login node for such rows alone

        try:
            return token_row(row, source)
        except ValueError as error:
            raise SFTDataError(str(error)) from error
    if is_text(list(row), source):
        text = row[source.columns.get("text", "text")]
        if not isinstance(text, str):
            raise SFTDataError(f"expected `text` as a string, got {text!r:.120}")
        return PlainText("", text)
    return conversation_of(row, source, config, has_template, sees_images=sees_images)


def conversation_of(
    row: dict[str, Any], source: SFTSourceConfig, config: SFTDataConfig, has_template: bool, *, sees_images: bool
) -> Conversation | PlainText:
    """Return a row with `messages`, or `prompt` and `completion`. Arguments and errors as of `parse_row`."""
    value = {column: row.get(source.columns.get(column, column)) for column in ("messages", "completion", "system")}
    value["prompt"] = prompt_of(row, source.columns.get("prompt", "prompt"))
    images_beside = as_sources(row.get(source.columns.get("images", "images"))) if sees_images else []
    system = value["system"] if isinstance(value["system"], str) else ""
    tools = _tools(row.get(source.columns.get("tools", "tools")))
    own_names = config.loss_roles
    if value["messages"] or (value["messages"] not in (None, "") and value["prompt"] is None):
        messages = _messages(value["messages"], "user", own_names)
        first = 0
    else:
        prompt, completion = value["prompt"], value["completion"]
        if isinstance(prompt, str) and isinstance(completion, str) and not has_template and not images_beside:
            return PlainText(f"{system}\n\n{prompt}" if system.strip() else prompt, completion)
        context, answer = _messages(prompt, "user", own_names), _messages(completion, "assistant", own_names)
        messages, first = [*context, *answer], len(context)
    if system.strip() and messages[0]["role"] != "system":
        messages, first = [{"role": "system", "content": system}, *messages], first + bool(first)
    if not has_template:
        raise SFTDataError("a conversation needs a chat template, and there is none (sft.data.chat_template)")
    trained = _trained(messages, first, config)
    if any(flag and _NOTHING in message for flag, message in zip(trained, messages, strict=True)):
        raise SFTDataError("a reply that trains has no content (null) and no calls: an empty one would be learned")
    plain = [{k: v for k, v in message.items() if k not in (*_FLAGS, _NOTHING)} for message in messages]
    if other := other_media(plain, row):
        raise SFTDataError(other)
    if not sees_images and any(image_parts(plain)):
        raise SFTDataError("content parts of type image: only text can be trained on without model.vision")
    try:
        placed, images = place_images(plain, images_beside)
    except ValueError as error:
        raise SFTDataError(str(error)) from error
    return Conversation(placed, tools, trained, images)


def _messages(value: Any, role: str, own_names: Sequence[str]) -> list[Message]:
    """Return a column as messages; a string becomes one message of `role`, or is a list as JSON."""
    if isinstance(value, str):
        if value.startswith("[{"):
            try:
                return _messages(json.loads(value), role, own_names)
            except _NOT_READ:
                pass  # text that happens to begin so
        return [{"role": role, "content": value}]
    if isinstance(value, list) and value and all(isinstance(m, dict) for m in value):
        return [_message(m, own_names) for m in value]
    if value == []:
        raise SFTDataError("a list of messages is empty")
    raise SFTDataError(f"expected a string or a list of messages with `role` and `content`, got {value!r:.120}")


def _message(raw: Message, own_names: Sequence[str]) -> Message:
    message = {key: value for key, value in raw.items() if value is not None}
    if "role" not in message and "from" in message:
        message = {{"from": "role", "value": "content"}.get(key, key): value for key, value in message.items()}
    role = message.get("role")
    if not isinstance(role, str):
        raise SFTDataError(f"expected a string or a list of messages with `role` and `content`, got {raw!r:.120}")
    if role == _CALL and role not in own_names:
        role, message[_CALL] = "assistant", message.pop("content", None)
    message["role"] = _role(role, own_names)
    if call := message.pop(_CALL, None):
        message.setdefault("tool_calls", _older_calls(call))
    if "reasoning" in message:  # kept beside: a template may know either name
        message.setdefault("reasoning_content", message["reasoning"])
    said = message.get("tool_calls") or message.get("reasoning_content") or "content" in message
    message["content"] = _content(message.get("content", ""))
    if not said:
        message[_NOTHING] = True
    if calls := message.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise SFTDataError(f"expected `tool_calls` as a list, got {calls!r:.120}")
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _role(role: str, own_names: Sequence[str]) -> str:
    """Return a role's common name; what `sft.data.loss_roles` names as the data has it stays so, for the template."""
    lower = role.lower()
    if role in own_names and role not in _ROLES:
        return role
    return "assistant" if lower == "model" else lower if lower in COMMON_ROLES else _ROLES.get(lower, role)


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Content as text, or where a part of it is an image, as a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise SFTDataError(f"expected content as text or a list of text parts, got {content!r:.120}")
    kinds = [part.get("type", "text") if isinstance(part, dict) else type(part).__name__ for part in content]
    if other := sorted({str(kind) for kind in kinds if kind not in ("text", *IMAGE_PARTS)}):
        raise SFTDataError(f"content parts of type {', '.join(other)}: only text and images can be trained on")
    for part, kind in zip(content, kinds, strict=True):
        if kind == "text" and part.get("text") is None and any(part[key] is not None for key in part.keys() - {"type"}):
            raise SFTDataError(
                f"a content part has no `text`: is a message nested in another's content? Got {part!r:.120}"
            )
    texts = [{"type": "text", "text": part.get("text") or ""} for part in content]
    if wrong := [part["text"] for part in texts if not isinstance(part["text"], str)]:
        raise SFTDataError(f"expected `text` of a content part as a string, got {wrong[0]!r:.120}")
    if not any(kind in IMAGE_PARTS for kind in kinds):
        return "".join(part["text"] for part in texts)
    return [part if kind in IMAGE_PARTS else text for part, kind, text in zip(content, kinds, texts, strict=True)]


def _older_calls(call: Any) -> list[Any]:
    """Return what `function_call` holds, a call or several of them, maybe as JSON, as tool calls."""
    try:
        found = json.loads(call) if isinstance(call, str) else call
    except _NOT_READ as error:
        raise SFTDataError(f"expected `{_CALL}` as a call or as JSON ({error}), got {call!r:.120}") from error
    return found if isinstance(found, list) else [found]


def _call(call: Any) -> Any:
    """Return a tool call as templates expect it: a `function` with arguments as a mapping, as servers hand it over."""
    if not isinstance(call, dict):
        raise SFTDataError(f"expected a tool call with a name and arguments, got {call!r:.120}")
    function = call.get("function", call)
    if not isinstance(function, dict) or "name" not in function:
        raise SFTDataError(f"expected a tool call with a name and arguments, got {call!r:.120}")
    function = dict(function)
    parameters = function.pop("parameters", {})
    arguments = function.get("arguments", parameters)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except _NOT_READ:
            pass  # a model's malformed call may be part of the data: the template shows it as it is
    function = {**function, "arguments": arguments}
    return {**(call if "function" in call else {"type": "function", **function}), "function": function}


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except _NOT_READ as error:
            raise SFTDataError(f"`tools` is neither a list nor JSON ({error})") from error
    if not value:
        return None
    if not isinstance(value, list):
        raise SFTDataError(f"`tools` must be a list of tool definitions, got {value!r:.120}")
    return value


def _trained(messages: list[Message], first: int, config: SFTDataConfig) -> tuple[bool, ...]:
    """Mark the messages that are trained: by their own flag, else their role; those before `first` never."""
    flags = []
    for i, message in enumerate(messages):
        own = next((message[key] for key in _FLAGS if key in message), None)
        if own is not None and own not in (0, 1):
            flag = next(key for key in _FLAGS if key in message)
            raise SFTDataError(f"message {i + 1}: `{flag}` is {own!r}: only true, false, 0 and 1 are known")
        flags.append(i >= first and (message["role"] in config.loss_roles if own is None else bool(own)))
    if config.loss_turns == "last":
        last = max((i for i, flag in enumerate(flags) if flag), default=-1)
        flags = [i == last for i in range(len(flags))]
    return tuple(flags)
