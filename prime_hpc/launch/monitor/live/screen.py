"""The loop of the live view: a thread reads, the terminal is drawn anew twice a second whatever the thread does.

So a file system, or a Slurm, that does not answer is said on the screen, beside what was known before, and Ctrl-C
ends the view at once.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from prime_hpc.config.errors import ConfigError
from prime_hpc.launch.monitor.live.facts import RunGoneError
from prime_hpc.launch.monitor.live.parts import clean
from prime_hpc.launch.monitor.run_facts import Queue
from prime_hpc.launch.monitor.status import Ask

DRAW_S = 0.5
SILENT_S = 4.0
"""A read that takes longer is said to have no answer."""
REFRESH_S, LONGEST_REFRESH_S = 2.0, 30.0
"""Between two reads; of many runs on a slow file system there are fewer."""
T = TypeVar("T")


@dataclass(frozen=True)
class View(Generic[T]):
    """How something is read and drawn."""

    read: Callable[[Ask], T]
    """Raises ConfigError or RunGoneError where nothing is there to be read (any more)."""
    draw: Callable[[T, int, int, bool], RenderableType]
    """From facts, columns, lines, and whether the terminal knows ASCII alone."""
    is_over: Callable[[T], bool]
    """True if nothing more will happen."""


class Reader(threading.Thread, Generic[T]):
    """Reads again and again, as long as this takes; nobody waits for it."""

    def __init__(self, view: View[T], ask: Ask) -> None:
        super().__init__(name="status-reader", daemon=True)
        self._view, self._ask = view, ask
        self._ended = threading.Event()
        self.facts: T | None = None
        self.read_at = 0.0
        """When the facts were read, epoch seconds."""
        self.busy_since: float | None = None
        """By the monotonic clock; None: it pauses."""
        self.asks = "the file system"
        """Who has not answered yet."""
        self.gone: ConfigError | RunGoneError | None = None
        """Nothing is there any more; it has ended."""
        self.trouble = ""
        """Why the last read failed; the next one may succeed."""

    def run(self) -> None:
        """Read until `end`."""
        while not self._ended.is_set():
            began = self.busy_since = time.monotonic()
            try:
                self.facts, self.trouble = self._view.read(self._ask_slurm), ""
                self.read_at = time.time()
            except (ConfigError, RunGoneError) as error:
                self.gone = error
                return
            except Exception as error:  # noqa: BLE001 - files of another version, or half-written: the next look may do
                self.trouble = f"{type(error).__name__}: {error}"
            self.busy_since = None
            self._ended.wait(min(LONGEST_REFRESH_S, max(REFRESH_S, 10 * (time.monotonic() - began))))

    def _ask_slurm(self, wanted: set[str], by_token: bool) -> Queue:
        self.asks = "Slurm"
        try:
            return self._ask(wanted, by_token)
        finally:
            self.asks = "the file system"

    def end(self) -> None:
        """Read no more."""
        self._ended.set()

    def silent_s(self) -> float:
        """Return for how long a read has had no answer; 0: it has not taken long."""
        since = self.busy_since
        waited = 0.0 if since is None else time.monotonic() - since
        return waited if waited > SILENT_S else 0.0


class Cut:
    """A page cut at the window's last line, with a word on what is missing."""

    def __init__(self, page: RenderableType, height: int) -> None:
        self._page, self._height = page, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw what fits."""
        lines = console.render_lines(self._page, options.update(height=None), pad=False)
        left = len(lines) - self._height
        shown = lines if left <= 0 else lines[: self._height - 1]
        for number, line in enumerate(shown):
            yield from line
            if number < len(shown) - 1:
                yield Segment.line()
        if left > 0:
            yield Segment(f"\n{left + 1} more lines: make the window taller")


def page_of(reader: Reader[T], view: View[T], console: Console) -> RenderableType:
    """Return what is on the screen now."""
    width, height = console.size
    word = [f"{time.strftime('%H:%M:%S')}, refreshes by itself, Ctrl-C ends"]
    silent = reader.silent_s()
    of = f"; this is of {time.strftime('%H:%M:%S', time.localtime(reader.read_at))}" if reader.facts is not None else ""
    if silent:
        word = [f"no answer from {reader.asks} for {silent:.0f} s{of}"]
    elif reader.trouble:
        word = [f"cannot be read now ({clean(reader.trouble)}){of}"]
    foot = Text(word[0], "bold red" if silent or reader.trouble else "dim", no_wrap=True, overflow="ellipsis")
    if reader.facts is None:
        return foot
    ascii_only = not console.encoding.lower().startswith("utf")
    page = view.draw(reader.facts, width, height - 1, ascii_only)
    return Group(foot, Cut(page, max(1, height - 1)))


def watch(view: View[T], ask: Ask, console: Console | None = None) -> int:
    """Show the view until it is over or Ctrl-C; its last page stays on the terminal.
    Returns 0; 2 where what is looked at is gone.
    Raises ConfigError: there is no such run."""
    console = console or Console()
    reader = Reader(view, ask)
    reader.start()
    seen = False
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while reader.gone is None and not (reader.facts is not None and view.is_over(reader.facts)):
                live.update(page_of(reader, view, console), refresh=True)
                reader.join(DRAW_S if seen else 0.05)
                seen = seen or reader.facts is not None
    except KeyboardInterrupt:
        pass
    reader.end()
    if reader.facts is not None:
        ascii_only = not console.encoding.lower().startswith("utf")
        console.print(view.draw(reader.facts, console.width, 10_000, ascii_only))
    if isinstance(reader.gone, ConfigError):
        raise reader.gone
    if reader.gone is not None:
        console.print(clean(reader.gone), style="bold red", markup=False)
    code = 2 if reader.gone is not None else 0
    if reader.silent_s():  # threads of a pool that wait for the file system would hold the interpreter's end up
        sys.stdout.flush()
        os._exit(code)
    return code
