"""Many runs as a page of a terminal: a line a run, those under way first."""

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prime_hpc.launch.monitor.live import parts
from prime_hpc.launch.monitor.live.facts import LiveRuns
from prime_hpc.launch.monitor.run_facts import RunStatus
from prime_hpc.observe.console import local_time, sparkline, time_left

_WIDE = 110
"""Columns from which a line has all of its cells."""


def runs_page(live: LiveRuns, width: int, height: int, *, ascii_only: bool = False) -> RenderableType:
    """Return the page, at most `height` lines."""
    head = Text(no_wrap=True, overflow="ellipsis").append(parts.clean(live.folder), "bold")
    counts = Counter(status.state for status in live.runs)
    alarms = sum(bool(status.alarms) for status in live.runs if status.is_under_way)
    words = [f"{count} {word}" for word, count in counts.most_common()]
    words += [f"{alarms} with alarms"] if alarms else []
    head.append(f"  {', '.join(words) or 'no runs'}", "")
    if not live.runs:
        return head
    room = max(1, height - 4)
    shown = live.runs[:room]
    found: list[RenderableType] = [head, Text(), _table(shown, width, ascii_only)]
    left = live.more + len(live.runs) - len(shown)
    if left:
        found.append(Text(f"and {left} more", "dim"))
    return Group(*found)


def _table(runs: list[RunStatus], width: int, ascii_only: bool) -> Table:
    wide = width >= _WIDE
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False, expand=True)
    table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=40 if wide else 22)
    table.add_column("state", no_wrap=True)
    table.add_column("step", no_wrap=True, justify="right")
    table.add_column("reward", no_wrap=True, justify="right")
    table.add_column("trend", no_wrap=True)
    table.add_column("to go", no_wrap=True, justify="right")
    for column in ("idle", "attempt", "job", "walltime") if wide else ():
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("note", no_wrap=True, overflow="ellipsis", ratio=1)
    for status in runs:
        table.add_row(*_cells(status, wide, ascii_only))
    return table


def _cells(status: RunStatus, wide: bool, ascii_only: bool) -> list[Text | str]:
    value = "-" if status.value is None else parts.number(status.value)
    trend = sparkline(status.trend, 16 if wide else 8) if status.is_under_way else ""
    cells: list[Text | str] = [
        parts.clean(status.name),
        parts.state(status.state),
        status.progress,
        f"{value} loss" if status.figure == "loss" else value,
        Text(parts.plain(trend, ascii_only=ascii_only), "cyan"),
        "-" if status.eta_s is None else time_left(status.eta_s),
    ]
    if wide:
        cells += [
            "-" if status.idle_share is None else parts.percent(status.idle_share),
            "-" if status.attempt is None else str(status.attempt),
            parts.clean(status.job_id or "-"),
            "-" if status.time_left_s is None else time_left(status.time_left_s),
        ]
    return [*cells, _note(status)]


def _note(status: RunStatus) -> Text:
    if status.stall:
        return Text(parts.clean(f"stands still: {status.stall}"), "bold red")
    if status.alarms and status.is_under_way:
        return Text(parts.clean(status.alarms[-1]), "bold yellow")
    starts = f"starts about {local_time(status.starts)}" if status.starts is not None else ""
    slurm = status.slurm if status.slurm and status.state in ("pending", "requeued") and not status.note else ""
    return Text(parts.clean("; ".join(filter(None, [status.note.partition("\n")[0], slurm, starts]))))
