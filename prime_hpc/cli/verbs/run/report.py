"""`prime-hpc report RUN ...`: one HTML page of a run, several, or a sweep, that opens without a network or a server.

A run that cannot be read is left out, and named on stderr. Exit codes: 0 written; 1 it could not be written (the disk
is full, no permission); 2 there is no such run, or none that can be read.
"""

import sys
import time
from pathlib import Path
from typing import Any

from prime_hpc.cli.common import parse, print_json
from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import ATTEMPTS_JSONL
from prime_hpc.launch.monitor.run_progress import add_checkpoint
from prime_hpc.launch.monitor.status import collect
from prime_hpc.report.chosen_runs import choose_runs, refuse_no_directory
from prime_hpc.report.page import render_page
from prime_hpc.report.run_view import limits_for, view_run
from prime_hpc.report.spans import ask_lives
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.runtime.failures import file_error_text
from prime_hpc.store.run_dirs import read_rows

NAME = "report.html"
MOST = 1000
"""Words that the command line takes; more runs than a page shows are left out by name."""


def run(argv: list[str], program: str) -> int:
    """Read the runs, write the page, say where it is."""
    given = parse("report", argv)
    words = given.arguments(MOST, least=1)

    chosen = choose_runs(words)
    output = given.path("--output") or chosen.home / NAME
    refuse_no_directory(output)
    statuses, _ = collect(chosen.paths, chosen.home)
    by_path = {status.path: status for status in statuses}
    limits = limits_for(len(chosen.paths))
    lives = ask_lives(chosen.paths)
    views: dict[Path, dict[str, Any]] = {}
    counted: dict[tuple[Any, ...], str] = {}
    unread: dict[str, str] = {}
    named = zip(chosen.paths, chosen.names, strict=True)
    for path, name in sorted(named, key=lambda one: -len(read_rows(one[0] / ATTEMPTS_JSONL))):  # who went on first
        status = by_path[str(path)]
        status.name = name
        add_checkpoint(status, path)
        try:
            views[path] = view_run(path, status, limits, lives.get(path, ()), counted)
        except OSError as error:  # another user's, or gone meanwhile: the page shows the others
            unread[name] = file_error_text(error)
            print(f"{program}: {name} left out: {unread[name]}", file=sys.stderr)
    runs = [views[path] for path in chosen.paths if path in views]
    if not runs:
        raise ConfigError(f"none of {', '.join(words)} can be read: {next(iter(unread.values()))}")
    made = time.strftime("%Y-%m-%d %H:%M %Z")
    try:
        write_atomic(output, render_page(runs, title=chosen.title, made=made))
    except OSError as error:
        print(f"{program}: error: {output}: {error.strerror}; choose another place with --output", file=sys.stderr)
        return 1
    size = output.stat().st_size
    num_left_out = chosen.num_left_out + len(unread)
    if "--json" in given:
        facts = [
            {key: one[key] for key in ("name", "path", "status", "figures", "accounting", "split", "notes")}
            for one in runs
        ]
        reasons = [{"name": name, "why": why} for name, why in unread.items()]
        print_json({"path": str(output), "bytes": size, "left_out": num_left_out, "unread": reasons, "runs": facts})
    else:
        more = f", {num_left_out} more left out" if num_left_out else ""
        print(f"{output}: {len(runs)} run{'s' * (len(runs) > 1)}{more}, {size / 1e6:.2f} MB; open it in a browser")
    if "--open" in given:
        import webbrowser

        if not webbrowser.open(output.resolve().as_uri()):
            print(
                f"{program}: no browser could be started here; copy the file to a machine that has one", file=sys.stderr
            )
    return 0
