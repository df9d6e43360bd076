"""Log-probabilities of all pairs under the weights that training begins with, computed once, before the first step.

    rows that will be trained and evaluated -> one forward pass each -> <run>/reference.npz -> every batch

They do not change while training does, so the reference takes no memory beside the policy, and no time in a step. The
file stays with the run: a resumed run compares with the same numbers to the last bit, on however many ranks. What it
does not hold yet (a pass that was interrupted, a run that is made longer, a row that reads otherwise now) is computed
before a checkpoint is loaded, while the policy has those weights still; under an adapter the adapter is left out.
"""

import time
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash
from loguru import logger
from numpy.typing import NDArray

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.io.new_file import new_file
from prime_hpc.store.model.fingerprint import weights_fingerprint
from prime_hpc.trainer.data.messages import SFTDataError
from prime_hpc.trainer.data.sources import Rows, fingerprint_of
from prime_hpc.trainer.data.workers import Recipe
from prime_hpc.trainer.objectives.preference import side_sums
from prime_hpc.trainer.parallel.distribute import reshard_all
from prime_hpc.trainer.rank_group import OF_FILES

if TYPE_CHECKING:
    from prime_hpc.trainer.trainer import Trainer

_KEEP_S, _TELL_S = 600.0, 60.0


class References:
    """The log-probabilities, float64[rows, 3] of every source of rows: both sides' sums, and of which tokens they are
    (`_contents`); NaN where none is known."""

    def __init__(self, file: Path, model: Path) -> None:
        """Read what a run's file holds: nothing where there is none, or a broken one.

        Args:
            model: directory of the starting weights.

        Raises:
            OSError: it cannot be read now.
        """
        self._file, self._weights = file, weights_fingerprint(model)
        self._tables: dict[str, NDArray[np.float64]] = {}
        self.is_changed = False
        """Something was noted that `write` has not kept."""
        try:
            with np.load(file) as kept:
                self._tables = dict(kept)
        except FileNotFoundError:
            pass
        except (ValueError, zipfile.BadZipFile, EOFError) as error:
            logger.warning(f"{file} cannot be read ({error}): it is computed again")

    def table(self, recipe: Recipe, rows: Rows, made_by: int) -> NDArray[np.float64]:
        """Return the table of a source's rows, of what makes samples of them, and of the weights.
        `made_by`: fingerprint of tokenizer and template."""
        key = fingerprint_of(rows.fingerprint, made_by, *recipe.makes, self._weights)
        return self._tables.setdefault(f"{key:016x}", np.full((rows.num_rows, 3), np.nan))

    def has_all(self, mark: int, row: int, step: int) -> bool:
        """Return whether all that comes from a place in the stream of rows on is known, and so need not be tokenised to
        be compared. `mark`: of the stream, its end and its files; `step`: done there, fewer of which are left then."""
        seen = self._tables.get(self._note(mark))
        return seen is not None and bool((seen <= (row, step)).all())

    def note_all(self, mark: int, row: int, step: int) -> None:
        """Note that it is, see `has_all`."""
        self._tables[self._note(mark)], self.is_changed = np.array([row, step], np.float64), True

    def _note(self, mark: int) -> str:
        return f"read-{mark:016x}-{self._weights}"

    def write(self) -> None:
        """Keep it. Raises StoreError: the disk is full, not writable or broken."""
        with new_file(self._file) as partial:
            np.savez(partial, **self._tables)  # type: ignore[arg-type]  # numpy's stub takes the names for its option


def attach(batch: RankBatch, table: NDArray[np.float64]) -> RankBatch:
    """Return a batch of pairs with the reference's sums. Raises SFTDataError: those of a row are not known."""
    rows = batch.sample_ids[::2]
    if missing := rows[_lacks(table, batch)].tolist():
        raise SFTDataError(
            f"row {missing[0] + 1} has no reference log-probability: do the data change meanwhile? If they do no more, "
            "delete the run's reference.npz: the next attempt computes all of them"
        )
    return replace(batch, reference_sums=table[rows, :2].ravel())


def _contents(batch: RankBatch) -> NDArray[np.float64]:
    """[rows], of each pair a number that says what its tokens are: other data may have lines as long as these."""
    parts = [slice(*ends) for ends in pairwise(batch.seq_offsets[::2].tolist())]
    texts = (batch.token_ids[part].tobytes() + batch.loss_mask[part].tobytes() for part in parts)
    return np.array([xxhash.xxh3_64_intdigest(text) >> 12 for text in texts], np.float64)  # 52 bits: exact


def _lacks(table: NDArray[np.float64], batch: RankBatch) -> NDArray[np.bool_]:
    """[rows], whether a table has nothing of a pair as it is tokenised now."""
    return table[batch.sample_ids[::2], 2] != _contents(batch)


def fill(
    trainer: "Trainer", references: References, wanted: Sequence[tuple[NDArray[np.float64], Iterable[RankBatch]]]
) -> bool:
    """Compute what tables lack, and keep it. Collective.

    Args:
        wanted: tables, and this rank's parts of the batches of each.

    Returns:
        whether it is done: False where the supervisor publishes "stop" before.

    Raises:
        StoreError: the file cannot be written.
        SFTDataError: a row cannot be trained on.
    """
    ranks, is_new, goes_on = trainer.control, False, True
    kept = told = time.monotonic()
    for table, batch in ((table, batch) for table, batches in wanted for batch in batches):
        if any(ranks.gather_all(bool(_lacks(table, batch).any()))):
            if not is_new:
                trainer.status.ready(step=0, world_size=trainer.world_size, idle=True)  # no step stands still
                logger.info("the log-probabilities of all pairs under the starting weights are computed once")
            is_new = True
            for rows, sums in ranks.gather_all(_sums_of(trainer, batch)):
                lacks = table[rows, 2] != sums[:, 2]  # what is known stays as it is, to the last bit
                table[rows[lacks]] = sums[lacks]
        now = time.monotonic()
        goes_on, is_due = ranks.broadcast((trainer.bus.latest("stop") is None, now - kept > _KEEP_S))
        if not goes_on:
            break
        if is_due and is_new:
            ranks.from_first(references.write, OF_FILES)
            kept = now
        if now - told > _TELL_S:
            trainer.status.ready(step=0, world_size=trainer.world_size, idle=True)  # also where all is known, and read
            logger.info(f"{np.count_nonzero(~np.isnan(table[:, 0])):,} of {len(table):,} rows have theirs")
            told = now
    if is_new or references.is_changed:
        ranks.from_first(references.write, OF_FILES)
    return goes_on


@torch.no_grad()
def _sums_of(trainer: "Trainer", batch: RankBatch) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Row numbers of this rank's part of a batch, and what a table holds of them, float64[rows, 3]."""
    step = trainer.train_step
    laid_out, adapters, found = step.lay_out(batch), step.policy.adapters, [np.zeros((0, 2))]
    with adapters.off() if adapters is not None else nullcontext():
        for i in range(laid_out.num_micro_batches):
            micro = step.micro_batch(laid_out, i)
            with step.policy.packing(micro):
                logprobs, _ = step.policy(micro)
            found.append(side_sums(micro, logprobs).cpu().numpy())
    reshard_all(step.policy)
    return laid_out.sample_ids[::2], np.column_stack([np.concatenate(found), _contents(laid_out)])
