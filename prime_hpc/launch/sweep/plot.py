"""The picture of a sweep's results: the metric over steps, or bars where there are no curves.

A line is a point; of points that differ in their seed alone it is their mean, in a band from the least to the greatest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.sweep.naming import shortest_end
from prime_hpc.launch.sweep.results import Metric, Result, by_seed

LEGEND_AT_MOST = 15
"""With more points only the best of them are named."""


@dataclass(frozen=True)
class Curve:
    """A line of the picture: all the seeds of a point, at the steps that each has."""

    label: str
    value: float
    """Mean over the seeds of the value that results show."""
    steps: list[int]
    means: list[float]
    lows: list[float]
    highs: list[float]


def curves(results: Sequence[Result], metric: Metric) -> list[Curve]:
    """Return the lines, best first."""
    groups = by_seed(results)
    if not groups:
        return [_curve(result.view.row.name, [result]) for result in results]
    found = [_curve(_short(values) or "the experiment", members, of_seeds=True) for values, members in groups]
    return sorted(found, key=lambda curve: -curve.value if metric.goal == "max" else curve.value)


def _curve(name: str, members: Sequence[Result], *, of_seeds: bool = False) -> Curve:
    series = [dict(zip(member.steps, member.series, strict=True)) for member in members]
    steps = sorted(set(series[0]).intersection(*series[1:]))
    columns = [[values[step] for values in series] for step in steps]
    value = fmean([member.value or 0.0 for member in members])
    seeds = f", {len(members)} seed{'s' * (len(members) > 1)}" if of_seeds else ""
    band = [min(column) for column in columns], [max(column) for column in columns]
    return Curve(f"{name} ({value:.4g}{seeds})", value, steps, [fmean(column) for column in columns], *band)


def _short(values: Mapping[str, Any]) -> str:
    """Return values under the ends of their keys, which tell them apart."""
    return " ".join(f"{shortest_end(key, list(values))}={value}" for key, value in values.items())


def draw(results: Sequence[Result], metric: Metric, title: str, path: Path) -> None:
    """Write the picture; its suffix is the format (png, svg, pdf).

    Args:
        results: best first, with whole series.
        path: where it goes; the folder is made.

    Raises:
        ConfigError: matplotlib is missing, there is nothing to draw, or the file cannot be written.
    """
    drawn = [result for result in results if result.value is not None]
    if not drawn:
        raise ConfigError(f"no point has a value of {metric.name} yet: nothing to draw", "--plot")
    try:
        from matplotlib.figure import Figure  # no pyplot: no global state, no display
    except ImportError as error:
        raise ConfigError("matplotlib is not installed here: pip install matplotlib", "--plot") from error
    has_curves = any(len(result.series) > 1 for result in drawn)
    height = 4.5 if has_curves else max(2.5, 0.35 * len(drawn) + 1.2)
    figure = Figure(figsize=(9, min(height, 40)), layout="constrained")
    axes = figure.add_subplot()
    (_lines if has_curves else _bars)(axes, drawn, metric)
    axes.set_title(title)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not write
        raise ConfigError(f"{path} cannot be written: {error}", "--plot") from error


def _lines(axes: Any, results: Sequence[Result], metric: Metric) -> None:
    from matplotlib import colormaps

    colors, lines = colormaps["viridis"], curves(results, metric)
    for rank, line in enumerate(lines):
        color = colors(rank / max(1, len(lines) - 1) * 0.92)  # the last tenth is too pale on white
        style: dict[str, Any] = {"color": color, "zorder": 2 + len(lines) - rank}
        axes.plot(
            line.steps,
            line.means,
            "o-" if len(line.steps) < 25 else "-",
            label=line.label if rank < LEGEND_AT_MOST else None,
            markersize=3,
            linewidth=1.2,
            **style,
        )
        if line.lows != line.highs:
            axes.fill_between(line.steps, line.lows, line.highs, alpha=0.15, linewidth=0, **style)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(metric.name)
    axes.grid(alpha=0.3)
    axes.legend(
        frameon=False,
        fontsize="small",
        title=None if len(lines) <= LEGEND_AT_MOST else "the best",
        **({"loc": "upper left", "bbox_to_anchor": (0, -0.12)} if len(lines) > 4 else {}),
    )


def _bars(axes: Any, results: Sequence[Result], metric: Metric) -> None:
    names = [result.view.row.name for result in results]
    values = [float(result.value or 0.0) for result in results]
    bars = axes.barh(names, values, color="#3b6ea5")
    axes.bar_label(bars, labels=[f"{value:.4g}" for value in values], padding=3, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(metric.name)
