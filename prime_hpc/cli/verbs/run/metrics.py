"""`prime-hpc metrics RUN`: a run's figures in Prometheus' text form, as of now; `--scrape-config`: how Prometheus finds
and reads all runs of a folder.

A run with `prometheus` is asked, or its text file is printed while it is kept up; of others, and of those that are over
or were killed, the files are read from their beginning. Exit codes: 0 it was printed; 2 there is no such run, or the
token is not this user's alone.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from prime_hpc.cli.common import parse
from prime_hpc.client.http import ask
from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import ALARMS_JSONL, RUN_YAML
from prime_hpc.config.sections.common import PrometheusConfig
from prime_hpc.launch.monitor.run_progress import line_of
from prime_hpc.launch.monitor.status import status_of
from prime_hpc.report.series import Faults, read_lines
from prime_hpc.runtime.failures import file_error_text
from prime_hpc.store.run_dirs import find_run, is_run, outputs_folder
from prime_hpc.supervisor.prometheus.exporter import ROWS, take_files
from prime_hpc.supervisor.prometheus.figures import Figures
from prime_hpc.supervisor.prometheus.folder import (
    file_of,
    folder_of,
    label_of,
    read_target,
    read_token,
    scrape_config,
    take_token,
)

TIMEOUT_S = 5.0
MISSED = 4
"""A text file that was not written anew for so many of its turns is old."""
LEAST_FRESH_S = 30.0
"""Clocks of nodes differ, and file systems show a change late."""


def run(argv: list[str], program: str) -> int:
    """Print the figures, or the configuration."""
    given = parse("metrics", argv)
    if "--scrape-config" in given:
        words = given.arguments(1)
        folder = _folder_of_word(words[0] if words else None)
        try:
            take_token(folder)
        except OSError as error:
            raise ConfigError(f"{folder}: {file_error_text(error)}") from error
        print(scrape_config(folder), end="")
        return 0
    (word,) = given.arguments(1, least=1)
    path = find_run(word).resolve()
    print(_served(path) or _written(path) or _computed(path), end="")
    return 0


def _folder_of_word(word: str | None) -> Path:
    """Return the folder that the runs under a folder share; that of the one run which is named."""
    if word is None:
        return folder_of(outputs_folder().resolve() / "any", None)
    path = Path(word).expanduser()
    if path.is_dir() and not is_run(path):
        return folder_of(path.resolve() / "any", None)
    return _folder(find_run(word).resolve())


def _folder(path: Path) -> Path:
    stated = line_of(path / RUN_YAML, "  folder: ", after="prometheus:")
    return folder_of(path, Path(stated) if stated and stated != "null" else None)


def _served(path: Path) -> str:
    """Return what the run itself answers; "" where it does not serve."""
    folder, label = _folder(path), label_of(path)
    address = read_target(folder, label)
    if address is None:
        return ""
    try:
        # by name: another run may have the port by now
        return ask(
            f"http://{address}/metrics?run={quote(label, safe='')}", timeout_s=TIMEOUT_S, key=read_token(folder)
        ).decode()
    except OSError as error:
        print(f"{address} does not answer ({error}); this is read from files", file=sys.stderr)
        return ""


def _written(path: Path) -> str:
    """Return the run's text file; "" where there is none, or where its supervisor has written none for a while: one
    that was killed leaves its last."""
    file = file_of(_folder(path), label_of(path), ".prom")
    stated = line_of(path / RUN_YAML, "  every_s: ", after="prometheus:")
    try:
        fresh_s = MISSED * float(stated or PrometheusConfig().every_s)
        if time.time() - file.stat().st_mtime > max(fresh_s, LEAST_FRESH_S):
            return ""
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    faults = Faults()
    yield from read_lines(file, faults)
    if faults.unreadable:
        raise ConfigError(f"{file} cannot be read: {faults.unreadable}")


def _computed(path: Path) -> str:
    """Return what the run's files tell; its counters count all attempts."""
    figures = Figures(label_of(path))
    for role in ROWS:
        for row in _rows(path / "metrics" / f"{role}.jsonl"):
            figures.take_row(role, row)
    for row in _rows(path / ALARMS_JSONL):
        figures.take_alarm(row)
    try:
        take_files(figures, path, line_of(path / RUN_YAML, "kind: ") or "rl")
    except OSError as error:
        raise ConfigError(f"{path}: {file_error_text(error)}") from error
    if status_of(path, details=False).state == "lost":
        figures.take_loss()
    return figures.text()
