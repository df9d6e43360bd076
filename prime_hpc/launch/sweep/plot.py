"""The picture of a sweep's results: the metric over steps, a line a point, or bars where there are no curves."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_hpc.config.errors import ConfigError, Problem
from prime_hpc.launch.sweep.results import Metric, Result

LEGEND_AT_MOST = 15
"""With more points only the best of them are named."""


def draw(results: Sequence[Result], metric: Metric, title: str, path: Path) -> None:
    """Write the picture; its suffix is the format (png, svg, pdf).

    Args:
        results: best first, with whole series.
        metric: what they are of.
        title: of the picture.
        path: where it goes; the folder is made.

    Raises:
        ConfigError: matplotlib is missing, there is nothing to draw, or the file cannot be written.
    """
    drawn = [result for result in results if result.value is not None]
    if not drawn:
        raise ConfigError(Problem(f"no point has a value of {metric.name} yet: nothing to draw", "--plot"))
    try:
        from matplotlib.figure import Figure  # no pyplot: no global state, no display
    except ImportError as error:
        raise ConfigError(Problem("matplotlib is not installed here: pip install matplotlib", "--plot")) from error
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
        raise ConfigError(Problem(f"{path} cannot be written: {error}", "--plot")) from error


def _lines(axes: Any, results: Sequence[Result], metric: Metric) -> None:
    from matplotlib import colormaps

    colors = colormaps["viridis"]
    for rank, result in enumerate(results):
        label = f"{result.view.row.name} ({result.value:.4g})" if rank < LEGEND_AT_MOST else None
        color = colors(rank / max(1, len(results) - 1) * 0.92)  # the last tenth is too pale on white
        axes.plot(
            result.steps,
            result.series,
            "o-" if len(result.steps) < 25 else "-",
            color=color,
            label=label,
            markersize=3,
            linewidth=1.2,
            zorder=len(results) - rank,
        )
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel(metric.name)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", title=None if len(results) <= LEGEND_AT_MOST else "the best")


def _bars(axes: Any, results: Sequence[Result], metric: Metric) -> None:
    names = [result.view.row.name for result in results]
    values = [float(result.value or 0.0) for result in results]
    bars = axes.barh(names, values, color="#3b6ea5")
    axes.bar_label(bars, labels=[f"{value:.4g}" for value in values], padding=3, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(metric.name)
