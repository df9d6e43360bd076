"""`prime-hpc usage [RUN|SWEEP|FOLDER ...]`: device-hours that runs were charged, and what became of them.

Exit codes: 0 said, also where there is nothing to say (runs whose hours are not known here are named on stderr); 2
there is no such run or folder, or a wrong option.
"""

import re
import sys
import time
from datetime import datetime
from typing import get_args

from prime_hpc.cli.common import parse, print_json
from prime_hpc.config.errors import ConfigError
from prime_hpc.observe.console import local_time
from prime_hpc.observe.table import align
from prime_hpc.report.chosen_runs import choose_runs
from prime_hpc.report.usage import By, Usage, accounted_note, grouped, read_usage, totals
from prime_hpc.store.run_dirs import outputs_folder

MOST = 10_000
"""Words that the command line takes."""
_AGO_S = {"h": 3600, "d": 86_400, "w": 604_800}


def run(argv: list[str], program: str) -> int:
    """Read the runs one after another, add up, print."""
    given = parse("usage", argv)
    words = given.arguments(MOST)
    by: By = _by(given.get("--by") or "run")
    since = _since(given.get("--since"), time.time())
    folder = outputs_folder()
    is_none = not words and not folder.is_dir()
    chosen = None if is_none else choose_runs(words or [str(folder)], most=None, may_be_none=True)
    closed = [] if chosen is None else chosen.closed
    left_out = {str(path): "this directory cannot be read, and may be a run" for path in closed}
    found = (
        []
        if chosen is None
        else grouped(read_usage(zip(chosen.paths, chosen.names, strict=True), chosen.home, since, left_out), by)
    )
    for why in dict.fromkeys(left_out.values()):
        first, *others = [name for name, reason in left_out.items() if reason == why]
        names = f"{first} and {len(others):,} more" if others else first
        print(f"{program}: {names} left out: {why}", file=sys.stderr)
    if "--json" in given:
        tree = {"by": by, "since": since, "rows": [row.as_dict() for row in found]}
        tree["left_out"] = [{"name": name, "why": why} for name, why in left_out.items()]
        print_json({**tree, "total": [row.as_dict() for row in totals(found)]})
    else:
        print(_text(found, by) if found else _none(since), end="")
    return 0


def _by(word: str) -> By:
    for name in get_args(By):
        if word == name:
            return name
    raise ConfigError(f"--by {word}: none of {', '.join(get_args(By))}")


def _since(word: str | None, now: float) -> float | None:
    """Return epoch seconds of a date or of a time ago."""
    if word is None:
        return None
    if ago := re.fullmatch(r"(\d+)([hdw])", word):
        return now - int(ago[1]) * _AGO_S[ago[2]]
    try:
        return datetime.fromisoformat(word).timestamp()
    except ValueError as error:
        raise ConfigError(f"--since {word}: a date (2026-11-01), a time (2026-11-01T12:00) or 36h, 7d, 4w") from error


def _none(since: float | None) -> str:
    return f"no run has cost anything {'yet' if since is None else f'since {local_time(since)}'}\n"


def _text(found: list[Usage], by: By) -> str:
    users = ("USER",) if by == "run" else ()
    head = (by.upper(), *users, "RUNS", "UNIT", "CHARGED", "EFFECTIVE", "LOST", "QUEUED")
    lines = align([head, *(_cells(row, by) for row in [*found, *totals(found)])])
    lines.append("hours of devices; queued: hours from submission to begin, and between attempts")
    lines.append(accounted_note(found))
    return "\n".join(lines) + "\n"


def _cells(row: Usage, by: By) -> tuple[str, ...]:
    users = (row.user,) if by == "run" else ()
    hours = (f"{row.charged:.2f}", _part(row.effective, row), _part(row.lost, row), f"{row.queued:.2f}")
    return (row.name, *users, str(row.runs), row.unit, *hours)


def _part(hours: float, row: Usage) -> str:
    share = f" ({hours / row.charged:.0%})" if row.charged > 0 else ""
    return f"{hours:.2f}{share}"
