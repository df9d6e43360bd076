"""Small pieces of which the live view's pages are made: cleaned text, curves, bars, figures."""

import math
from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from prime_hpc.observe.console import BLOCKS, short, sparkline

STATE_STYLES = {
    "completed": "green",
    "ready": "green",
    "done": "green",
    "running": "cyan",
    "saving": "cyan",
    "starting": "yellow",
    "pending": "yellow",
    "requeued": "yellow",
    "failed": "bold red",
    "lost": "bold red",
    "dead": "bold red",
    "away": "red",
}
FILLS = "░█▓▒·"
"""Of a stacked bar's parts, in order: told apart without colours too."""
_PLAIN = str.maketrans(dict(zip(BLOCKS + FILLS + "━─…", "__..--==.#%+ =-.", strict=True)))
LABEL_WIDTH = 10


def clean(text: object) -> str:
    """Return text of a run for one line of a terminal: what would steer it, or break the line, becomes a space."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def plain(text: str, *, ascii_only: bool) -> str:
    """Return a drawing for a terminal that may know ASCII alone."""
    return text.translate(_PLAIN) if ascii_only else text


def state(word: str) -> Text:
    """Return a state in its colour."""
    return Text(clean(word), STATE_STYLES.get(word, ""))


def number(value: float) -> str:
    """Return a figure in at most eight characters."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e4:
        return short(value)
    if size and size < 1e-2:
        return f"{value:.1e}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    """Return a share of 0 to 1."""
    return f"{share:.0%}" if math.isfinite(share) else "?"


def bar(done: float, width: int, *, ascii_only: bool) -> Text:
    """Return a progress bar; `done` from 0 to 1."""
    full = round(min(1.0, max(0.0, done)) * width) if math.isfinite(done) else 0
    text = Text(plain("━" * full, ascii_only=ascii_only), "green")
    return text.append(plain("─" * (width - full), ascii_only=ascii_only), "dim")


def stacked(parts: Mapping[str, float], width: int, *, ascii_only: bool) -> str:
    """Return shares (of 0 to 1) as one bar, a fill a part."""
    drawn, upto = "", 0.0
    for (_, share), fill in zip(parts.items(), FILLS, strict=False):
        upto += share
        drawn += fill * (round(upto * width) - len(drawn))
    return plain(drawn, ascii_only=ascii_only)


def legend(parts: Mapping[str, float], *, ascii_only: bool) -> str:
    """Return a stacked bar's parts with their fills and shares; those below half a percent are left out."""
    shown = [(fill, name, share) for (name, share), fill in zip(parts.items(), FILLS, strict=False) if share >= 0.005]
    return "  ".join(f"{plain(fill, ascii_only=ascii_only)} {name} {percent(share)}" for fill, name, share in shown)


def curve(name: str, values: Sequence[float], width: int, *, ascii_only: bool) -> Text:
    """Return a metric's name, last value and last values, `width` columns wide."""
    text = Text().append(f"{name:<9.9} ", "dim")
    text.append(f"{number(values[-1]):>8} ", "bold")
    return text.append(plain(sparkline(list(values), max(1, width - 19)), ascii_only=ascii_only), "cyan")


def lines(rows: Sequence[tuple[str, Text | str]]) -> Table:
    """Return labelled lines; long ones are folded."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(width=LABEL_WIDTH, style="dim", no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    for label, text in rows:
        grid.add_row(label, Text(clean(text)) if isinstance(text, str) else text)
    return grid
