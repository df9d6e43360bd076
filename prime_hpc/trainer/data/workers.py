"""Reading and tokenising rows, here or in processes of their own.

A worker process opens the files itself and gets row numbers only; it ends with the rank that started it.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.config.sections.sft import SFTDataConfig, SFTSourceConfig
from prime_hpc.store.dataset.files import DataFiles
from prime_hpc.store.model.tokenizer import load_tokenizer
from prime_hpc.trainer.data.images import ImageTokens
from prime_hpc.trainer.data.messages import DataChangedError, SFTDataError
from prime_hpc.trainer.data.samples import RowCounts, RowResult, RowTokenizer
from prime_hpc.trainer.data.sources import Rows, open_rows
from prime_hpc.trainer.data.template import ChatTokenizer


@dataclass(frozen=True)
class Recipe:
    """All that a process needs to turn row numbers into samples."""

    source: SFTSourceConfig
    config: SFTDataConfig
    found: DataFiles
    cache: Path
    tokenizer: Path
    trust_remote_code: bool
    enable_thinking: bool
    seq_len: int
    vocab_size: int
    """Of the model."""
    sees_images: bool = False
    """`model.vision`."""

    @property
    def makes(self) -> tuple[Any, ...]:
        """All but rows, tokenizer and template that decides what becomes of a row."""
        config, source = self.config, self.source
        own = config.loss_roles, config.loss_turns, config.split_turns, config.overlong, config.bad_rows
        return self.seq_len, self.vocab_size, sorted(source.columns.items()), source.holds_pairs, *own

    def open_rows(self) -> Rows:
        """Return the rows; makes what is missing in the cache.
        Raises SFTDataError: names the file and what is wrong."""
        return open_rows(self.source, self.found, self.cache, images=self.sees_images)

    def load_tokenizer(self) -> ChatTokenizer:
        """Return the model's tokenizer and the chosen template. Raises SFTDataError: there is none."""
        try:
            tokenizer = load_tokenizer(str(self.tokenizer), trust_remote_code=self.trust_remote_code)
        except (OSError, ValueError) as error:
            raise SFTDataError(f"no tokenizer in {self.tokenizer} ({error})") from error
        return ChatTokenizer(
            tokenizer,
            enable_thinking=self.enable_thinking,
            chat_template=self.config.chat_template,
            images=ImageTokens(self.tokenizer) if self.sees_images else None,
        )


class RowReader:
    """Row numbers to samples in this process."""

    def __init__(self, recipe: Recipe, rows: Rows | None = None, tokenizer: ChatTokenizer | None = None) -> None:
        self._rows = rows or recipe.open_rows()
        self._tokenizer = RowTokenizer(
            tokenizer or recipe.load_tokenizer(), recipe.source, recipe.config, recipe.seq_len, recipe.vocab_size
        )
        self._skip = recipe.config.bad_rows == "skip"

    def __call__(self, indices: Sequence[int]) -> list[RowResult]:
        """Compute the result of each row."""
        return [self._one(index) for index in indices]

    def _one(self, index: int) -> RowResult:
        try:
            result = self._tokenizer.row(self._rows.row(index), self._rows.folder(index))
        except DataChangedError as error:  # whatever `bad_rows` says: all further rows would be
            return RowResult([], RowCounts(rows=1), str(error))
        except (SFTDataError, UnicodeDecodeError) as error:  # it cannot even be read; Arrow: is no text
            skipped = self._skip
            result = RowResult([], RowCounts(rows=1, bad=int(skipped)), None if skipped else str(error))
        if result.error is None:
            return result
        return RowResult([], result.counts, f"{self._rows.where(index)}: {result.error}")

    def close(self) -> None:
        """Nothing to end."""


class RowProcesses:
    """Row numbers to samples in several processes."""

    def __init__(self, recipe: Recipe, num_workers: int) -> None:
        self._num_workers = num_workers
        self._pool = ProcessPoolExecutor(
            num_workers, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(recipe,)
        )

    def __call__(self, indices: Sequence[int]) -> list[RowResult]:
        """Compute the result of each row."""
        size = max(1, min(64, -(-len(indices) // (2 * self._num_workers))))
        parts = [list(indices[i : i + size]) for i in range(0, len(indices), size)]
        return [result for part in self._pool.map(_read, parts) for result in part]

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)


_reader: RowReader | None = None


def _begin(recipe: Recipe) -> None:
    """In a worker: open the data, and end when the rank does, however it ends."""
    global _reader
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the rank decides
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=watch, name="watch-rank", daemon=True).start()
    _reader = RowReader(recipe)


def _read(indices: list[int]) -> list[RowResult]:
    assert _reader is not None
    return _reader(indices)
