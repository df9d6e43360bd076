"""`prime-hpc status [RUN|FOLDER]`: how one run is, or all under a folder (default: the outputs folder).

With --watch a view of the terminal that refreshes by itself; into a file or a pipe, and on a terminal that knows no
cursor, pages one after another. Exit codes: 0 it was said; 2 there is no such run, or no more.
"""

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from prime_hpc.cli.common import parse, print_json
from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import TINKER_KEY
from prime_hpc.launch.monitor.run_facts import RunStatus, number, span
from prime_hpc.launch.monitor.status import Ask, PatientAsk, ask_slurm, collect, status_of
from prime_hpc.observe.console import duration, local_time, sparkline, time_left
from prime_hpc.observe.table import narrowed, width
from prime_hpc.slurm.hostlist import compress_hosts
from prime_hpc.store.run_dirs import find_run, is_run, list_runs, outputs_folder, refuse_closed

SHOWN = 50
REFRESH_S, LONGEST_REFRESH_S = 2.0, 30.0
"""Between two pages; many runs on a slow file system are read again less often."""
ASK_EVERY_S = 10.0
"""With --watch Slurm is not asked more often than this."""
_NOTE = 10
"""Characters of a note that are shown at least."""
_SPARED = ("TREND", "ATT", "NODES", "JOB", "LEFT", "REWARD/LOSS")
"""Columns that a narrow terminal goes without, the first one first."""
_COLORS = {"completed": "32", "running": "36", "saving": "36", "failed": "31", "lost": "31"}


def run(argv: list[str], program: str) -> int:
    """Print the status; with --watch again and again until Ctrl-C, or until the one run is over."""
    given = parse("status", argv)
    rest = given.arguments(1)
    limit = None if "--all" in given else SHOWN
    if "--watch" in given and "--json" not in given and _can_draw():
        return _live(rest[0] if rest else None, limit)
    one, folder = _meant(rest[0] if rest else None)
    if "--watch" in given:
        return _watch(one, folder, limit, as_json="--json" in given)
    meant = one, folder, limit, ask_slurm
    given.tell(lambda: _document(*meant), lambda: _page(*meant))
    return 0


def _can_draw() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def _live(word: str | None, limit: int | None) -> int:
    from prime_hpc.launch.monitor.live.watch import watch_run_or_folder  # rich: a tenth of a second of every status

    return watch_run_or_folder(lambda: _meant(word), PatientAsk(ASK_EVERY_S), limit)


def _meant(word: str | None) -> tuple[Path | None, Path]:
    """Return the one run that a word means, and the folder of runs that is meant otherwise."""
    folder = outputs_folder()
    if word is None:
        return None, folder
    path = Path(word).expanduser()
    if path.is_dir() and not is_run(path) and not is_run(folder / word):
        refuse_closed(path)
        return None, path
    one = _one_or_folder(word)
    return (one, folder) if is_run(one) else (None, one)


def _one_or_folder(word: str) -> Path:
    """Return the run that is meant, or a folder of runs (a sweep) under the outputs folder."""
    try:
        return find_run(word)
    except ConfigError:
        if (outputs_folder() / word).is_dir() and list_runs(outputs_folder() / word):
            return outputs_folder() / word
        raise


def _document(one: Path | None, folder: Path, limit: int | None, ask: Ask) -> dict[str, object]:
    if one is not None:
        return status_of(one, ask=ask).as_dict()
    closed: list[Path] = []
    runs, more = collect(list_runs(folder, closed), folder, ask=ask, limit=limit)
    shown = [status.as_dict() for status in runs]
    return {"folder": str(folder), "runs": shown, "more": more, "closed": sorted(map(str, closed))}


def _page(one: Path | None, folder: Path, limit: int | None, ask: Ask) -> str:
    if one is not None:
        return render_one(status_of(one, ask=ask))
    closed: list[Path] = []
    runs, more = collect(list_runs(folder, closed), folder, ask=ask, limit=limit)
    return render_table(runs, folder, more) + _closed_line(closed)


def _watch(one: Path | None, folder: Path, limit: int | None, as_json: bool) -> int:
    ask = PatientAsk(ASK_EVERY_S)
    try:
        while True:
            began = time.monotonic()
            if as_json:
                print_json(_document(one, folder, limit, ask))
            else:
                page = _page(one, folder, limit, ask)
                print(f"{page}{time.strftime('%H:%M:%S')}, refreshed by itself; Ctrl-C ends", flush=True)
            pause_s = min(LONGEST_REFRESH_S, max(REFRESH_S, 10 * (time.monotonic() - began)))
            if one is not None and status_of(one, ask=ask, details=False).is_final:
                return 0
            time.sleep(pause_s)
    except KeyboardInterrupt:
        print()
        return 0


# --- for people -------------------------------------------------------------------------------------------------


