"""The endless, shuffled stream of samples, cut into steps, without ever holding the data set.

A step's samples depend on the stream alone, not on the number of ranks; so do the rows between two positions:

    epoch e = a permutation of the rows drawn from (seed, e)     8 bytes a row
    round   = the next rows in that order, rank r reads and tokenises every world_size-th of them
    gather  = lengths and errors of all (some bytes a row)
    batch   = samples in stream order, `batch_size` of them or as many as fit `batch_tokens`, packed on all ranks alike
    swap    = every sample's tokens go to the rank that trains it

A position is (row, sub): rows before `row` are used up, and `sub` samples of that one. It is saved with a checkpoint;
resuming tokenises from there on. Every row is used exactly once an epoch, whatever ends and resumes in between.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_hpc.store.batch.packing import pack, pack_by_number
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import build_rank_batch
from prime_hpc.trainer.data.messages import SFTDataError
from prime_hpc.trainer.data.samples import RowCounts, RowResult, SFTSample
from prime_hpc.trainer.rank_group import RankGroup

Tokenise = Callable[[Sequence[int]], list[RowResult]]
"""Row numbers -> what they give."""


@dataclass(frozen=True)
class Position:
    """The place in the stream at which a step ends, and what was seen until there."""

    row: int = 0
    sub: int = 0
    samples: int = 0
    counts: RowCounts = field(default_factory=RowCounts)


@dataclass(frozen=True)
class Batch:
    """One rank's part of one step."""

    ranked: RankBatch
    """`sample_ids` are row numbers in the data set."""
    position: Position
    """After it."""
    num_pad: int = 0
    """Tokens of all ranks that only fill rows."""
    fill: float = 1.0
    """Real tokens of all ranks over the room of their micro-batches."""


@dataclass(frozen=True)
class BatchShape:
    """How samples become steps and micro-batches."""

    batch_size: int
    batch_tokens: int | None
    micro_batch_tokens: int
    pack: bool = True
    rows: int = 1
    """`pack` off: samples of one micro-batch."""
    pad_multiple: int | None = None
    pad_id: int = 0
    mean_length: float = 512.0
    """Guess before a length is known."""


BARREN_ROWS = 1000
"""So many rows in a row that give no sample are said; then a stretch twice as long, and so on."""


@dataclass
class _Row:
    """Facts that all ranks know of a row with samples, or in error, that waits to be used."""

    place: int
    index: int
    lengths: list[int]
    sizes: list[int]
    """Bytes of each sample on its way to the rank that trains it."""
    splits: list[int]
    """Tokens of the first side of each sample, see `SFTSample.split`."""
    margins: list[float]
    """See `SFTSample.margin`."""
    before: RowCounts
    """Of the rows without samples between the last one that has any and this one."""
    counts: RowCounts
    error: str | None
    holder: int


