"""`prime-hpc metrics RUN`: a run's figures in Prometheus' text form, as of now; `--scrape-config`: how Prometheus finds
and reads all runs of a folder.

A run with `prometheus` is asked, or its text file is printed; of others, and of those that are over, the files are read
from their beginning. Exit codes: 0 it was printed; 2 there is no such run, or the token is not this user's alone.
"""

import sys
from pathlib import Path

from prime_hpc.cli.common import parse
from prime_hpc.client.http import ask
from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import ALARMS_JSONL, RUN_YAML
from prime_hpc.launch.monitor.run_progress import line_of
from prime_hpc.report.series import Faults, read_lines
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


def run(argv: list[str], program: str) -> int:
    """Print the figures, or the configuration."""
    given = parse("metrics", argv)
    if "--scrape-config" in given:
        words = given.arguments(1)
        folder = _folder_of_word(words[0] if words else None)
        try:
            take_token(folder)
        except OSError as error:
            raise ConfigError(f"{folder}: {error}") from error
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
        return ask(f"http://{address}/metrics", timeout_s=TIMEOUT_S, key=read_token(folder)).decode()
    except OSError as error:
        print(f"{address} does not answer ({error}); this is read from files", file=sys.stderr)
        return ""


def _written(path: Path) -> str:
    try:
        return file_of(_folder(path), label_of(path), ".prom").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _computed(path: Path) -> str:
    """Return what the run's files tell; its counters count all attempts."""
    figures = Figures(label_of(path))
    for role in ROWS:
        for row in read_lines(path / "metrics" / f"{role}.jsonl", Faults()):
            figures.take_row(role, row)
    for row in read_lines(path / ALARMS_JSONL, Faults()):
        figures.take_alarm(row)
    try:
        take_files(figures, path, line_of(path / RUN_YAML, "kind: ") or "rl")
    except OSError as error:
        raise ConfigError(f"{path}: {error}") from error
    return figures.text()
