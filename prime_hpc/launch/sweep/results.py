"""The results of a sweep: one metric of every point, best first, after those that came to their end the others."""

import json
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.experiment import ALONE
from prime_hpc.launch.monitor.run_facts import FINAL, number
from prime_hpc.launch.monitor.run_progress import iterate_json, tail_json
from prime_hpc.launch.sweep.progress import PointView
from prime_hpc.launch.sweep.spec import SweepFile
from prime_hpc.launch.sweep.state import Sweep
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.observe.metric_names import is_known, near
from prime_hpc.observe.metrics import STEP_KEYS
from prime_hpc.store.child_runs import list_children

_FILES = ("orchestrator", "trainer", *ALONE)
"""Metrics files, in the order in which a metric is looked for."""
_TAIL_BYTES = 256_000
_THREADS = 16

_LEAST_IS_BEST = (
    *("loss", "echo_loss", "nll", "perplexity", "kl", "kl_penalty", "reverse_kl", "teacher_divergence", "logprob_diff"),
)
"""Last parts of names of metrics of which the least is best, where no goal is stated."""


@dataclass(frozen=True)
class Metric:
    """The metric that ranks a sweep's points."""

    name: str
    goal: Literal["max", "min"]
    last: int

    @property
    def is_evaluation(self) -> bool:
        """True if it comes from evaluations rather than from every step."""
        return self.name.startswith("eval/")

    def describe(self) -> str:
        """How a point's value is made, and which is best."""
        how = "last evaluation" if self.is_evaluation else f"mean over the last {self.last} steps"
        return f"{self.name}: {how}, {'highest' if self.goal == 'max' else 'lowest'} first"


@dataclass
class Result:
    """One point's figure."""

    view: PointView
    value: float | None = None
    step: int | None = None
    num_values: int = 0
    """Values that the mean is over; of a point that trains many runs, which count alike, of all of them."""
    steps: list[int] = field(default_factory=list)
    series: list[float] = field(default_factory=list)
    """Value by step; of the file's end only, unless asked for whole."""

    @property
    def is_ranked(self) -> bool:
        """True of a point that came to its end: the last values of others are those of another step."""
        return self.view.state == "completed"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        row = self.view.row
        return {
            "name": row.name,
            "id": row.id,
            "index": row.index,
            "values": row.values,
            "state": self.view.state,
            "ranked": self.is_ranked,
            "value": self.value,
            "step": self.step,
            "num_values": self.num_values,
            "run_dir": self.view.status.path,
        }


@dataclass(frozen=True)
class SeedGroup:
    """Points that differ in their seed alone."""

    values: dict[str, Any]
    mean: float
    std: float
    """Sample standard deviation; 0 of one value."""
    num_seeds: int


def choose_metric(file: SweepFile, kind: str, name: str | None = None) -> Metric:
    """Return the metric asked for, else the sweep file's, else the kind's own.
    `kind`: of its experiment; the last row of one that trains nothing is of all its episodes."""
    metric = name or file.metric or ("loss" if kind == "sft" else "reward/mean")
    goal = file.goal if name in (None, file.metric) else None
    return Metric(metric, goal or _natural_goal(metric), 1 if kind in ALONE else file.last)


def unknown_metric(file: SweepFile, kind: str) -> str | None:
    """Say that no run of the kind writes the metric that a sweep file names; None: one does, or may."""
    files = ("trainer",) if kind == "sft" else ("orchestrator", "trainer")
    if file.metric is None or kind in ALONE or any(is_known(f"{name}.{file.metric}") for name in files):
        return None
    alike = [one.partition(".") for name in files for one in near(f"{name}.{file.metric}")]
    names = list(dict.fromkeys(name for home, _, name in alike if home in files))
    hint = f"; did you mean {' or '.join(names[:3])}?" if names else ""
    return f"metric: no run of kind {kind} is known to write {file.metric!r}, and `sweep results` may show none{hint}"


def _natural_goal(metric: str) -> Literal["max", "min"]:
    return "min" if metric.startswith("time/") or metric.rpartition("/")[2] in _LEAST_IS_BEST else "max"