def _painted(text: str, state: str) -> str:
    color = _COLORS.get(state)
    if color is None or not _can_draw() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{color}m{text}\x1b[0m"


def _ago(epoch: float) -> str:
    return f"{span(max(0.0, time.time() - epoch))} ago"


def _note(status: RunStatus) -> str:
    starts = f"starts about {local_time(status.starts)}" if status.starts is not None else ""
    return "; ".join(part for part in (status.note, starts) if part)


def render_one(status: RunStatus) -> str:
    """Everything about one run, a line a subject."""
    head = [status.name, _painted(status.state, status.state), f"step {status.progress}"]
    if status.figure and status.value is not None:
        head.append(f"{status.figure} {status.value:.4g} {sparkline(status.trend, 24)}".rstrip())
    rows: list[tuple[str, str]] = []
    if _note(status):
        rows.append(("note", _note(status)))
    job = [f"job {status.job_id}"] if status.job_id else []
    job += [status.attempt_text] if status.attempt is not None else []
    if status.since is not None:
        job.append(f"since {local_time(status.since)}")
    rows.append(("attempt", ", ".join(job) or "none yet"))
    left = [f"{time_left(status.time_left_s)} of the job's time left"] if status.time_left_s is not None else []
    left += [f"about {duration(status.eta_s)} to the last step"] if status.eta_s is not None else []
    rows.append(("time", ", ".join(left)))
    if status.service is not None:
        rows.append(("service", f"{status.service} for the tinker client; its key is in {TINKER_KEY}"))
    rows.append(("stall", status.stall or ""))
    held_up = [row["blocked"] for said in status.doing.values() for row in said if row.get("blocked")]
    rows += [("held up" if i == 0 else "", str(text)) for i, text in enumerate(dict.fromkeys(held_up))]
    rows.append(("successor", f"no successor waits: {status.no_successor}" if status.no_successor else ""))
    rows += [("alarms" if i == 0 else "", text) for i, text in enumerate(status.alarms)]
    rows.append(("purge", status.purge or ""))
    rows.append(("nodes", _nodes(status)))
    rows += [("gpus" if i == 0 else "", f"{host}: {_gpus(use)}") for i, (host, use) in enumerate(status.gpus.items())]
    rows.append(("roles", ", ".join(f"{label} {state}" for label, state in status.roles.items())))
    rows += [("runs" if i == 0 else "", f"{name} {what}") for i, (name, what) in enumerate(status.runs.items())]
    if status.checkpoint is not None:
        made = f", saved {_ago(status.checkpoint_time)}" if status.checkpoint_time is not None else ""
        rows.append(("checkpoint", f"step {status.checkpoint}{made}"))
    if status.outcome is not None:
        when = f" {_ago(status.ended)}" if status.ended is not None else ""
        rows.append(("last end", f"{status.outcome}{when}: {status.cause or 'no cause was written'}"))
    rows += [("logs" if i == 0 else "", log) for i, log in enumerate(status.logs.values())]
    if not status.logs:
        rows.append(("logs", "none yet"))
    lines = [f"  {label:<11}{text}" for label, text in rows if text]
    return "\n".join(["  ".join(head), f"  {'directory':<11}{status.path}", *lines]) + "\n"


def _gpus(use: dict[str, Any]) -> str:
    """Write the use of a node's GPUs."""
    parts = [f"{use.get('num_gpus', 0)} GPUs"]
    known = {name: value for name in use if (value := number(use[name])) is not None}
    if "utilization" in known:
        parts.append(f"{100 * known['utilization']:.0f} % busy")
    if {"memory_used", "memory_total"} <= known.keys():
        parts.append(f"{known['memory_used'] / 2**30:.0f}/{known['memory_total'] / 2**30:.0f} GiB")
    parts += [f"{known['power_w']:.0f} W"] if "power_w" in known else []
    return str(use["error"]) if "error" in use and not use.get("num_gpus") else ", ".join(parts)


def _nodes(status: RunStatus) -> str:
    by_hosts: dict[str, list[str]] = {}
    for label, hosts in status.nodes.items():
        by_hosts.setdefault(compress_hosts(hosts), []).append(label)
    return "; ".join(f"{', '.join(labels)}: {hosts}" for hosts, labels in by_hosts.items() if hosts)


def _closed_line(closed: list[Path]) -> str:
    if not closed:
        return ""
    few = ", ".join(sorted(map(str, closed))[:3]) + ", ..." * (len(closed) > 3)
    return f"directories that cannot be read, and may be runs: {len(closed)} ({few})\n"


def render_table(runs: list[RunStatus], folder: Path, more: int = 0) -> str:
    """One line a run."""
    if not runs:
        return f"no runs under {folder}\n"
    header = ("RUN", "STATE", "STEP", "REWARD/LOSS", "TREND", "ATT", "NODES", "LEFT", "JOB", "NOTE")
    table = [header]
    for status in runs:
        nodes = {host for hosts in status.nodes.values() for host in hosts}
        table.append(
            (
                status.name,
                status.state,
                status.progress,
                "-" if status.value is None else f"{status.value:.3f}{' loss' if status.figure == 'loss' else ''}",
                sparkline(status.trend, 10) if not status.is_final else "",
                "-" if status.attempt is None else str(status.attempt),
                str(len(nodes)) if nodes and not status.is_final else "-",
                "-" if status.time_left_s is None else time_left(status.time_left_s),
                status.job_id or "-",
                _note(status).partition("\n")[0],
            )
        )
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    lines = []
    for row, (*cells, note) in enumerate(narrowed(table, room - _NOTE, _SPARED)):
        note = note[: max(_NOTE, room - sum(width(cell) + 2 for cell in cells))]
        if row:
            cells[1] = _painted(cells[1], table[row][1])
        lines.append("  ".join([*cells, note]).rstrip())
    if more:
        lines.append(f"and {more} older runs that are over (--all shows them)")
    return "\n".join(lines) + "\n"
