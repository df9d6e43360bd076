"""Metrics files of any length as curves of bounded size: a row at a time, each curve in cells of equal width.

A cell holds mean, least and greatest value of its steps, so that a peak of one step is still seen among 10 million.
As long as the steps fit, a cell is one step.
"""

import errno
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_hpc.observe.metrics import STEP_KEYS, number_of, parse_row

MAX_CELLS = 1 << 14
"""Of a curve while it is read."""
MAX_CURVES = 400
"""Of one file: metrics by environment can be many."""
MAX_STEP = 1 << 62
"""A row that says more is no row of ours."""
_PENDING = 4096
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
    try:
        with path.open("rb") as file:
            while line := file.readline(_LONGEST_LINE):
                if (row := parse_row(line)) is not None:
                    yield row
                elif line.strip():
                    faults.torn += 1
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            faults.unreadable = error.strerror or str(error)


def section_of(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a resolved config or of a row; empty where it is none."""
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


class _Cells:
    """One curve: sums, counts and bounds of its cells."""

    def __init__(self) -> None:
        self.count: npt.NDArray[np.int64] = np.zeros(256, np.int64)
        self.sum, self.low, self.high = np.zeros(256), np.full(256, np.inf), np.full(256, -np.inf)

    def fit(self, size: int) -> None:
        """Grow to hold `size` cells."""
        more = max(size, 2 * len(self.count)) - len(self.count) if size > len(self.count) else 0
        if more:
            self.count = np.concatenate([self.count, np.zeros(more, np.int64)])
            self.sum = np.concatenate([self.sum, np.zeros(more)])
            self.low = np.concatenate([self.low, np.full(more, np.inf)])
            self.high = np.concatenate([self.high, np.full(more, -np.inf)])

    def add(self, cells: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
        """Add values, one a cell's index."""
        self.fit(int(cells.max()) + 1)
        np.add.at(self.count, cells, 1)
        np.add.at(self.sum, cells, values)
        np.minimum.at(self.low, cells, values)
        np.maximum.at(self.high, cells, values)

    def forget(self, cell: int) -> None:
        """Empty the cells from `cell` on."""
        self.count[cell:], self.sum[cell:], self.low[cell:], self.high[cell:] = 0, 0, np.inf, -np.inf

    def merge(self, factor: int) -> None:
        """Make one cell of every `factor`."""
        starts = np.arange(0, len(self.count), factor)
        self.count, self.sum = np.add.reduceat(self.count, starts), np.add.reduceat(self.sum, starts)
        self.low, self.high = np.minimum.reduceat(self.low, starts), np.maximum.reduceat(self.high, starts)


class Curves:
    """All metrics of one file by step, as they stand after restarts: a step that was done again replaces what an
    earlier attempt had written of it and of later ones."""

    def __init__(self, max_cells: int = MAX_CELLS) -> None:
        """`max_cells` of a curve at once."""
        self._max_cells = max_cells
        self._width = 1
        self._cells: dict[str, _Cells] = {}
        self._pending: dict[str, tuple[list[int], list[float]]] = {}
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
        is_step = any(key in row for key in STEP_KEYS)
        if is_step:
            if step <= self.last_step:
                self._forget(step)
            self.last_step = step
        for key, value in row.items():
            number = None if key in ("step", "time") else number_of(value)
            if number is None:
                continue
            if not math.isfinite(number):
                self.faults.not_finite[key] = self.faults.not_finite.get(key, 0) + 1
            elif key.startswith("eval/"):
                self._point(key, step, number)
            elif is_step:
                steps, values = self._pending.setdefault(key, ([], []))
                steps.append(step)
                values.append(number)
        self._num_pending += 1
        if self._num_pending >= _PENDING:
            self._flush()

    def _point(self, key: str, step: int, number: float) -> None:
        points = self.points.setdefault(key, {})
        points[step] = number
        if len(points) > self._max_cells:  # every second one
            self.points[key] = dict(list(points.items())[::2])

    def _flush(self) -> None:
        top = max((max(steps) for steps, _ in self._pending.values()), default=0)
        factor = 1
        while top // (self._width * factor) >= self._max_cells:
            factor *= 2
        if factor > 1:
            self._width *= factor
            for cells in self._cells.values():
                cells.merge(factor)
        for key, (steps, values) in self._pending.items():
            if key not in self._cells and len(self._cells) >= MAX_CURVES:
                self.faults.left_out.add(key)
                continue
            indices = np.asarray(steps, np.int64) // self._width
            self._cells.setdefault(key, _Cells()).add(indices, np.asarray(values))
        self._pending, self._num_pending = {}, 0

    def _forget(self, step: int) -> None:
        """A later attempt does `step` again: what stood at it and above is no longer so."""
        self._flush()
        for cells in self._cells.values():
            cells.forget(-(-step // self._width))
        for key, points in self.points.items():
            self.points[key] = {version: value for version, value in points.items() if version < step}

    def last_values(self) -> dict[str, float]:
        """Return each metric's newest cell's mean."""
        self._flush()
        found = {}
        for name, cells in self._cells.items():
            there = np.flatnonzero(cells.count)
            if len(there):
                found[name] = float(cells.sum[there[-1]] / cells.count[there[-1]])
        return found

    def table(self, most: int) -> dict[str, Any]:
        """Return all curves on one axis of at most `most` points, for the page.

        Returns:
            `steps`: first step of each point; `width`: steps a point; `mean`: metric -> values, None where there is
            none; `low`, `high`: likewise, of points that stand for several steps.
        """
        self._flush()
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