def collect_results(sweep: Sweep, views: Sequence[PointView], metric: Metric, *, whole: bool = False) -> list[Result]:
    """Every point's value, best first: of points that are completed, then of others; those without one at the end, by
    index.
    `whole`: read all rows, for a plot.
    Raises ConfigError: points have metrics, but none of this name."""
    seen: set[str] = set()

    def one(view: PointView) -> Result:
        return _result(view, sweep.run_dir(view.row), metric, whole, seen)

    with ThreadPoolExecutor(_THREADS) as pool:
        results = list(pool.map(one, views))
    if seen and all(result.value is None for result in results):
        _refuse_unknown(metric.name, seen)
    sign = -1 if metric.goal == "max" else 1

    def place(result: Result) -> tuple[bool, bool, float, int]:
        value = 0.0 if result.value is None else sign * result.value
        return result.value is None, not result.is_ranked, value, result.view.row.index

    return sorted(results, key=place)


def _refuse_unknown(name: str, seen: set[str]) -> None:
    if name in seen:
        return  # it is there, but not finite: the points diverged
    alike = get_close_matches(name, sorted(seen), n=3)
    hint = f"did you mean {', '.join(alike)}?" if alike else f"there are {', '.join(sorted(seen))}"
    raise ConfigError(f"no point has a metric {name!r}; {hint}", "metric")


def _result(view: PointView, run_dir: Path, metric: Metric, whole: bool, seen: set[str]) -> Result:
    num_bytes = None if whole else _TAIL_BYTES
    of_all = [read_series(place, metric.name, num_bytes, seen) for place in _places(run_dir)]
    found = [dict(zip(*series, strict=True)) for series in of_all if series[0]]
    if not found:
        found = [dict(zip(*read_series(run_dir, metric.name, num_bytes, seen), strict=True))]
    if not found[0]:
        return Result(view, step=view.status.step)
    last = 1 if metric.is_evaluation else metric.last
    used = [list(values.values())[-last:] for values in found]
    steps = sorted(set().union(*found))
    series = [statistics.fmean(values[step] for values in found if step in values) for step in steps]
    value = statistics.fmean(map(statistics.fmean, used))
    return Result(view, value, steps[-1], sum(map(len, used)), steps, series)


def _places(run_dir: Path) -> list[Path]:
    """Return the runs that a point trains, where it trains many: its own rows are of any of them, in turn."""
    with suppress(OSError):
        return [run_dir / name for name in list_children(run_dir)]
    return []


def read_series(
    run_dir: Path, metric: str, num_bytes: int | None, seen: set[str] | None = None
) -> tuple[list[int], list[float]]:
    """Return a metric of a run by step, as it stands after restarts; values that are not finite are left out.

    Args:
        num_bytes: read only so much of the end of each file; all of them where the metric is in none.
        seen: receives the names of all numeric metrics that were read.
    """
    files = [metrics_file(run_dir, role) for role in _FILES]
    tails = (tail_json(path, num_bytes) for path in files if num_bytes is not None)
    for rows in chain(tails, map(iterate_json, files)):
        found = _series(rows, metric, seen)
        if found[0]:
            return found
    return [], []


def _series(rows: Iterable[dict[str, Any]], metric: str, seen: set[str] | None) -> tuple[list[int], list[float]]:
    newest: deque[dict[str, Any]] = deque(maxlen=50)
    values: dict[int, float] = {}
    last: int | None = None
    for row in rows:
        newest.append(row)
        if not row.keys().isdisjoint(STEP_KEYS):
            last = row["step"]
        if (value := number(row.get(metric))) is not None:
            values[row["step"]] = value
    if seen is not None:
        seen.update(key for row in newest for key in row if key not in ("step", "time"))
    # steps above the newest row's belong to an earlier attempt that went back to a checkpoint
    steps = sorted(step for step in values if last is None or step <= last)
    return steps, [values[step] for step in steps]


def by_seed(results: Iterable[Result]) -> list[tuple[dict[str, Any], list[Result]]]:
    """Return points that have a value, those that differ in their seed alone together, with the values that they share;
    empty where no two do. Points that ended before their end (failed, lost, stopped) are left out."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.value is not None and (result.is_ranked or result.view.state not in FINAL):
            rest = {key: value for key, value in result.view.row.values.items() if key != "seed"}
            groups[json.dumps(rest, sort_keys=True, default=str)].append(result)
    if not any(len(members) > 1 for members in groups.values()):
        return []
    return [(json.loads(key), members) for key, members in groups.items()]


def over_seeds(results: Iterable[Result], goal: Literal["max", "min"]) -> list[SeedGroup]:
    """Means over seeds, best first; empty where no two points differ in their seed alone."""
    found = []
    for shared, members in by_seed(results):
        values = [member.value for member in members if member.value is not None]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        found.append(SeedGroup(shared, statistics.fmean(values), spread, len(values)))
    return sorted(found, key=lambda group: -group.mean if goal == "max" else group.mean)
