"""Rows of files and of hub data sets, each with its place for messages."""

import contextlib
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from pydantic import ValidationError

from prime_hpc.config.sections.sft import SFTSourceConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.images import encode_image
from prime_hpc.store.dataset.files import find_data, no_json_lines, prompt_of

Row = dict[str, Any]
PROMPTS = ("prompt", "messages", "question", "problem", "instruction", "query", "conversations")
"""Columns that a prompt is looked for in, where none is named."""
ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth", "solution", "label", "target", "output")
"""Columns that an answer is looked for in, likewise."""
IMAGES = ("images", "image")
"""Columns of images."""


def read_files(patterns: Sequence[str], who: str) -> Iterator[tuple[str, Path | None, Row]]:
    """Yield the rows of JSONL or Parquet files, in their order, each with its place (`FILE, line 3`) and the folder of
    its file.

    Args:
        patterns: files, patterns or directories.
        who: asks for them, for messages.

    Raises:
        EnvError: a file is not there, or cannot be read; names file and line.
    """
    try:
        found = find_data(SFTSourceConfig(path=list(patterns)))
    except ValueError as error:
        raise EnvError(f"{who}: {error}") from error
    if found.kind == "hub":
        raise EnvError(f"{who}: {found.files[0]} is a folder that `datasets` saved: write it as Parquet (to_parquet)")
    read = _read_parquet if found.kind == "parquet" else _read_jsonl
    for path in found.files:
        folder = path.parent
        for place, row in read(path):
            yield place, folder, row


def _read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    reached = 0
    if path.suffix == ".zst":
        raise EnvError(f"{path}: unpack it (zstd -d {path.name}), or compress it by gzip")
    with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
        try:
            if wrong := no_json_lines(path, file.read(4096)):
                raise EnvError(wrong)
            file.seek(0)
            for line in file:
                reached += 1
                if line.strip():
                    yield f"{path}, line {reached}", _row(_DECODER.decode(line.decode().removeprefix("\ufeff")))
        except EnvError:
            raise
        except (RecursionError, ValueError, OSError, EOFError, zlib.error) as error:
            text = " ".join(str(error).split())[:300]
            raise EnvError(f"{path}, line {reached}: no row can be read ({text})") from error


def as_messages(prompt: Any) -> Any:
    """Return a prompt of messages, maybe as JSON, OpenAI's or ShareGPT's, as verifiers reads them; others as they
    are."""
    found = prompt
    if isinstance(prompt, str) and prompt.startswith("[{"):
        with contextlib.suppress(RecursionError, ValueError):
            found = json.loads(prompt)
    if not isinstance(found, list) or not all(isinstance(each, dict) and {"role", "from"} & {*each} for each in found):
        return prompt  # text that happens to begin so
    return list(_shaped(found))


_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "developer": "system"}
_ROLES |= {"function": "tool", "observation": "tool"}
_CALL = "function_call"


def _shaped(messages: list[Row]) -> Iterator[Row]:
    """Yield messages with the usual roles, calls as verifiers has them, and tool results that say of which call."""
    unanswered: list[str] = []
    for number, each in enumerate(messages):
        message = each if "role" in each else {"role": each["from"], "content": each.get("value")}
        role = str(message["role"]).lower()
        message = {**message, "role": _ROLES.get(role, role)}
        if message["role"] == "assistant":
            if isinstance(message.get("content"), list):
                message["content"] = "".join(_text_of(part) for part in message["content"])
            calls = message.pop("tool_calls", None) or message.pop(_CALL, None)
            calls = calls if isinstance(calls, list) else [calls] if calls else []
            message["tool_calls"] = [_call(call, f"call_{number}_{at}") for at, call in enumerate(calls)] or None
            message["reasoning_content"] = message.get("reasoning_content") or message.get("reasoning")
            unanswered = [call["id"] for call in message["tool_calls"] or ()]
        elif message["role"] == "tool":
            ident = message["tool_call_id"] = message.get("tool_call_id") or next(iter(unanswered), "")
            unanswered = [each for each in unanswered if each != ident]
        yield message


def _text_of(part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
        raise ValueError(f"a message of the assistant is text alone, got {part!r:.120}")
    return str(part["text"])


def _call(call: Any, ident: str) -> Row:
    """Return a tool call, OpenAI's or flat, with its arguments as JSON; `ident`: of one that has none."""
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"expected a tool call with a name and arguments, got {call!r:.120}")
    arguments = function.get("arguments", function.get("parameters"))
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": call.get("id") or ident, "name": function["name"], "arguments": text}


def why_refused(error: ValueError) -> str:
    """Return in one line why a row is no prompt; of what pydantic finds wrong the first."""
    text = str(error)
    if isinstance(error, ValidationError):
        first = min(error.errors(), key=lambda item: item["loc"] == ("prompt", "str"))
        place = ".".join(str(part) for part in first["loc"] if part != "str" and not str(part).startswith("list["))
        text = f"{place}: {first['msg']}, got {first['input']!r:.120}"
    return " ".join(text.split())[:300]


