"""The first rows of data, read as the trainer reads them, and how `rows` is told of its own: wrong before the queue."""

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_hpc.config.env_files import REWARDS, ROWS, short_id
from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.config.sections.sft import SFTDataConfig, SFTSourceConfig
from prime_hpc.envs.rows.reading import answer_in, asking_column, prompt_in, why_refused
from prime_hpc.store.dataset.files import DataFiles, find_data, first_columns, first_parquet_rows, is_compressed
from prime_hpc.trainer.data.messages import COMMON_ROLES, Conversation, PlainText, SFTDataError, parse_line, parse_row
from prime_hpc.trainer.data.pairs import parse_pair

if TYPE_CHECKING:
    from prime_hpc.store.dataset.token_rows import TokenRow

_FILES, _ROWS, _BYTES = 20, 50, 2**20
"""Files that are looked into, and rows and bytes (of lines) of each."""

SKIP_ROWS = "mend it, or sft.data.bad_rows = skip"


def wrong_row(
    found: DataFiles,
    source: SFTSourceConfig,
    config: SFTDataConfig,
    *,
    vocab_size: int | None = None,
    sees_images: bool = False,
) -> str | None:
    """Return what is wrong with the first rows of JSON lines or Parquet, with file and row; None where nothing is.

    Args:
        vocab_size: of the model; None: not known.
        sees_images: whether they may hold images (`model.vision`).
    """
    if config.bad_rows == "skip":
        return None
    for place, row, path in _rows(found, source):
        try:
            for parsed in _parse(row, path, source, config, sees_images=sees_images):
                if isinstance(parsed, Conversation | PlainText) or not vocab_size:
                    continue
                if beyond := parsed.beyond(vocab_size):
                    raise SFTDataError(beyond)
        except SFTDataError as error:
            return f"{place}: {error}"
    return None


def unusual_role(found: DataFiles, source: SFTSourceConfig, config: SFTDataConfig) -> str | None:
    """Return the first role that few chat templates know, with file and row: it may be a typing error."""
    for place, row, path in _rows(found, source):
        with contextlib.suppress(SFTDataError):
            parts = _parse(row, path, source, config, sees_images=True)
            for message in (m for parsed in parts if isinstance(parsed, Conversation) for m in parsed.messages):
                if message["role"] not in (*COMMON_ROLES, *config.loss_roles):
                    return f"{place}: a message of the role {message['role']!r}"
    return None


def nothing_trained(found: DataFiles, source: SFTSourceConfig, config: SFTDataConfig) -> str | None:
    """Return that none of the first rows has anything to train, where it is so."""
    num_rows = 0
    for num_rows, (_, row, path) in enumerate(_rows(found, source), 1):  # noqa: B007
        try:
            parts = _parse(row, path, source, config, sees_images=True)
        except SFTDataError:
            return None
        for parsed in parts:
            trained = parsed.trained if isinstance(parsed, Conversation) else getattr(parsed, "loss_mask", [0, 1])[1:]
            if any(trained):
                return None
    return f"nothing is trained in the first {num_rows} rows of {source.label}" if num_rows else None


def wrong_rows_arguments(env: EnvConfig) -> Iterator[tuple[str, str]]:
    """Yield arguments of `rows` and `prompts` with which the environment would not begin, and why."""
    args, is_rows = env.args, short_id(env.id) == ROWS
    if bool(args.get("files")) == bool(args.get("dataset")):
        yield "files", f"name JSONL or Parquet files{', or a data set of the hub as `dataset`: one of them' * is_rows}"
        return
    if not is_rows:
        return
    if wrong := list(_wrong_columns(env)):
        yield from wrong
    elif said := _wrong_prompt(env):
        yield "files", said
    question, weights = args.get("question", "{}"), args.get("weights")
    if isinstance(question, str) and question.count("{}") != 1:
        yield "question", f"needs one {{}}, which stands for the prompt, not {question!r}"
    given = args.get("reward", REWARDS[0])
    rewards = [given] if isinstance(given, str) else given
    if not isinstance(rewards, list):
        return
    if weights and isinstance(weights, list) and len(weights) != len(rewards):
        yield "weights", f"{len(weights)} for {len(rewards)} rewards: state one for each"
    for reward in rewards:
        if reward not in REWARDS and ":" not in str(reward):
            yield (
                "reward",
                f"{reward!r} is none of {', '.join(REWARDS)}; your own is FILE.py:function or module:function",
            )


