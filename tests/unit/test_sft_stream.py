"""The stream of samples: every row once an epoch, the same steps for any number of ranks and from any position."""

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from loguru import logger

from prime_hpc.config.sections.sft import SFTDataConfig
from prime_hpc.store.dataset.files import find_data
from prime_hpc.trainer import sft
from prime_hpc.trainer.data.epochs import Lengths, StoppedCountingError, count_steps, last_row_of, lengths_of
from prime_hpc.trainer.data.messages import SFTDataError
from prime_hpc.trainer.data.prefetch import Prefetcher
from prime_hpc.trainer.data.samples import RowCounts, RowResult, SFTSample
from prime_hpc.trainer.data.stream import Batch, BatchShape, MixedOrder, Position, RowOrder, SampleStream
from prime_hpc.trainer.data.workers import Recipe
from prime_hpc.trainer.rank_group import RankGroup

NUM_ROWS = 22
SHAPE = BatchShape(batch_size=5, batch_tokens=None, micro_batch_tokens=16)


class Peers:
    """Several ranks as threads of this process."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=20)
        self.slots: list[Any] = [None] * size

    def share(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


class ThreadRanks(RankGroup):
    """Ranks that are threads."""

    def __init__(self, peers: Peers, rank: int) -> None:
        self._peers, self.rank, self.world_size = peers, rank, peers.size

    def gather_all(self, value: Any) -> list[Any]:
        return self._peers.share(self.rank, value)

    def broadcast(self, value: Any) -> Any:
        return self.gather_all(value)[0]

    def swap(self, outgoing: Sequence[Any], incoming: Sequence[int]) -> list[Any]:
        received = [sent[self.rank] for sent in self.gather_all(list(outgoing))]
        assert [len(r) for r in received] == list(incoming)
        return received


def tokenise(indices: Sequence[int]) -> list[RowResult]:
    """Row i gives i % 3 samples (none, one or two) of 3 .. 7 tokens that spell its number; row 17 is too long."""
    results = []
    for i in indices:
        if i == 17:
            results.append(RowResult([], RowCounts(rows=1, overlong=1)))
            continue
        made = [
            SFTSample(np.full(3 + (i + s) % 5, 10 * i + s, np.int32), np.arange(3 + (i + s) % 5) > 0)
            for s in range(i % 3)
        ]
        results.append(RowResult(made, RowCounts(rows=1)))
    return results


def one_stream(
    shape: BatchShape = SHAPE, *, make: Any = tokenise, shuffle: bool = True, **options: Any
) -> SampleStream:
    order = RowOrder(NUM_ROWS, seed=3, shuffle=shuffle)
    options = {"share": 0, "num_shares": 1} | options
    return SampleStream(make, order, shape, options.pop("ranks", None) or RankGroup(10), **options)


def tokens_of(batches: list[Batch]) -> list[list[int]]:
    """The samples of a step, each as its tokens, whatever rank and micro-batch holds them."""
    found = []
    for batch in batches:
        ranked = batch.ranked
        for a, b in zip(ranked.seq_offsets[:-1], ranked.seq_offsets[1:], strict=True):
            assert not ranked.loss_mask[a] and ranked.loss_mask[a + 1 : a + 3].all()
            found.append(ranked.token_ids[a:b].tolist())
    return sorted(found)


def steps(count: int, num_ranks: int, shape: BatchShape = SHAPE, start: Position | None = None, shares: int = 0) -> Any:
    """(samples of each step, position after each) over `num_ranks` threads."""
    peers, made = Peers(num_ranks), [[] for _ in range(num_ranks)]  # type: ignore[var-annotated]
    num_shares = shares or num_ranks

    def run(rank: int) -> None:
        stream = one_stream(shape, ranks=ThreadRanks(peers, rank), share=rank % num_shares, num_shares=num_shares)
        stream.start(start or Position())
        made[rank] = [stream.next() for _ in range(count)]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert all(len(batches) == count for batches in made)
    by_step = list(zip(*made, strict=True))
    assert all(len({b.ranked.num_micro_batches for b in ranks}) == 1 for ranks in by_step)
    assert all(len({b.position for b in ranks}) == 1 for ranks in by_step)
    for ranks in by_step[: 1 if not shape.pack else None]:
        for b in ranks if shape.pack else ():
            sizes = [
                b.ranked.tokens_of(m).stop - b.ranked.tokens_of(m).start for m in range(b.ranked.num_micro_batches)
            ]
            assert max(sizes, default=0) <= shape.micro_batch_tokens
    return [tokens_of(list(ranks[:num_shares])) for ranks in by_step], [ranks[0].position for ranks in by_step]


EPOCH = sorted(s.token_ids.tolist() for r in tokenise(range(NUM_ROWS)) for s in r.samples)


def test_every_row_is_used_once_an_epoch() -> None:
    samples, positions = steps(len(EPOCH), 1)  # as many steps of 5 as an epoch has samples: 5 epochs
    flat = [s for step in samples for s in step]
    assert sorted(flat) == sorted(5 * EPOCH) and len(EPOCH) % 5
    within = flat[: len(EPOCH) // 5 * 5]
    assert all(within.count(s) == 1 for s in within)
    assert all(len(step) == 5 for step in samples) and samples[0] != samples[len(EPOCH) // 5 + 1]
    assert positions[-1].samples == 5 * len(samples)
    assert positions[-1].counts.rows == positions[-1].row and positions[-1].counts.overlong in (4, 5)


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        replace(SHAPE, pack=False),
        replace(SHAPE, batch_tokens=31),
    ],
)
def test_steps_are_the_same_for_any_number_of_ranks_and_from_any_position(shape: BatchShape) -> None:
    samples, positions = steps(9, 1, shape)
    for num_ranks in (2, 3):
        assert steps(9, num_ranks, shape) == (samples, positions)
    for done in (1, 4, 7):
        rest = steps(9 - done, 2, shape, positions[done - 1])
        assert rest == (samples[done:], positions[done:])
    if shape.batch_tokens:
        sizes = [sum(map(len, step)) for step in samples]
        assert max(sizes) <= 31 and min(sizes) > 31 - 7


def test_ranks_of_one_share_train_the_same() -> None:
    """Four processes, two data-parallel shares: what tensor- or context-parallel ranks need."""
    assert steps(4, 4, shares=2) == steps(4, 1)


def test_rows_without_packing_hold_one_sample_and_may_be_filled() -> None:
    shape = replace(SHAPE, pack=False, pad_multiple=8, pad_id=9)
    plain, padded = one_stream(replace(SHAPE, pack=False)).next(), one_stream(shape).next()
    assert plain is not None and padded is not None
    assert set(np.diff(padded.ranked.seq_offsets)) == {8} and set(np.diff(padded.ranked.micro_offsets)) == {1}
    assert padded.num_pad == padded.ranked.num_tokens - plain.ranked.num_tokens > 0
    real = padded.ranked.loss_mask
    assert padded.ranked.token_ids[real].tolist() == plain.ranked.token_ids[plain.ranked.loss_mask].tolist()
    assert padded.fill == plain.ranked.num_tokens / padded.ranked.num_tokens and plain.fill == 1


def test_one_pass_ends_with_what_is_left() -> None:
    stream = one_stream(shuffle=False, last_row=8)
    batches = []
    while (batch := stream.next()) is not None:
        batches.append(batch)
    assert tokens_of(batches) == sorted(s.token_ids.tolist() for r in tokenise(range(8)) for s in r.samples)


@pytest.mark.parametrize("num_epochs", [0.3, 1, 2.5, 3])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, batch_tokens=31), replace(SHAPE, batch_tokens=9)])
def test_steps_of_epochs_are_counted_as_the_stream_makes_them(
    shape: BatchShape, shuffle: bool, num_epochs: float
) -> None:
    last_row = last_row_of(num_epochs, NUM_ROWS)
    made = tokenise(range(NUM_ROWS))
    lengths = Lengths(
        np.array([len(r.samples) for r in made]), np.array([len(s.token_ids) for r in made for s in r.samples])
    )
    stream, positions = one_stream(shape, shuffle=shuffle, last_row=last_row), [Position()]
    while (batch := stream.next()) is not None:
        positions.append(batch.position)
    order = RowOrder(NUM_ROWS, seed=3, shuffle=shuffle)
    left = [count_steps(lengths, order, shape, position, last_row) for position in positions]
    assert left == list(reversed(range(len(positions))))
    if num_epochs == 3:
        assert positions[-1].samples == 3 * len(EPOCH)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("until_all", [True, False])
def test_a_mixture_has_its_shares_and_uses_rows_evenly(shuffle: bool, until_all: bool) -> None:
    sizes, shares = [40, 10, 25], [0.5, 0.3, 0.2]

    def new() -> MixedOrder:
        return MixedOrder(sizes, shares, until_all=until_all, seed=3, shuffle=shuffle)

    order = new()
    assert order.counts.tolist() == ([62, 38, 25] if until_all else [17, 10, 7])
    stream = [order.row_at(place) for place in range(5 * order.num_rows)]
    assert all(new().row_at(place) == stream[place] for place in (0, 7, 3 * order.num_rows, 150))  # from anywhere
    assert np.concatenate(list(order.rows(3, len(stream) - 2))).tolist() == stream[3:-2]
    first = 0
    for source, size in enumerate(sizes):
        own = [row for row in stream if first <= row < first + size]
        assert len(own) == 5 * order.counts[source]
        used = [own.count(row) for row in range(first, first + size)]
        assert max(used) - min(used) <= 1
        if len(own) >= size:
            assert sorted(own[:size]) == list(range(first, first + size))
        place = order.num_rows + 9
        for at in (place, place + 5, place + 5, 3, 2 * order.num_rows, 2 * order.num_rows + 7, place):
            assert order.used(at)[source] == sum(first <= row < first + size for row in stream[:at])
        first += size
    near = np.mean([row < 40 for row in stream[:30]])  # spread from the beginning on
    assert 0.2 < near < 0.8 if shuffle else near == pytest.approx(0.5, abs=0.05)


def test_lengths_of_a_data_set_are_counted_by_all_ranks_and_kept(tmp_path: Path) -> None:
    rows = [{"prompt": f"row {i}", "completion": "x" * (i % 7)} for i in range(5)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    source = SFTDataConfig(path=str(file))
    recipe = Recipe(source, source, find_data(source), tmp_path / "cache", tmp_path, False, False, 64, 100)
    opened = recipe.open_rows()
    peers, found = Peers(2), {}

    def count(rank: int, make: Any = tokenise, made_by: int = 1) -> None:
        found[rank] = lengths_of(recipe, opened, made_by, make, ThreadRanks(peers, rank))

    def on_both(*arguments: Any) -> Any:
        threads = [threading.Thread(target=count, args=(rank, *arguments), daemon=True) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
        return found.pop(0), found.pop(1)

    first, other = on_both()
    assert first.counts.tolist() == [0, 1, 2, 0, 1] and first.tokens.tolist() == [4, 5, 6, 7] and other is None
    again, _ = on_both(None)  # nothing is tokenised
    assert again.tokens.tolist() == first.tokens.tolist()
    with pytest.raises(TypeError):
        lengths_of(recipe, opened, 2, cast(Any, None), RankGroup(10))  # another template
    elsewhere = replace(recipe, cache=file / "no_folder")  # no lengths are kept, and the run goes on
    uncached = lengths_of(elsewhere, opened, 1, tokenise, RankGroup(10))
    assert uncached is not None and uncached.tokens.tolist() == first.tokens.tolist()
    bad = lambda indices: [RowResult([], RowCounts(rows=1), f"row {i} is bad") for i in indices]  # noqa: E731
    with pytest.raises(SFTDataError, match="row 0 is bad"):
        lengths_of(recipe, opened, 3, bad, RankGroup(10))
    with pytest.raises(StoppedCountingError):
        lengths_of(recipe, opened, 5, cast(Any, None), RankGroup(10), is_stopped=lambda: True)
    none = lambda indices: [RowResult([], RowCounts(rows=1, overlong=1)) for _ in indices]  # noqa: E731
    with pytest.raises(SFTDataError, match=r"no row can be trained on: of 5 rows so far: 5 longer than seq_len"):
        lengths_of(recipe, opened, 4, none, RankGroup(10))


def test_a_bad_row_is_said_when_its_step_comes_not_before() -> None:
    def make(indices: Sequence[int]) -> list[RowResult]:
        bad = RowResult([], RowCounts(rows=1), "rows.jsonl:12: not JSON")
        return [bad if i == 11 else r for i, r in zip(indices, tokenise(indices), strict=True)]

    stream = one_stream(make=make, shuffle=False)
    whole = one_stream(shuffle=False)
    for _ in range(2):  # rows 0 .. 10 give 10 samples
        got, wanted = stream.next(), whole.next()
        assert got is not None and wanted is not None and tokens_of([got]) == tokens_of([wanted])
    with pytest.raises(SFTDataError, match=r"rows\.jsonl:12"):
        stream.next()


def test_a_data_set_without_a_usable_row_is_an_error_not_an_endless_loop() -> None:
    stream = one_stream(make=lambda rows: [RowResult([], RowCounts(rows=1, untrained=1)) for _ in rows])
    with pytest.raises(SFTDataError, match=r"can be trained on: of 45 rows so far: 45 without anything to train"):
        stream.next()


def test_rows_without_samples_are_counted_when_they_are_passed_and_are_said_where_they_are_many() -> None:
    counts = [result.counts for result in tokenise(range(NUM_ROWS))]
    stream, order = one_stream(), RowOrder(NUM_ROWS, seed=3, shuffle=True)
    for _ in range(20):
        stream.next()
        passed = [counts[order.row_at(place)] for place in range(stream.position.row)]
        assert stream.position.counts == sum(passed, RowCounts())

    def few(rows: Sequence[int]) -> list[RowResult]:
        return tokenise([1 if row == 4500 else 17 for row in rows])

    said: list[str] = []
    sink = logger.add(said.append, format="{message}")
    sparse = SampleStream(few, RowOrder(5000, seed=3, shuffle=False), SHAPE, RankGroup(10), share=0, num_shares=1)
    sparse.next()
    logger.remove(sink)
    assert sparse.position.row == 4 * 5000 + 4501 and sparse.position.counts.rows == sparse.position.row
    assert len(said) == 3 and ": 1,000 longer than seq_len" in said[0] and ": 4,000 longer" in said[2], said


@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_where_every_row_is_in_error_the_first_ones_reason_is_said(num_rows: int) -> None:
    bad = RowResult([], RowCounts(rows=1), "rows.jsonl:1: breaks the prefix property")
    none = RowResult([], RowCounts(rows=1, untrained=1))

    for other in (bad, none):
        order = RowOrder(num_rows, seed=3, shuffle=True)
        make = lambda indices, other=other: [bad if i == 0 else other for i in indices]  # noqa: E731
        stream = SampleStream(make, order, replace(SHAPE, batch_size=64), RankGroup(10), share=0, num_shares=1)
        with pytest.raises(SFTDataError, match=r"rows\.jsonl:1: breaks"):
            stream.next()


def test_the_end_of_an_epoch_and_the_beginning_of_the_next_are_no_whole_epoch() -> None:
    """One usable row of twelve: shuffled, it may come early in one epoch and late in the next."""
    usable = RowResult([SFTSample(np.arange(4, dtype=np.int32), np.arange(4) > 0)], RowCounts(rows=1))
    none = RowResult([], RowCounts(rows=1, untrained=1))

    def make(indices: Sequence[int]) -> list[RowResult]:
        return [none if i else usable for i in indices]

    stream = SampleStream(make, RowOrder(12, seed=3, shuffle=True), SHAPE, RankGroup(10), share=0, num_shares=1)
    for _ in range(8):
        batch = stream.next()
        assert batch is not None and len(tokens_of([batch])) == 5


def test_while_rows_are_counted_no_step_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take longer than what counts as a stall."""
    told: list[Any] = []
    status = SimpleNamespace(ready=lambda **info: told.append(info["idle"]), beat=lambda **info: told.append(info))

    def count(start: int, is_stopped: Any) -> None:
        told.append("count")

    def ends() -> None:
        told.append("finish")
        raise ZeroDivisionError

    data = SimpleNamespace(start=lambda progress: progress, last_step=count, close=lambda: None, compares=False)
    monkeypatch.setattr(sft, "build_data", lambda trainer: data)
    for num_steps, expected in ((None, [True, "count", {"idle": False}, "finish"]), (3, [False, "count", "finish"])):
        told.clear()
        section = SimpleNamespace(eval=None, preference=None, save_interval=None, bench=False)
        experiment = SimpleNamespace(
            kind="sft", num_steps=num_steps, sft=section, orchestrator=section, trainer=section
        )
        trainer = SimpleNamespace(
            resume=lambda: (3, {}), status=status, experiment=experiment, world_size=1, last_step=3, finish_saves=ends
        )
        with pytest.raises(ZeroDivisionError):
            sft.run_sft(cast(Any, trainer))
        assert told == expected


def test_made_ahead_is_the_same_and_ends() -> None:
    direct, stream = one_stream(), one_stream()
    ahead = Prefetcher(stream, depth=2, timeout_s=20)
    for _ in range(6):
        a, b = ahead.take(), direct.next()
        assert a is not None and b is not None and tokens_of([a]) == tokens_of([b]) and a.position == b.position
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name == "sft-data"]


def test_errors_of_the_thread_arrive_where_batches_are_taken() -> None:
    def broken(_: Sequence[int]) -> list[RowResult]:
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        Prefetcher(one_stream(make=broken), depth=1, timeout_s=20).take()
