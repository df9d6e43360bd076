"""Metrics files of any length as curves of bounded size: a row at a time, each curve in cells of equal width.

A cell holds mean, least and greatest value of its steps, so that a peak of one step is still seen among 10 million.
As long as the steps fit, a cell is one step.
"""

import errno
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_hpc.observe.metrics import READ_BYTES, STEP_KEYS, number_of, parse_row

MAX_CELLS = 1 << 14
"""Of a curve while it is read."""
MAX_CURVES = 400
"""Of one file: metrics by environment can be many."""
MAX_STEP = 1 << 62
"""A row that says more is no row of ours."""
_PENDING = 1024
_MOST_SHAPES = 64
"""Sets of metrics that are remembered."""
_NUMBERS = {float, int}
_LONGEST_LINE = 4 << 20


@dataclass
class Faults:
    """Things of a file that could not be used."""

    torn: int = 0
    """Lines that are no JSON object."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """Values that are NaN or infinite, by metric."""
    left_out: set[str] = field(default_factory=set)
    """Metrics beyond `MAX_CURVES`."""
    unreadable: str | None = None
    """Why the file, or its rest, could not be read."""


def read_lines(path: Path, faults: Faults) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON-lines file, one at a time; torn ones are counted. A file that is not there has none; why
    one cannot be read is noted."""
    for line in raw_lines(path, faults):
        if (row := parse_row(line)) is not None:
            yield row
        elif line.strip():
            faults.torn += 1


def raw_lines(path: Path, faults: Faults) -> Iterator[bytes]:
    """Yield the same unread, for who wants few of them."""
    try:
        with path.open("rb", buffering=READ_BYTES) as file:
            while line := file.readline(_LONGEST_LINE):
                yield line
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            faults.unreadable = error.strerror or str(error)


