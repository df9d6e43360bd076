"""Files of a data set, their kind, and its columns."""

import contextlib
import glob
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prime_hpc.config.sections.sft import COLUMNS, MARGIN, SIDES, TOKEN_COLUMNS, SFTSourceConfig
from prime_hpc.store.dataset.media_columns import ParquetMedia
from prime_hpc.store.io.tree import list_tree
from prime_hpc.store.manifest import MANIFEST

Kind = Literal["jsonl", "parquet", "hub", "fake"]
_JSONL, _PARQUET = (".jsonl", ".json", ".ndjson"), (".parquet", ".pq")
_COMPRESSED = (".gz", ".zst")
_TABLES = (".csv", ".tsv", ".xls", ".xlsx")
_OF_TURNS = {"prompt", "completion", "conversations", "conversation", "instruction", "output", "response"}
_OF_TURNS |= {"question", "answer", "chosen", "rejected"}
_OTHER_MASKS = ("completion_mask", "assistant_masks")
"""Columns of tokenised rows that say what is trained, too: TRL's."""
INSTRUCTION, INPUT, HISTORY = "instruction", "input", "history"
"""Alpaca's columns of one prompt: what is asked, what about, and pairs of what was asked and answered before."""
ASKED = ("question", INSTRUCTION, "query", INPUT)
"""Names that prompts have in other people's pairs."""
_SIDES = ("user", "assistant")
_WIDE = {b"\xff\xfe": "UTF-16LE", b"\xfe\xff": "UTF-16BE"}
_BUFFER = 1 << 16
"""Bytes of a column of Parquet that are read at a time: the first rows cost a page, and not a whole group."""
_SAVED = "state.json"
_SAVED_SPLITS = "dataset_dict.json"


@dataclass(frozen=True)
class DataFiles:
    """A data set on disk; of the hub: no files."""

    kind: Kind
    files: list[Path]
    per_path: tuple[int, ...] = ()
    """How many of the files each entry of `path` names."""


class NothingThereError(ValueError):
    """No file is where rows are looked for."""


def find_data(source: SFTSourceConfig) -> DataFiles:
    """Return the files, in the order of `path`, those of a pattern or a directory by name.

    Raises:
        NothingThereError: nothing is there; names the path.
        ValueError: the kind cannot be told, or a folder cannot be read; names the path and what to do.
    """
    if source.type == "fake":
        return DataFiles("fake", [])
    if source.name is not None:
        if (Path(source.name) / _SAVED).exists():  # `datasets` loads it by another function
            raise ValueError(f"{source.name} is a folder that `datasets` saved: state it as path, not as name")
        if Path(source.name).is_file():
            raise ValueError(f"{source.name} is a file, and name is of the hub: state it as path")
        return DataFiles("hub", [])
    if not source.paths:
        raise ValueError("names no file; set path (or name, of a hub data set), or use data.type = fake")
    files: list[Path] = []
    per_path: list[int] = []
    for path in source.paths:
        found = _expand(path)
        if not found:
            raise NothingThereError(f"{path} {_why_nothing(path)}")
        files += found
        per_path.append(len(found))
    if not any(path.is_dir() or path.stat().st_size for path in files):
        raise ValueError(f"{files[0]} is empty" if len(files) == 1 else f"all {len(files)} files of {path} are empty")
    if table := next((path for path in files if plain_suffix(path).lower() in _TABLES), None):
        raise ValueError(
            f'{table} is a table, and rows are JSON lines or Parquet: python -c "import pandas; '
            f"pandas.read_csv('{table.name}').to_json('rows.jsonl', orient='records', lines=True)\""
        )
    saved = [path for path in files if is_saved(path)]
    if not saved and source.type != "hub":
        return DataFiles(source.type if source.type != "auto" else _kind(files), files, tuple(per_path))
    if other := next((path for path in files if path not in saved), None):
        raise ValueError(f"{other} is no folder that `datasets` saved" + (f", as {saved[0]} is" if saved else ""))
    return DataFiles("hub", files, tuple(per_path))


