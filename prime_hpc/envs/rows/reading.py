"""Rows of files and of hub data sets, each with its place for messages."""

import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from prime_hpc.config.sections.sft import SFTSourceConfig
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.images import encode_image
from prime_hpc.store.dataset.files import find_data, no_json_lines, prompt_of

Row = dict[str, Any]
PROMPTS = ("prompt", "messages", "question", "problem", "instruction", "query", "conversations")
"""Columns that a prompt is looked for in, where none is named."""
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
        for place, row in read(path):
            yield place, path.parent, row


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
                    yield f"{path}, line {reached}", _row(_DECODER.decode(line.decode("utf-8-sig")))
        except EnvError:
            raise
        except (RecursionError, ValueError, OSError, EOFError, zlib.error) as error:
            text = " ".join(str(error).split())[:300]
            raise EnvError(f"{path}, line {reached}: no row can be read ({text})") from error


def as_messages(prompt: Any) -> Any:
    """Return a prompt whose messages stand in another form, a JSON text or ShareGPT's, as OpenAI's; others as they
    are."""
    found = prompt
    if isinstance(prompt, str) and prompt.startswith("[{"):
        with contextlib.suppress(RecursionError, ValueError):
            found = json.loads(prompt)
    if not isinstance(found, list) or not all(isinstance(each, dict) and {"role", "from"} & {*each} for each in found):
        return prompt  # text that happens to begin so
    return [
        each if "role" in each else {"role": _ROLES.get(each["from"], each["from"]), "content": each.get("value")}
        for each in found
    ]


_ROLES = {"human": "user", "gpt": "assistant"}


def prompt_column(row: Row) -> str | None:
    """Return the column of a row's prompt: the first that is no whole conversation, as SFT has it, with the reply that
    is to be found; where all are, the first."""
    found = [name for name in PROMPTS if row.get(name)]
    return next((name for name in found if not is_answered(as_messages(row[name]))), found[0] if found else None)


def prompt_in(row: Row, column: str) -> Any:
    """Return a row's prompt, a text or messages. Raises ValueError: it ends with the reply that is to be found."""
    prompt = as_messages(prompt_of(row, column))
    if is_answered(prompt):
        raise ValueError(f"`{column}` ends with the assistant's reply: leave it out of the prompt")
    return prompt


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