def section_of(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a resolved config or of a row; empty where it is none."""
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


class _Steps:
    """Ascending steps, and the cells in which they are."""

    def __init__(self, steps: npt.NDArray[np.int64], width: int) -> None:
        self.steps, self.width = steps, width
        indices = steps // width
        self.starts = np.flatnonzero(np.diff(indices, prepend=-1))
        self.counts = np.diff(self.starts, append=len(steps))
        self.cells = indices[self.starts]
        self.size = int(indices[-1]) + 1

    def only(self, chosen: npt.NDArray[np.bool_]) -> "_Steps":
        """Return those that are chosen, of which there is one."""
        return _Steps(self.steps[chosen], self.width)


class _Cells:
    """One curve: sums, counts and bounds of its cells."""

    def __init__(self) -> None:
        self.count: npt.NDArray[np.int64] = np.zeros(256, np.int64)
        self.sum, self.low, self.high = np.zeros(256), np.full(256, np.inf), np.full(256, -np.inf)
        self.last: tuple[int, float] | None = None
        """The newest step and its value; None where a later attempt has taken it back."""

    def fit(self, size: int) -> None:
        """Grow to hold `size` cells."""
        more = max(size, 2 * len(self.count)) - len(self.count) if size > len(self.count) else 0
        if more:
            self.count = np.concatenate([self.count, np.zeros(more, np.int64)])
            self.sum = np.concatenate([self.sum, np.zeros(more)])
            self.low = np.concatenate([self.low, np.full(more, np.inf)])
            self.high = np.concatenate([self.high, np.full(more, -np.inf)])

    def add(self, steps: "_Steps", values: npt.NDArray[np.float64]) -> None:
        """Add a value a step."""
        self.fit(steps.size)
        self.last = max(self.last or (-1, 0.0), (int(steps.steps[-1]), float(values[-1])))
        found, starts = steps.cells, steps.starts
        self.count[found] += steps.counts
        self.sum[found] += np.add.reduceat(values, starts)
        self.low[found] = np.minimum(self.low[found], np.minimum.reduceat(values, starts))
        self.high[found] = np.maximum(self.high[found], np.maximum.reduceat(values, starts))

    def forget(self, cell: int) -> None:
        """Empty the cells from `cell` on."""
        self.count[cell:], self.sum[cell:], self.low[cell:], self.high[cell:] = 0, 0, np.inf, -np.inf

    def merge(self, factor: int) -> None:
        """Make one cell of every `factor`."""
        starts = np.arange(0, len(self.count), factor)
        self.count, self.sum = np.add.reduceat(self.count, starts), np.add.reduceat(self.sum, starts)
        self.low, self.high = np.minimum.reduceat(self.low, starts), np.maximum.reduceat(self.high, starts)


class _Shape:
    """Rows of steps that have the same metrics, as most rows of a file have: their numbers wait in one table."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        """`row` is one of them."""
        self.evaluations = [name for name in row if name.startswith("eval/")]
        own = [name not in ("step", "time", *self.evaluations) for name in row]
        self._are_numbers = [is_own and type(row[name]) in _NUMBERS for name, is_own in zip(row, own, strict=True)]
        self._names = list(compress(row, self._are_numbers))
        pairs = zip(row, own, self._are_numbers, strict=True)
        self._others = [name for name, is_own, is_number in pairs if is_own and not is_number]
        self._steps, self._numbers = array("q"), array("d")
        self._single: dict[str, tuple[list[int], list[float]]] = {}
        """What is no number in other rows."""

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Take a row."""
        singles = self._others
        try:
            if not _NUMBERS.issuperset(map(type, compress(row.values(), self._are_numbers))):
                raise OverflowError
            self._numbers += array("d", compress(row.values(), self._are_numbers))
            self._steps.append(step)
        except OverflowError:  # text among them, or an integer that no float holds
            singles = [*self._names, *self._others]
        for name in singles:
            if (number := number_of(row[name])) is not None:
                steps, values = self._single.setdefault(name, ([], []))
                steps.append(step)
                values.append(number)

    def pending(self) -> Iterator[tuple[str, npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
        """Yield each metric with steps, which ascend, and values, and begin anew."""
        if self._steps:
            steps = np.array(self._steps, np.int64)
            columns = np.ascontiguousarray(np.array(self._numbers).reshape(len(steps), -1).T)
            for name, column in zip(self._names, columns, strict=True):
                yield name, steps, column
        for name, (own, values) in self._single.items():
            yield name, np.array(own, np.int64), np.array(values)
        self._steps, self._numbers, self._single = array("q"), array("d"), {}


class Curves:
    """All metrics of one file by step, as they stand after restarts: a step that was done again replaces what an
    earlier attempt had written of it and of later ones."""

    def __init__(self, max_cells: int = MAX_CELLS) -> None:
        """`max_cells` of a curve at once."""
        self._max_cells = max_cells
        self._width = 1
        self._cells: dict[str, _Cells] = {}
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self._num_pending = 0
        self.last_step = 0
        self.num_rows = 0
        self.points: dict[str, dict[int, float]] = {}
        """Evaluations: value by version."""
        self.faults = Faults()

    def add(self, row: dict[str, Any]) -> None:
        """Take a row of the file. One without a step is left out."""
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < MAX_STEP:
            return
        self.num_rows += 1
        names = tuple(row)
        if (shape := self._shapes.get(names)) is None:
            if len(self._shapes) >= _MOST_SHAPES:
                self.flush()
                self._shapes.clear()
            shape = self._shapes[names] = _Shape(row)
        if any(key in row for key in STEP_KEYS):
            if step <= self.last_step:
                self._forget(step)
            self.last_step = step
            shape.add(step, row)
            self._num_pending += 1
            if self._num_pending >= _PENDING:
                self.flush()
        for key in shape.evaluations:
            number = number_of(row[key])
            if number is not None and math.isfinite(number):
                self._point(key, step, number)
            elif number is not None:
                self._count_not_finite(key, 1)

    def _count_not_finite(self, key: str, count: int) -> None:
        self.faults.not_finite[key] = self.faults.not_finite.get(key, 0) + count

    def _point(self, key: str, step: int, number: float) -> None:
        points = self.points.setdefault(key, {})
        points[step] = number
        if len(points) > self._max_cells:  # every second one
            self.points[key] = dict(list(points.items())[::2])

    def flush(self) -> None:
        """Add the rows that wait: before `faults` and `points` are read."""
        factor = 1
        while self._num_pending and self.last_step // (self._width * factor) >= self._max_cells:
            factor *= 2
        if factor > 1:
            self._width *= factor
            for cells in self._cells.values():
                cells.merge(factor)
        for shape in self._shapes.values():
            known: _Steps | None = None
            for key, steps, values in shape.pending():
                if known is None or known.steps is not steps:
                    known = _Steps(steps, self._width)
                self._add_column(key, known, values)
        self._num_pending = 0

    def _add_column(self, key: str, steps: _Steps, values: npt.NDArray[np.float64]) -> None:
        finite = np.isfinite(values)
        if not finite.all():
            self._count_not_finite(key, int((~finite).sum()))
            if not finite.any():
                return
            steps, values = steps.only(finite), values[finite]
        if key not in self._cells and len(self._cells) >= MAX_CURVES:
            self.faults.left_out.add(key)
        else:
            self._cells.setdefault(key, _Cells()).add(steps, values)

    def _forget(self, step: int) -> None:
        """A later attempt does `step` again: what stood at it and above is no longer so."""
        self.flush()
        for cells in self._cells.values():
            cells.forget(-(-step // self._width))
            cells.last = cells.last if cells.last is not None and cells.last[0] < step else None
        for key, points in self.points.items():
            self.points[key] = {version: value for version, value in points.items() if version < step}

    def last_values(self) -> dict[str, float]:
        """Return each metric's value at its newest step; the mean of its newest cell where that was taken back."""
        self.flush()
        found = {}
        for name, cells in self._cells.items():
            there = np.flatnonzero(cells.count)
            if len(there):
                mean = float(cells.sum[there[-1]] / cells.count[there[-1]])
                found[name] = mean if cells.last is None else cells.last[1]
        return found

    def table(self, most: int) -> dict[str, Any]:
        """Return all curves on one axis of at most `most` points, for the page.

        Returns:
            `steps`: first step of each point; `width`: steps a point; `mean`: metric -> values, None where there is
            none; `low`, `high`: likewise, of points that stand for several steps.
        """
        self.flush()
        size = max((int(np.flatnonzero(c.count)[-1]) + 1 for c in self._cells.values() if c.count.any()), default=0)
        first = min((int(np.flatnonzero(c.count)[0]) for c in self._cells.values() if c.count.any()), default=0)
        factor = max(1, -(-(size - first) // most))
        for cells in self._cells.values():
            cells.fit(size)
            if factor > 1:
                cells.merge(factor)
        self._width *= factor
        start, stop = first // factor, -(-size // factor)
        found: dict[str, Any] = {
            "steps": [index * self._width for index in range(start, stop)],
            "width": self._width,
            "mean": {},
            "low": {},
            "high": {},
        }
        for name, cells in self._cells.items():
            there = cells.count[start:stop] > 0
            means = np.divide(cells.sum[start:stop], cells.count[start:stop], out=np.zeros(stop - start), where=there)
            found["mean"][name] = _texts(means, there)
            if self._width > 1:
                found["low"][name] = _texts(cells.low[start:stop], there)
                found["high"][name] = _texts(cells.high[start:stop], there)
        return found


def short(value: float) -> float | int:
    """Return a number with the five digits that a curve shows: a page of thousands stays small. One that is not finite
    is returned as it is."""
    if not math.isfinite(value):
        return value
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def _texts(values: npt.NDArray[np.float64], there: npt.NDArray[np.bool_]) -> list[float | int | None]:
    return [short(value) if is_there else None for value, is_there in zip(values.tolist(), there.tolist(), strict=True)]
