"""Entry to the live view: one run or a folder of them, whichever a word turns out to mean."""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType

from prime_hpc.launch.monitor.live.facts import LiveRun, LiveRuns, read_run, read_runs
from prime_hpc.launch.monitor.live.run_page import run_page
from prime_hpc.launch.monitor.live.runs_page import runs_page
from prime_hpc.launch.monitor.live.screen import View, watch
from prime_hpc.launch.monitor.status import Ask

Meant = tuple[Path | None, Path]
"""The one run, or None; and the folder of runs."""


def watch_run_or_folder(find: Callable[[], Meant], ask: Ask, limit: int | None, console: Console | None = None) -> int:
    """Show it until it is over, or Ctrl-C; see `screen.watch`.

    Args:
        find: says what is meant; called by the thread that reads, for the file system may hang here already.
        limit: of a folder, at most so many runs that are over.

    Raises:
        ConfigError: there is no such run.
    """
    meant: list[Meant] = []

    def read(ask: Ask) -> LiveRun | LiveRuns:
        if not meant:
            meant.append(find())
        one, folder = meant[0]
        return read_runs(folder, ask, limit) if one is None else read_run(one, ask)

    return watch(View(read, draw, _is_over), ask, console)


def draw(live: LiveRun | LiveRuns, width: int, height: int, ascii_only: bool) -> RenderableType:
    """Return the page for a terminal of so many columns and lines."""
    if isinstance(live, LiveRuns):
        return runs_page(live, width, height, ascii_only=ascii_only)
    return run_page(live, width, ascii_only=ascii_only)


def _is_over(live: LiveRun | LiveRuns) -> bool:
    return isinstance(live, LiveRun) and live.status.is_final
