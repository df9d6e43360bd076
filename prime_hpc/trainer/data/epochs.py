"""How many steps `sft.data.num_epochs` comes to: every row is tokenised once, and the stream's cuts are made with the
lengths alone. The lengths are kept in the cache directory: a resumed run, another number of epochs and the runs of a
sweep find them there.
"""

import math
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_hpc import __version__
from prime_hpc.config.sections.sft import COLUMNS
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.new_file import new_file
from prime_hpc.trainer.data.messages import SFTDataError
from prime_hpc.trainer.data.samples import RowCounts
from prime_hpc.trainer.data.sources import Rows, fingerprint_of
from prime_hpc.trainer.data.stream import BatchShape, Position, RowOrder, Tokenise
from prime_hpc.trainer.data.workers import Recipe
from prime_hpc.trainer.rank_group import RankGroup

_ROUND = 256
"""Rows that each rank tokenises between two exchanges; long texts of so many are in memory at once."""
_TELL_S = 60.0


@dataclass(frozen=True)
class Lengths:
    """Tokens of every sample of a data set."""

    counts: NDArray[np.int64]
    """[rows] samples of each row."""
    tokens: NDArray[np.int64]
    """[samples] in the order of the rows."""


class StoppedCountingError(Exception):
    """The run is to end before all rows are counted."""


def last_row_of(num_epochs: float, num_rows: int) -> int:
    """Return the place in the stream at which so many passes end."""
    return max(1, round(num_epochs * num_rows))


def count_steps(lengths: Lengths, order: RowOrder, shape: BatchShape, begin: Position, last_row: int) -> int:
    """Return how many steps `SampleStream` makes from a position on until it has used `last_row` rows."""
    if shape.batch_tokens is None:
        samples = sum(int(lengths.counts[rows].sum()) for rows in order.rows(begin.row, last_row)) - begin.sub
        return math.ceil(max(0, samples) / shape.batch_size)
    starts = np.concatenate([[0], np.cumsum(lengths.counts)])
    steps, room, skipped = 0, 0, begin.sub
    for rows in order.rows(begin.row, last_row):
        for row in rows:
            for tokens in lengths.tokens[starts[row] + skipped : starts[row + 1]].tolist():
                if tokens > room:
                    steps, room = steps + 1, shape.batch_tokens
                room -= tokens
            skipped = 0
    return steps


def lengths_of(
    recipe: Recipe,
    rows: Rows,
    made_by: int,
    tokenise: Tokenise,
    ranks: RankGroup,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Lengths | None:
    """Return the lengths on rank 0, None elsewhere. Collective.

    Args:
        recipe: the rows' source, and what is made of them.
        made_by: fingerprint of tokenizer and template.
        is_stopped: whether the run is to end, asked on rank 0 while rows are counted.

    Raises:
        StoppedCountingError: so it is.
        SFTDataError: a row cannot be trained on (names the first one), or none gives a sample.
    """
    kept = _kept_at(recipe, rows, made_by)
    lengths = _read(kept) if ranks.rank == 0 else None
    if not ranks.broadcast(lengths is not None):
        lengths = _count(recipe.source.label, rows.num_rows, tokenise, ranks, is_stopped)
        if lengths is not None:
            try:
                with new_file(kept, durable=False) as partial:
                    np.savez(partial, counts=lengths.counts, tokens=lengths.tokens)
            except (StoreError, OSError) as error:  # a folder of others, or a full one: the next run counts again
                logger.warning(f"the lengths of all rows are not kept: {error}")
    return lengths


def _count(
    label: str, num_rows: int, tokenise: Tokenise, ranks: RankGroup, is_stopped: Callable[[], bool]
) -> Lengths | None:
    """Tokenise all rows, each rank its share of each round."""
    if ranks.rank == 0:
        logger.info(f"sft.data.num_epochs: {num_rows:,} rows are tokenised once, to count the steps")
    counts: list[NDArray[np.int64]] = []
    tokens: list[NDArray[np.int64]] = []
    seen, is_barren = RowCounts(), True
    told = time.monotonic()
    for first in range(0, num_rows, _ROUND * ranks.world_size):
        if ranks.rank == 0 and time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            logger.info(f"{first:,} of {num_rows:,} rows are tokenised")
        if ranks.broadcast(ranks.rank == 0 and is_stopped()):
            raise StoppedCountingError
        begin = min(num_rows, first + ranks.rank * _ROUND)
        results = tokenise(range(begin, min(num_rows, begin + _ROUND)))
        error = next((result.error for result in results if result.error is not None), None)
        own = [len(result.samples) for result in results]
        made = [len(sample.token_ids) for result in results for sample in result.samples]
        found = sum((result.counts for result in results), RowCounts())
        gathered = ranks.gather_all((np.array(own, np.int64), np.array(made, np.int64), found, error))
        if said := next((said for *_, said in gathered if said is not None), None):
            raise SFTDataError(said)
        seen = sum((part for _, _, part, _ in gathered), seen)
        is_barren = is_barren and not any(len(part) for _, part, *_ in gathered)
        counts += [part for part, *_ in gathered if ranks.rank == 0]
        tokens += [part for _, part, *_ in gathered if ranks.rank == 0]
    if is_barren:
        raise SFTDataError(f"{label}: no row can be trained on: {seen.left_out()}")
    return Lengths(np.concatenate(counts), np.concatenate(tokens)) if ranks.rank == 0 else None


def _kept_at(recipe: Recipe, rows: Rows, made_by: int) -> Path:
    """Return the cache's file: of these rows, and of all that decides what becomes of them."""
    looks: Callable[[Path], tuple[int, int]] = lambda path: (path.stat().st_size, path.stat().st_mtime_ns)  # noqa: E731
    key = fingerprint_of(
        __version__,
        COLUMNS,
        rows.fingerprint,
        *(looks(path) for path in recipe.found.files),
        made_by,
        *recipe.makes,
    )
    return recipe.cache / f"lengths-{key:016x}.npz"


def _read(path: Path) -> Lengths | None:
    try:
        with np.load(path) as kept:
            return Lengths(kept["counts"], kept["tokens"])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):  # not made yet, or broken: it is made again
        return None
