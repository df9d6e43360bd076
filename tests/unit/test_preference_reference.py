"""The starting weights' log-probabilities of pairs: computed once, kept when a pass is interrupted, never changed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.trainer.batching.micro_batches import build_rank_batch
from prime_hpc.trainer.data.build import RealData
from prime_hpc.trainer.data.messages import SFTDataError
from prime_hpc.trainer.data.reference import References, _contents, attach, fill
from prime_hpc.trainer.data.samples import RowCounts, RowResult, SFTSample
from prime_hpc.trainer.data.stream import BatchShape, Position, RowOrder, SampleStream
from prime_hpc.trainer.rank_group import RankGroup
from tests.support.tiny_model import make_tiny_model
from tests.unit.test_preference_loss import pairs_of, step_of

RECIPE: Any = SimpleNamespace(makes=(64, 99))


def rows_of(name: int = 7, num_rows: int = 6) -> Any:
    return SimpleNamespace(fingerprint=name, num_rows=num_rows)


def batches(num: int = 6) -> list[RankBatch]:
    """Two pairs each, of the rows 0, 1, ..."""
    ids, masks, _ = pairs_of(num)
    found = []
    for first in range(0, num, 2):
        own = slice(2 * first, 2 * first + 4)
        batch = build_rank_batch([[0, 1, 2, 3]], ids[own], masks[own])
        rows = np.repeat([first, first + 1], 2)
        found.append(replace(batch, sample_ids=rows, group_ids=rows.copy()))
    return found


class Told:
    """A trainer's rank that computes references; told to stop after so many batches."""

    def __init__(self, folder: Path, stops_after: int = 99) -> None:
        self.said: list[dict[str, Any]] = []
        self.control, self.rank, self.world_size = RankGroup(), 0, 1
        self.train_step = step_of(folder, 64)
        self.status = SimpleNamespace(ready=lambda **info: self.said.append(info))
        self.bus, self.num_asked, self.stops_after = self, 0, stops_after
        self.num_computed = 0
        self.train_step.policy.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_computed += 1

    def latest(self, topic: str) -> Any:
        self.num_asked += 1
        return {"reason": "asked"} if self.num_asked >= self.stops_after else None


def test_a_pass_goes_on_where_it_was_interrupted(group: None, tmp_path: Path) -> None:
    folder, file = make_tiny_model(tmp_path / "model"), tmp_path / "reference.npz"
    trainer: Any = Told(folder, stops_after=2)
    references = References(file, folder)
    table = references.table(RECIPE, rows_of(), 3)
    assert fill(trainer, references, [(table, batches())]) is False
    assert trainer.num_computed == 2 and trainer.said[0]["idle"] is True
    kept = References(file, folder).table(RECIPE, rows_of(), 3)
    assert np.isnan(kept[4:]).all() and (kept[:4, :2] < 0).all()
    ids, masks, _ = pairs_of(6)
    for row in range(4):
        for side in range(2):
            one = build_rank_batch([[0]], [ids[2 * row + side]], [masks[2 * row + side]])
            micro = trainer.train_step.micro_batch(one, 0)
            with trainer.train_step.policy.packing(micro), torch.no_grad():
                alone = float(trainer.train_step.policy(micro)[0].double().sum())
            assert kept[row, side] == pytest.approx(alone, rel=1e-5)

    again: Any = Told(folder)
    references = References(file, folder)
    table = references.table(RECIPE, rows_of(), 3)
    assert fill(again, references, [(table, batches())]) is True
    assert again.num_computed == 1 and not np.isnan(table).any() and (table[:4] == kept[:4]).all()
    third: Any = Told(folder)
    assert fill(third, References(file, folder), [(table, batches())]) and not third.num_computed and not third.said