def prompt_column(row: Row) -> str | None:
    """Return the column of a row's prompt: the first that is no whole conversation, as SFT has it, with the reply that
    is to be found; where all are, the first."""
    found = (name for name in PROMPTS if row.get(name))
    first = next(found, None)
    if first is None or not is_answered(as_messages(row[first])):
        return first
    return next((name for name in found if not is_answered(as_messages(row[name]))), first)


def asking_column(row: Row, stated: str | None) -> str:
    """Return the column of a row's prompt, `stated` or found. Raises ValueError: there is none, or it is empty."""
    column = stated or prompt_column(row)
    if column is None or not row.get(column):
        wanted = f"`{stated}`" if stated else "prompt (state its column as `args.prompt`)"
        raise ValueError(f"it has no {wanted}; its columns are: {', '.join(row) or 'none'}")
    return column


def answer_in(row: Row, stated: str | None) -> Any:
    """Return a row's answer, of the column `stated` or the first that has one; None where none has.
    Raises ValueError: `stated` has none."""
    for path in (stated,) if stated else ANSWERS:
        value: Any = row
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None and not (isinstance(value, float) and math.isnan(value)):  # tables say "none" so
            return value
    if stated:
        raise ValueError(f"it has no answer `{stated}`; its columns are: {', '.join(row) or 'none'}")
    return None


def prompt_in(row: Row, column: str) -> Any:
    """Return a row's prompt, a text or messages. Raises ValueError: it ends with the reply that is to be found."""
    prompt = as_messages(prompt_of(row, column))
    if is_answered(prompt):
        raise ValueError(f"`{column}` ends with the assistant's reply: leave it out of the prompt")
    return prompt


def system_in(row: Row, prompt: Any, default: str | None = None) -> str | None:
    """Return the system prompt beside a row's prompt: the text in its `system`, else `default`; None where the prompt
    is messages that bring their own, and would have two."""
    if isinstance(prompt, list) and any(isinstance(each, dict) and each.get("role") == "system" for each in prompt):
        return None
    system = row.get("system")
    return system if isinstance(system, str) and system.strip() else default


def is_answered(prompt: Any) -> bool:
    """Return whether a prompt ends with the assistant's reply."""
    return isinstance(prompt, list) and isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant"


def _as_json(row: Row, place: str) -> Row:
    """Return a row as JSON has it (traces hold it): dates become texts, and images of prompts `data:` URLs.
    Raises EnvError: a column holds bytes, or a picture that `datasets` has read; names it."""
    try:
        row = {name: _addressed(value) if name in (*PROMPTS, *IMAGES) else value for name, value in row.items()}
        found: Row = json.loads(json.dumps(row, default=_text))
    except TypeError:
        name, kind = next((n, type(e).__name__) for n, v in row.items() for e in _flat(v) if not _is_plain(e))
        raise EnvError(f"{place}: column {name!r} holds {kind}, such as a picture: leave it out of the data") from None
    return found


def _addressed(value: Any) -> Any:
    """Return a value with encoded images, alone or as `datasets` has them, as `data:` URLs."""
    if isinstance(value, dict):
        inner = value.get("bytes")
        return _addressed(inner) if isinstance(inner, bytes) else {key: _addressed(own) for key, own in value.items()}
    if isinstance(value, list):
        return [_addressed(own) for own in value]
    return encode_image(value) if isinstance(value, bytes) else value


def _text(value: Any) -> str:
    if not _is_plain(value):
        raise TypeError
    return str(value)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | None | date | time | timedelta | Decimal | UUID)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _flat(inner)
    else:
        yield value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON, and no row that is written could hold it")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
"""Made once: `json.loads` would make one a line."""


def _row(value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}, not an object")
    return value


def _read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise EnvError(f"{path}: needs the package pyarrow (pip install 'prime-hpc[data]')") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", _as_json(row, f"{path}, row {number}")
    except (pa.ArrowException, OSError) as error:
        raise EnvError(
            f"{path}, row {number + 1}: no row can be read ({' '.join(str(error).split())[:300]})"
        ) from error


def read_hub(name: str, subset: str | None, split: str) -> Iterator[tuple[str, Path | None, Row]]:
    """Yield the rows of a data set of the Hugging Face hub, each with its place (`NAME, row 3`), and without a folder.
    Raises EnvError: it cannot be loaded; says why."""
    from datasets import load_dataset

    try:
        rows = load_dataset(name, subset, split=split)
    except Exception as error:  # the library raises of many kinds
        text = " ".join(str(error).split())[:300]
        raise EnvError(
            f"{name} (subset {subset}, split {split}) cannot be loaded: {text}. Where nodes have no network, load it "
            f'once elsewhere, `python -c "import datasets; datasets.load_dataset({name!r})"`, or name `files`'
        ) from error
    if "Image(" in repr(getattr(rows, "features", None)):  # their bytes are wanted, and no pixels
        rows = (table.to_pylist()[0] for table in rows.with_format("arrow"))
    for number, row in enumerate(rows, 1):
        yield f"{name}, row {number}", None, _as_json(dict(row), f"{name}, row {number}")