def is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` wrote this directory: one data set, or several splits."""
    return (path / _SAVED).exists() or (path / _SAVED_SPLITS).exists()


def saved_splits(path: Path) -> list[str] | None:
    """Return the splits of a directory that `save_to_disk` wrote; None: it is one data set, or cannot be read."""
    try:
        return [str(name) for name in json.loads((path / _SAVED_SPLITS).read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _expand(path: str) -> list[Path]:
    if glob.has_magic(path) and not Path(path).exists():
        found = glob.glob(path, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        return sorted(Path(p) for p in found if Path(p).is_file())
    here = Path(path)
    if not here.is_dir() or is_saved(here):
        return [here] if here.exists() else []
    try:
        return [p for p in list_tree(here, _may_hold_rows) if p.is_file() and _holds_rows(p.relative_to(here))]
    except OSError as error:  # rows that are not seen would not be trained on, and nothing would say so
        raise ValueError(f"{error.filename} cannot be read ({error.strerror})") from error


def _why_nothing(path: str) -> str:
    if Path(path).is_dir():
        return f"is a directory without data files ({', '.join((*_JSONL, *_PARQUET))}, or compressed)"
    return "matches no file" if glob.has_magic(path) else "does not exist"


def _may_hold_rows(folder: str) -> bool:
    """Tell data's folders from the file system's own (snapshots, a recycle bin), which are large, or closed."""
    return not folder.startswith(".") and folder != "lost+found"


def _holds_rows(path: Path) -> bool:
    """Return whether a directory's file is data: not hidden (rows that are being written), no artifact's manifest."""
    hidden = any(part.startswith(".") for part in path.parts)
    return plain_suffix(path) in (*_JSONL, *_PARQUET) and not hidden and path.name != MANIFEST


def plain_suffix(path: Path) -> str:
    """`.jsonl` of `a.jsonl.gz`."""
    return Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix


def is_compressed(path: Path) -> bool:
    """Return whether a file is compressed as a whole."""
    return path.suffix in _COMPRESSED


def _kind(files: list[Path]) -> Kind:
    kinds: set[Kind] = {"parquet" if plain_suffix(path) in _PARQUET else "jsonl" for path in files}
    if len(kinds) > 1:
        raise ValueError("names JSON lines and Parquet together: state one kind of file")
    return kinds.pop()


def has_columns(names: Sequence[str], source: SFTSourceConfig) -> bool:
    """Return whether a row with these columns can be trained on."""
    if source.holds_pairs:
        return _has_sides(names, source)
    if is_tokenised(names, source):
        return _unread_mask(names, source) is None
    return _has_turns(names, source) or is_text(names, source)


def is_tokenised(names: Sequence[str], source: SFTSourceConfig) -> bool:
    """Return whether rows with these columns hold tokens. Beside text these may be another model's: there they count
    only where `sft.data.columns` names them."""
    is_beside = _OF_TURNS.union(("messages", "text")).intersection(names) or _has_turns(names, source)
    is_meant = "input_ids" in source.columns or not (is_beside or is_text(names, source))
    return source.columns.get("input_ids", "input_ids") in names and is_meant


def _unread_mask(names: Sequence[str], source: SFTSourceConfig) -> str | None:
    """Return a column that says which tokens are trained, and that nothing reads."""
    is_masked = any(source.columns.get(column, column) in names for column in ("loss_mask", "labels"))
    return None if is_masked else next((name for name in _OTHER_MASKS if name in names), None)


def _has_sides(names: Sequence[str], source: SFTSourceConfig) -> bool:
    return all(source.columns.get(side, side) in names for side in SIDES) and not _lacks_margin(names, source)


def _lacks_margin(names: Sequence[str], source: SFTSourceConfig) -> bool:
    """Return whether `columns` names margins of the rows that there are none of: each would silently be 0."""
    return source.scores and MARGIN in source.columns and source.columns[MARGIN] not in names


def _has_turns(names: Sequence[str], source: SFTSourceConfig) -> bool:
    named = {column: source.columns.get(column, column) for column in ("messages", "prompt", "completion")}
    return named["messages"] in names or (named["prompt"] in names and named["completion"] in names)


def is_text(names: Sequence[str], source: SFTSourceConfig) -> bool:
    """Return whether rows with these columns are plain text. Beside columns of a conversation `text` may be that
    conversation rendered by somebody's template: there it counts only where `sft.data.columns` names it."""
    is_meant = "text" in source.columns or not _OF_TURNS.intersection(names)
    return source.columns.get("text", "text") in names and is_meant and not _has_turns(names, source)


def used_columns(names: Sequence[str], source: SFTSourceConfig, images: bool) -> set[str]:
    """Return the names of the columns that make samples; `text` only where nothing else does."""
    if is_tokenised(names, source) and not source.holds_pairs:
        return {source.columns.get(column, column) for column in TOKEN_COLUMNS}
    left_out = {"text", *TOKEN_COLUMNS} if images else {"text", "images", *TOKEN_COLUMNS}
    left_out |= {"messages", "completion"} if source.holds_pairs else set(SIDES)
    is_plain = is_text(names, source) and not source.holds_pairs
    columns = ("text",) if is_plain else [column for column in COLUMNS if column not in left_out]
    used = {source.columns.get(column, column) for column in columns}
    used |= {INPUT, HISTORY} if INSTRUCTION in used else set()
    used |= {source.columns.get(MARGIN, MARGIN)} if source.scores else set()
    return used | set(ASKED) if source.holds_pairs else used


def prompt_of(row: Mapping[str, Any], column: str) -> Any:
    """Return a row's prompt: of Alpaca's rows the instruction, and what it is about; or messages, after others."""
    prompt = row.get(column)
    if column != INSTRUCTION or not isinstance(prompt, str):
        return prompt
    about, before = row.get(INPUT), row.get(HISTORY)
    if isinstance(about, str) and about.strip():
        prompt = f"{prompt}\n\n{about}"
    if not before or not isinstance(before, list) or not all(isinstance(p, list) and len(p) == 2 for p in before):
        return prompt  # a column of that name may hold something else
    turns = [{"role": role, "content": said} for pair in before for role, said in zip(_SIDES, pair, strict=True)]
    return [*turns, {"role": "user", "content": prompt}]


def missing_columns(names: Sequence[str], source: SFTSourceConfig) -> str:
    """Word the error where `has_columns` is false."""
    named = {column: source.columns.get(column, column) for column in ("messages", "prompt", "completion", "text")}
    have = ", ".join(sorted(map(str, names))) or "none"
    if source.holds_pairs and _lacks_margin(names, source):
        return (
            f"{source.key}.columns takes margins from `{source.columns[MARGIN]}`; the columns are: {have}. Mend the "
            "name, or leave it out; a row without a margin of its own states 0"
        )
    if source.holds_pairs:
        wanted = " and ".join(f"`{source.columns.get(side, side)}`" for side in SIDES)
        return (
            f"sft.preference needs {wanted}, and `{named['prompt']}` where they do not begin with it themselves; the "
            f'columns are: {have}. Map them with {source.key}.columns, such as {{"chosen": "better", "rejected": '
            '"worse"}; rows of single replies train without sft.preference'
        )
    if is_tokenised(names, source):
        mask = _unread_mask(names, source)
        return f'`{mask}` is read as `loss_mask` alone. Map it: {source.key}.columns = {{"loss_mask": "{mask}"}}'
    such_as = '{"prompt": "question", "completion": "answer"}'
    if "conversations" in names:
        such_as = '{"messages": "conversations"}'
    elif {"instruction", "output"} <= set(names):
        such_as = '{"prompt": "instruction", "completion": "output"}'
        if INPUT in names:
            such_as += " (what `input` holds is put after the instruction)"
    of_pairs = "; pairs of `chosen` and `rejected` train with sft.preference" if _has_sides(names, source) else ""
    return (
        f"needs `{named['messages']}`, or `{named['prompt']}` and `{named['completion']}`, or `{named['text']}` alone, "
        f"or `input_ids`; the columns are: {have}. Map them with {source.key}.columns, such as {such_as}"
        f"{of_pairs}"
    )


def no_json_lines(path: Path, head: bytes) -> str | None:
    """Return why a file that begins so holds no JSON lines: another encoding, one array; None as far as it may."""
    wide = _WIDE.get(head[:2]) or ("UTF-16LE" if head[1:2] == b"\0" else "UTF-16BE" if head[:1] == b"\0" else None)
    if wide is None:
        is_array = head.lstrip()[:1] == b"["
        array = f"{path} is one JSON array; rows are one object a line: jq -c '.[]' {path.name} > rows.jsonl"
        return array if is_array else None
    from_it = "UTF-16" if head[:2] in _WIDE else wide  # iconv then leaves the mark of the byte order out
    return f"{path} is {wide}, not UTF-8: iconv -f {from_it} -t UTF-8 {path.name} > utf8.jsonl"


def first_row(found: DataFiles, source: SFTSourceConfig) -> dict[str, Any] | None:
    """Return the first row, where that can be had by reading a little: of plain JSON lines, of Parquet; else None.
    Raises ValueError: the file holds no JSON lines, or no Parquet."""
    if found.kind == "parquet":
        return next(first_parquet_rows(found.files[0], source, 1), None)
    if found.kind != "jsonl" or is_compressed(found.files[0]):
        return None
    with contextlib.suppress(OSError), found.files[0].open("rb") as file:
        if wrong := no_json_lines(found.files[0], file.read(4096)):
            raise ValueError(wrong)
    with contextlib.suppress(OSError, RecursionError, ValueError), found.files[0].open("rb") as file:
        row = json.loads(next((line for line in itertools.islice(file, 100) if line.strip()), b"null"))
        return row if isinstance(row, dict) else None
    return None


def first_columns(found: DataFiles, source: SFTSourceConfig) -> list[str] | None:
    """Return the columns of Parquet, and the keys of the first row, as far as `first_row` can be had.
    Raises ValueError: the file is no UTF-8, or no Parquet."""
    if found.kind == "parquet":
        parquet = _open_parquet(found.files[0])
        return parquet and sorted(parquet.schema_arrow.names)
    row = first_row(found, source)
    return None if row is None else sorted(row)


def first_parquet_rows(path: Path, source: SFTSourceConfig, most: int) -> Iterator[dict[str, Any]]:
    """Yield the first rows of a Parquet file as the trainer has them; none where pyarrow or the file is not to be had.
    `source`: says which columns make samples: no other one is read.
    Raises ValueError: it is no Parquet."""
    if (parquet := _open_parquet(path)) is None:
        return
    names = parquet.schema_arrow.names
    used = [name for name in names if name in used_columns(names, source, images=True)]
    media = ParquetMedia(path)
    try:
        for batch in itertools.islice(parquet.iter_batches(batch_size=most, columns=used), 1):
            for index, row in enumerate(map(without_nulls, batch.to_pylist())):
                yield {**row, **media.beside(index, row)}
    except OSError:
        return
    except (ValueError, NotImplementedError) as error:  # a codec that this build has not is the latter
        raise ValueError(f"{path} cannot be read as Parquet ({error})") from error


def _open_parquet(path: Path) -> Any:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        return None  # a login node does without it
    try:
        return parquet.ParquetFile(path, buffer_size=_BUFFER)
    except ArrowInvalid as error:
        raise ValueError(f"{path} cannot be read as Parquet ({error})") from error
    except OSError:
        return None


def without_nulls(value: Any) -> Any:
    """Return a row without the nulls of Arrow, which gives every message of a column the keys of all."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