def _wrong_columns(env: EnvConfig) -> Iterator[tuple[str, str]]:
    """Yield columns that `rows` is told to read and that its first row has not."""
    named = {name: env.args[name] for name in ("prompt", "answer") if isinstance(env.args.get(name), str)}
    columns: list[str] | None = None
    with contextlib.suppress(ValueError):  # no files, or none that can be read: told as such
        source = _source(env.args.get("files")) if named else None
        columns = first_columns(find_data(source), source) if source is not None else None
    if columns is None:
        return
    for name, column in named.items():
        if (column if name == "prompt" else column.partition(".")[0]) not in columns:
            yield name, f"the first row has no {column!r}; its columns are: {', '.join(columns)}"


def _wrong_prompt(env: EnvConfig) -> str | None:
    """Return why `rows` cannot play one of the first lines of its files; None: it can, or they are no JSON lines."""
    prompt, answer = (one if isinstance(one := env.args.get(name), str) else None for name in ("prompt", "answer"))
    reward = env.args.get("reward", REWARDS[0])
    needs_answer = any(one in REWARDS for one in (reward if isinstance(reward, list) else [reward]))
    rows: Iterator[tuple[str, Any, Path]] = iter(())
    with contextlib.suppress(ValueError):  # told as files
        source = _source(env.args.get("files"))
        if source is not None and (found := find_data(source)).kind == "jsonl":
            first_columns(found, source)  # raises what is told as of the whole file
            rows = _rows(found, source)
    for place, line, path in rows:
        try:
            if not isinstance(row := parse_line(line, path), dict):
                raise ValueError("no object of columns")
            prompt_in(row, column := asking_column(row, prompt))
            others = {name: value for name, value in row.items() if name != column}
            if answer_in(others, answer) is None and needs_answer:
                raise ValueError(f"no answer for reward {reward!r}: state its column as `args.answer`")
        except ValueError as error:
            return f"{place}: {why_refused(error)}"
    return None


def columns_of(files: Any) -> tuple[set[str], bool]:
    """Return the columns of the first rows that `rows` would read, none where they cannot be had; and whether no other
    row is there."""
    with contextlib.suppress(ValueError):
        if (source := _source(files)) is not None:
            found = find_data(source)
            is_one = len(found.files) == 1
            if found.kind == "parquet":
                return set(first_columns(found, source) or ()), is_one
            rows = [parse_line(line, path) for _, line, path in _rows(found, source)]
            is_all = is_one and len(rows) < _ROWS and found.files[0].stat().st_size < _BYTES
            return {name for row in rows if isinstance(row, dict) for name in row}, is_all
    return set(), False


def _source(files: Any) -> SFTSourceConfig | None:
    """Return the files of `rows` as a source; None: it names none. Raises ValueError: it names something else."""
    return SFTSourceConfig(path=[files] if isinstance(files, str) else files) if files else None


def _parse(
    row: Any, path: Path, source: SFTSourceConfig, config: SFTDataConfig, *, sees_images: bool
) -> "tuple[Conversation | PlainText | TokenRow, ...]":
    """Return what is tokenised of a row: of a pair both sides."""
    row = parse_line(row, path) if isinstance(row, bytes) else row
    has_template = config.chat_template != "none"
    if source.holds_pairs:
        return parse_pair(row, source, config, has_template, sees_images=sees_images)
    return (parse_row(row, source, config, has_template, sees_images=sees_images),)


def _rows(found: DataFiles, source: SFTSourceConfig) -> Iterator[tuple[str, Any, Path]]:
    """Yield the first rows of the files, as far as that is a little reading, each with its place: lines as they are."""
    for path in found.files[:_FILES] if found.kind == "parquet" else ():
        for number, row in enumerate(first_parquet_rows(path, source, _ROWS), 1):
            yield f"{path}: row {number}", row, path
    for path in found.files[:_FILES] if found.kind == "jsonl" else ():
        if is_compressed(path) and path.suffix != ".gz":
            continue
        left = _BYTES
        with (
            contextlib.suppress(OSError, EOFError, zlib.error),  # the trainer's to tell, which tries again
            path.open("rb") as raw,
            gzip.open(raw) if path.suffix == ".gz" else raw as file,
        ):
            for number in range(1, _ROWS + 1):
                line = file.readline(left + 1)
                left -= len(line)
                if not line or left < 0:
                    break
                if line.strip():
                    yield f"{path}:{number}", line, path