def test_what_is_known_of_a_batch_is_not_changed(group: None, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    references = References(tmp_path / "reference.npz", folder)
    table = references.table(RECIPE, rows_of(), 3)
    known = -1.25, -2.5, _contents(batches()[0])[0]
    table[0] = known
    trainer: Any = Told(folder)
    assert fill(trainer, references, [(table, batches())])
    assert tuple(table[0]) == known and not np.isnan(table).any()


def test_a_row_that_reads_otherwise_now_is_computed_again(group: None, tmp_path: Path) -> None:
    """Sides that were swapped leave a file's lines as long as they were."""
    folder = make_tiny_model(tmp_path / "model")
    trainer: Any = Told(folder)
    table = References(tmp_path / "reference.npz", folder).table(RECIPE, rows_of(), 3)
    ids, masks, _ = pairs_of(2)
    swapped = build_rank_batch([[0, 1, 2, 3]], [ids[i] for i in (1, 0, 2, 3)], [masks[i] for i in (1, 0, 2, 3)])
    swapped = replace(swapped, sample_ids=np.array([0, 0, 1, 1]))
    assert fill(trainer, References(tmp_path / "reference.npz", folder), [(table, batches(2))])
    before = table.copy()
    with pytest.raises(SFTDataError, match="row 1 has no reference"):
        attach(swapped, table)
    assert fill(trainer, References(tmp_path / "reference.npz", folder), [(table, [swapped])])
    assert table[0, :2] == pytest.approx(before[0, 1::-1]) and (table[1] == before[1]).all()
    sums = attach(swapped, table).reference_sums
    assert sums is not None and sums.tolist() == table[:2, :2].ravel().tolist()


def test_other_rows_weights_or_seq_len_are_other_tables(tmp_path: Path) -> None:
    folder, other = make_tiny_model(tmp_path / "model"), make_tiny_model(tmp_path / "other", seed=5)
    file = tmp_path / "reference.npz"
    references = References(file, folder)
    references.table(RECIPE, rows_of(), 3)[:] = -1.0
    references.write()
    same = References(file, folder)
    assert not np.isnan(same.table(RECIPE, rows_of(), 3)).any()
    wider: Any = SimpleNamespace(makes=(128, 99))
    for tables, recipe, rows, made_by in (
        (same, RECIPE, rows_of(8), 3), (same, wider, rows_of(), 3), (same, RECIPE, rows_of(), 4),
        (References(file, other), RECIPE, rows_of(), 3),
    ):  # fmt: skip
        assert np.isnan(tables.table(recipe, rows, made_by)).all()


def test_a_resumed_run_computes_what_it_will_train_from_there_on() -> None:
    """Its batches may be smaller than those before, its rows more."""
    order, side = RowOrder(10, seed=0, shuffle=True), SFTSample(np.arange(3, dtype=np.int32), np.arange(3) > 1)

    def tokenise(rows: Sequence[int]) -> list[RowResult]:
        return [RowResult([SFTSample.pair([side, side])], RowCounts(rows=1)) for _ in rows]

    def stream(order: RowOrder, last_row: int | None) -> SampleStream:
        shape, ranks = BatchShape(2, None, 64), RankGroup()
        return SampleStream(tokenise, order, shape, ranks, share=0, num_shares=1, last_row=last_row)

    def ahead(row: int, step: int, most: int, last_row: int | None = None) -> list[int]:
        at = SimpleNamespace(last_row=last_row, position=Position(row=row))
        data: Any = SimpleNamespace(_new_order=lambda: order, _stream=at, _most_steps=most, _new_stream=stream)
        references: Any = SimpleNamespace(note_all=lambda *_: None)
        batches = RealData._rows_ahead(data, step, references, 1)
        return [row for batch in batches for row in batch.sample_ids[::2].tolist()]

    places = [order.row_at(place) for place in range(20)]
    assert ahead(6, 2, 7) == places[6:16]
    assert ahead(0, 0, 99) == ahead(0, 0, 0, last_row=30) == places[:10]  # others need not be looked at
    assert ahead(5, 1, 99) == places[5:] and set(places[5:]) == set(range(10))
    assert ahead(7, 3, 0, last_row=12) == places[7:12] and ahead(4, 9, 9) == []


def test_a_resumed_run_tokenises_nothing_ahead_that_was_looked_at(group: None, tmp_path: Path) -> None:
    """Of millions of rows that takes hours; a file that was touched is looked at again."""
    folder, file, rows = make_tiny_model(tmp_path / "model"), tmp_path / "reference.npz", tmp_path / "pairs.jsonl"
    rows.write_text("{}")
    looked: list[int] = []

    class Stream:
        last_row, position = 6, Position()
        start = staticmethod(lambda position: left.extend(batches()))
        next = staticmethod(lambda: SimpleNamespace(ranked=left.pop(0)) if left and not looked.append(1) else None)  # type: ignore

    left: list[RankBatch] = []

    def tokenised(row: int, stops_after: int = 99, *, step: int = 3, model: Path = folder) -> int:
        trainer: Any = Told(folder, stops_after)
        data: Any = object.__new__(RealData)
        data._recipe = SimpleNamespace(makes=RECIPE.makes, found=SimpleNamespace(files=[rows]))
        data._rows, data._made_by, data._fingerprint, data._most_steps = rows_of(), 3, 5, 9
        data._shape, data._ranks, data._stream = BatchShape(2, None, 64), RankGroup(), Stream()
        data._new_order = lambda: RowOrder(6, seed=0, shuffle=False)
        data._new_stream = lambda order, last_row: Stream()
        data._stream.position = Position(row=row)
        looked.clear()
        left.clear()
        references = References(file, model)
        fill(trainer, references, [data.references(references, step)])
        return len(looked)

    assert tokenised(2, stops_after=2) == 2
    assert tokenised(2) == 3, "a pass that was interrupted has not seen all"
    assert tokenised(2) == tokenised(4) == 0
    assert tokenised(0) == 3, "before the place that was looked at first"
    assert tokenised(0) == 0
    assert tokenised(0, step=2) == 3, "more steps are left than were looked at"
    assert tokenised(0, model=make_tiny_model(tmp_path / "other", seed=5)) == 3, "of these weights nothing is known"
    rows.write_text("{ }")
    assert tokenised(4) == 3


def test_a_broken_file_is_made_again(tmp_path: Path) -> None:
    folder, file = make_tiny_model(tmp_path / "model"), tmp_path / "reference.npz"
    for content in (b"", b"no zip", b"PK\x03\x04 cut"):
        file.write_bytes(content)
        assert np.isnan(References(file, folder).table(RECIPE, rows_of(), 3)).all()


def test_a_row_without_a_reference_is_named() -> None:
    table = np.full((6, 3), -1.0)
    table[:4, 2] = np.concatenate([_contents(batch) for batch in batches(4)])
    table[1] = np.nan
    with pytest.raises(SFTDataError, match=r"row 2 has no reference.*delete the run.s reference\.npz"):
        attach(batches()[0], table)
    assert attach(batches()[1], table).reference_sums is not None