class RowOrder:
    """Row numbers by place in the stream."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        self.num_rows = num_rows
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._rows = -1, np.zeros(0, np.int64)

    def row_at(self, place: int) -> int:
        """Return the row at a place of the stream; places of one epoch are `num_rows` apart from the next one's."""
        epoch, within = divmod(place, self.num_rows)
        return int(self._rows_of(epoch, within, within + 1)[0])

    def rows(self, start: int, stop: int) -> Iterator[NDArray[np.int64]]:
        """Yield the rows at the places from `start` to `stop`, those of an epoch at a time."""
        while start < stop:
            epoch, within = divmod(start, self.num_rows)
            end = min(stop - epoch * self.num_rows, self.num_rows)
            yield self._rows_of(epoch, within, end)
            start += end - within

    def _rows_of(self, epoch: int, begin: int, end: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(begin, end)
        if epoch != self._epoch:
            self._rows = np.random.default_rng([self._seed, epoch]).permutation(self.num_rows)
            self._epoch = epoch
        return self._rows[begin:end]


class MixedOrder(RowOrder):
    """Row numbers by place in a stream that takes a fixed share from each of several sources.

    An epoch holds the same number of rows of a source each time, in a shuffled order of sources; a source goes on where
    the epoch before left it, with a permutation of its own for every pass over it. So a place tells the row, whatever
    was read before.
    """

    def __init__(
        self, sizes: Sequence[int], probabilities: Sequence[float], *, until_all: bool, seed: int, shuffle: bool
    ) -> None:
        """Args:
        sizes: rows of each source; their numbers follow one another.
        probabilities: of each.
        until_all: an epoch ends when every source is used up once; else with the first one.
        seed, shuffle: as `RowOrder`'s.
        """
        lengths = [size / share for size, share in zip(sizes, probabilities, strict=True)]
        length = max(lengths) if until_all else min(lengths)
        self.counts = np.array([max(1, round(length * share)) for share in probabilities])
        """[sources] rows of an epoch."""
        super().__init__(int(self.counts.sum()), seed=seed, shuffle=shuffle)
        self._sizes, self._sources = sizes, np.zeros(0, np.int64)
        self._used = 0, 0 * self.counts  # a place, and the rows before it: an epoch's are not counted at every step

    def words(self, names: Sequence[str]) -> str:
        """Say what an epoch is made of."""
        each = zip(range(len(names)), names, self.counts.tolist(), self._sizes, strict=True)
        parts = [f"{i}: {name} {n / self.num_rows:.1%} ({n:,} of its {size:,} rows)" for i, name, n, size in each]
        return f"an epoch is {self.num_rows:,} rows, of {', '.join(parts)}"

    def used(self, place: int) -> NDArray[np.int64]:
        """Return how many rows of each source come before a place."""
        epoch, within = divmod(place, self.num_rows)
        self._rows_of(epoch, 0, within)  # and their sources
        first = epoch * self.num_rows
        begin, used = self._used if first <= self._used[0] <= place else (first, epoch * self.counts)
        used = used + np.bincount(self._sources[begin - first : within], minlength=len(self.counts))
        self._used = place, used
        return used

    def _rows_of(self, epoch: int, begin: int, end: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            spread = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
            turns = np.repeat(np.arange(len(self.counts)), self.counts)[np.argsort(spread, kind="stable")]
            self._sources = np.random.default_rng([self._seed, epoch, 0]).permutation(turns) if self._shuffle else turns
            self._rows = np.zeros(self.num_rows, np.int64)
            for source, (size, count) in enumerate(zip(self._sizes, self.counts.tolist(), strict=True)):
                own = self._own_rows(source, size, epoch * count, (epoch + 1) * count)
                self._rows[self._sources == source] = sum(self._sizes[:source]) + own
            self._epoch = epoch
        return self._rows[begin:end]

    def _own_rows(self, source: int, size: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return a source's rows from its own place `start` to `stop`, by numbers of its own."""
        passes = range(start // size, -(-stop // size))
        if self._shuffle:
            whole = [np.random.default_rng([self._seed, one, source + 1]).permutation(size) for one in passes]
        else:
            whole = [np.arange(size) for _ in passes]
        return np.concatenate(whole)[start - passes.start * size :][: stop - start]


class SampleStream:
    """Batches in order, on every rank alike. `next` and `agree` are collective over the ranks."""

    def __init__(
        self,
        tokenise: Tokenise,
        order: RowOrder,
        shape: BatchShape,
        ranks: RankGroup,
        *,
        share: int,
        num_shares: int,
        last_row: int | None = None,
    ) -> None:
        """Args:
        tokenise: reads and tokenises rows.
        share, num_shares: which data-parallel part this rank trains; ranks of one share get the same samples.
        last_row: end after that many rows; None: never.
        """
        self._tokenise, self._order, self._shape, self._ranks = tokenise, order, shape, ranks
        self._num_shares = num_shares
        self._shares: list[int] = ranks.gather_all(share)
        self.last_row = last_row
        self.start(Position())

    def start(self, position: Position) -> None:
        """Go on from a position."""
        self.position = position
        """After the batch made last."""
        self._next_row = position.row
        self._waiting: deque[_Row] = deque()
        self._held: dict[int, list[SFTSample]] = {}  # by place: the samples that this rank tokenised
        self._mean_length = self._shape.mean_length
        self._barren, self._num_barren, self._barren_told = RowCounts(), 0, BARREN_ROWS
        """Of the rows read last that gave no sample."""

    def agree(self, go_on: bool) -> bool:
        """Return whether every rank goes on."""
        return all(self._ranks.gather_all(go_on))

    def next(self) -> Batch | None:
        """Return the next step's batch; None after `last_row`.
        Raises SFTDataError: a row in it cannot be trained on, or no row of the data set gives a sample."""
        while (needed := self._needed()) > 0 and not self._is_read():
            self._read_round(needed)
        chosen = self._choose()
        if not chosen:
            return None
        lengths = np.array([self._waiting[row].lengths[sub] for row, sub in chosen], dtype=np.int64)
        batch = self._build(chosen, lengths)
        self._advance(chosen)
        return replace(batch, position=self.position)

    def _is_read(self) -> bool:
        """Return whether the stream ends with what waits."""
        return self.last_row is not None and self._next_row >= self.last_row

    def _needed(self) -> int:
        """How many rows to read at least before a batch is whole; 0: none, or an error comes first."""
        shape, count, tokens = self._shape, 0, 0
        for lengths in self._ahead():
            if lengths is None:
                return 0
            count, tokens = count + len(lengths), tokens + sum(lengths)
        if shape.batch_tokens is None:
            return max(0, shape.batch_size - count)
        return int((shape.batch_tokens - tokens) / self._mean_length) + 1 if tokens < shape.batch_tokens else 0

    def _ahead(self) -> list[list[int] | None]:
        """Lengths of the rows that wait, without what is used of the first; None where one is in error."""
        rows = [None if row.error is not None else row.lengths for row in self._waiting]
        if rows and rows[0] is not None:
            rows[0] = rows[0][self.position.sub :]
        return rows

    def _read_round(self, needed: int) -> None:
        """Tokenise the next rows together."""
        stop = self._next_row + needed
        if self.last_row is not None:
            stop = min(stop, self.last_row)
        rank, size = self._ranks.rank, self._ranks.world_size
        own = range(self._next_row + rank, stop, size)
        indices = [self._order.row_at(place) for place in own]
        results = self._tokenise(indices)
        for place, result in zip(own, results, strict=True):
            if result.samples:
                self._held[place] = result.samples
        measured = [[(len(s.token_ids), s.num_bytes, s.split, s.margin) for s in made.samples] for made in results]
        told = [
            (index, measures, result.counts, result.error)
            for index, measures, result in zip(indices, measured, results, strict=True)
        ]
        gathered = self._ranks.gather_all(told)
        for place in range(self._next_row, stop):
            holder, turn = (place - self._next_row) % size, (place - self._next_row) // size
            index, measures, counts, error = gathered[holder][turn]
            if not measures and error is None:
                self._barren, self._num_barren = self._barren + counts, self._num_barren + 1
                continue
            lengths, sizes, splits = ([int(measure[i]) for measure in measures] for i in range(3))
            margins = [measure[3] for measure in measures]
            row = _Row(place, index, lengths, sizes, splits, margins, self._barren, counts, error, holder)
            self._waiting.append(row)
            self._barren, self._num_barren = RowCounts(), 0
        self._next_row = stop
        lengths = [n for row in self._waiting for n in row.lengths]
        if lengths:
            self._mean_length = max(1.0, sum(lengths) / len(lengths))
        self._check_barren()

    def _check_barren(self) -> None:
        """Raise SFTDataError where no row gives a sample; what is wrong with a row that waits is told in its turn."""
        seen = replace(self._barren, rows=self._num_barren).left_out()
        # of two epochs' rows one epoch is whole; fewer may be the end of one and the beginning of the next
        if self._num_barren >= 2 * self._order.num_rows and self.last_row is None and not self._waiting:
            raise SFTDataError(f"no row of the data set can be trained on: {seen}")
        if self._num_barren >= self._barren_told:
            self._barren_told = 2 * self._num_barren
            if self._ranks.rank == 0:
                logger.warning(f"a stretch of rows that gave no sample: {seen}")

    def _choose(self) -> list[tuple[int, int]]:
        """(place in the queue, sample of that row) of the next batch."""
        shape, tokens = self._shape, 0
        chosen: list[tuple[int, int]] = []
        for number, row in enumerate(self._waiting):
            if row.error is not None:
                if chosen and shape.batch_tokens is not None and tokens >= shape.batch_tokens:
                    break
                raise SFTDataError(row.error)
            for sub in range(self.position.sub if number == 0 else 0, len(row.lengths)):
                if shape.batch_tokens is not None:
                    tokens += row.lengths[sub]
                    if chosen and tokens > shape.batch_tokens:
                        return chosen
                elif len(chosen) == shape.batch_size:
                    return chosen
                chosen.append((number, sub))
                if shape.batch_tokens is None and len(chosen) == shape.batch_size:
                    return chosen
        return chosen

    def _assign(self, lengths: NDArray[np.int64]) -> list[list[list[int]]]:
        """For each share its micro-batches, each a list of samples."""
        if not len(lengths):
            return [[[]] for _ in range(self._num_shares)]
        if self._shape.pack:
            shares = pack(lengths, self._num_shares, self._shape.micro_batch_tokens)
        else:
            shares = pack_by_number(lengths, self._num_shares, self._shape.rows)
        return [[micro.tolist() for micro in micros] for micros in shares]

    def _padded(self, length: int) -> int:
        multiple = self._shape.pad_multiple
        return length if multiple is None else -(-length // multiple) * multiple

    def _build(self, chosen: list[tuple[int, int]], lengths: NDArray[np.int64]) -> Batch:
        """Return this rank's part of the batch."""
        shares = self._assign(lengths)
        share_of = {sample: share for share, micros in enumerate(shares) for micro in micros for sample in micro}
        tokens = self._swap(chosen, lengths, share_of)
        micros = shares[self._shares[self._ranks.rank]]
        of_micros: list[list[int]] = []
        rows: list[int] = []
        ids: list[NDArray[np.int32]] = []
        masks: list[NDArray[np.bool_]] = []
        images: list[tuple[NDArray[np.int32], tuple[bytes, ...]]] = []
        for micro in micros:
            of_micros.append([])
            for sample, side in ((number, side) for number in micro for side in tokens[number].sides()):
                fill = self._padded(len(side.token_ids)) - len(side.token_ids)
                of_micros[-1].append(len(ids))
                ids.append(np.append(side.token_ids, np.full(fill, self._shape.pad_id, np.int32)))
                masks.append(np.append(side.loss_mask, np.zeros(fill, bool)))
                numbers = side.images
                shown = np.zeros(0, np.int32) if numbers is None else np.append(numbers, np.zeros(fill, np.int32))
                images.append((shown, side.image_data))
                rows.append(self._waiting[chosen[sample][0]].index)
        ranked = build_rank_batch(of_micros, ids, masks, images=images)
        numbered = np.array(rows, dtype=np.int64)
        ranked = replace(ranked, sample_ids=numbered, group_ids=numbered.copy())
        margins = [self._waiting[row].margins[sub] for row, sub in chosen]
        if any(margins):
            own = [above for micro in micros for sample in micro for above in (margins[sample], 0.0)]
            ranked = replace(ranked, reference_sums=np.array(own))
        splits = [self._waiting[row].splits[sub] for row, sub in chosen]
        sides = [n for length, split in zip(lengths.tolist(), splits, strict=True) for n in (split, length - split)]
        total, padded = int(lengths.sum()), sum(self._padded(n) for n in sides)
        room = len(shares) * len(shares[0]) * self._shape.micro_batch_tokens if self._shape.pack else padded
        return Batch(ranked, self.position, padded - total, total / max(room, 1))

    def _swap(
        self, chosen: list[tuple[int, int]], lengths: NDArray[np.int64], share_of: dict[int, int]
    ) -> dict[int, SFTSample]:
        """Return the samples of this rank's share, from the ranks that tokenised them."""
        ranks = self._ranks
        local_share = self._shares[ranks.rank]
        sent: list[list[NDArray[np.uint8]]] = [[np.zeros(0, np.uint8)] for _ in range(self._num_shares)]
        coming: list[list[int]] = [[] for _ in range(ranks.world_size)]
        for i, (row, sub) in enumerate(chosen):
            holder = self._waiting[row].holder
            if holder == ranks.rank:
                sent[share_of[i]].append(self._held[self._waiting[row].place][sub].packed())
            if share_of[i] == local_share:
                coming[holder].append(i)
        by_share = [np.concatenate(parts) for parts in sent]
        size = [self._waiting[row].sizes[sub] for row, sub in chosen]
        sizes = [sum(size[i] for i in samples) for samples in coming]
        received = ranks.swap([by_share[share] for share in self._shares], sizes)
        samples: dict[int, SFTSample] = {}
        for data, those in zip(received, coming, strict=True):
            at = 0
            for i in those:
                row, sub = chosen[i]
                split = self._waiting[row].splits[sub]
                samples[i] = SFTSample.unpacked(data[at : at + size[i]], int(lengths[i]), split)
                at += size[i]
        return samples

    def _advance(self, chosen: list[tuple[int, int]]) -> None:
        """Forget what is used up."""
        number, sub = chosen[-1]
        last, position = self._waiting[number], self.position
        is_used = sub + 1 == len(last.lengths)
        counts = position.counts
        for _ in range(number + is_used):
            row = self._waiting.popleft()
            counts += row.before + row.counts
            self._held.pop(row.place, None)
        if is_used:
            place, left = last.place + 1, 0
        else:
            place, left = last.place, sub + 1
            counts += last.before
            last.before = RowCounts()
        self.position = Position(place, left, position.samples + len(chosen), counts)
