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
from prime_hpc.store.dataset.files import DataFiles, first_parquet_rows, is_compressed
from prime_hpc.trainer.data.messages import COMMON_ROLES, Conversation, PlainText, SFTDataError, parse_line, parse_row

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
            parsed = _parse(row, path, source, config, sees_images=sees_images)
            if (
                vocab_size
                and not isinstance(parsed, Conversation | PlainText)
                and (beyond := parsed.beyond(vocab_size))
            ):
                raise SFTDataError(beyond)
        except SFTDataError as error:
            return f"{place}: {error}"
    return None


def unusual_role(found: DataFiles, source: SFTSourceConfig, config: SFTDataConfig) -> str | None:
    """Return the first role that few chat templates know, with file and row: it may be a typing error."""
    for place, row, path in _rows(found, source):
        with contextlib.suppress(SFTDataError):
            parsed = _parse(row, path, source, config, sees_images=True)
            for message in parsed.messages if isinstance(parsed, Conversation) else ():
                if message["role"] not in (*COMMON_ROLES, *config.loss_roles):
                    return f"{place}: a message of the role {message['role']!r}"
    return None


def nothing_trained(found: DataFiles, source: SFTSourceConfig, config: SFTDataConfig) -> str | None:
    """Return that none of the first rows has anything to train, where it is so."""
    num_rows = 0
    for num_rows, (_, row, path) in enumerate(_rows(found, source), 1):  # noqa: B007
        try:
            parsed = _parse(row, path, source, config, sees_images=True)
        except SFTDataError:
            return None
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
    given = args.get("reward", REWARDS[0])
    rewards = [given] if isinstance(given, str) else given
    for reward in rewards if is_rows and isinstance(rewards, list) else ():
        if reward not in REWARDS and ":" not in str(reward):
            yield (
                "reward",
                f"{reward!r} is none of {', '.join(REWARDS)}; your own is FILE.py:function or module:function",
            )


def _parse(
    row: Any, path: Path, source: SFTSourceConfig, config: SFTDataConfig, *, sees_images: bool
) -> "Conversation | PlainText | TokenRow":
    row = parse_line(row, path) if isinstance(row, bytes) else row
    return parse_row(row, source, config, config.chat_template != "none", sees_images=sees_images)


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
