"""Other runs that need what a run holds: its weights as their model, teacher or reference, its checkpoint, its rows."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.run_files import ATTEMPTS_JSONL, RUN_YAML
from prime_hpc.config.sources.files import parse_yaml
from prime_hpc.store.run_dirs import list_runs, outputs_folder, read_rows

_READ_ONCE = ("eval", "synthesize")
"""Kinds of runs that need their model no more once they are complete."""


def dependents(run_dir: Path) -> dict[Path, str]:
    """Return the runs, of its own folder and the outputs folder, whose configs name a path in this run, with that path.
    `run_dir`: the run, without links on the way; runs below it go with it."""
    found: dict[Path, str] = {}
    for folder in dict.fromkeys((run_dir.parent, outputs_folder().resolve())):
        for other in sorted(path.resolve() for path in list_runs(folder)):
            if other not in found and not other.is_relative_to(run_dir) and (named := _named(other, run_dir)):
                found[other] = named
    return found


def _named(other: Path, run_dir: Path) -> str | None:
    try:
        text = (other / RUN_YAML).read_text(encoding="utf-8", errors="replace")
        values = parse_yaml(text, str(other / RUN_YAML))[0] if run_dir.name in text else {}
    except (ConfigError, OSError):  # of a run that cannot be read nothing is known
        return None
    if values.get("kind") in _READ_ONCE and _is_complete(other):
        return None
    return next((word for word in _words(values) if run_dir.name in word and _is_in(word, run_dir)), None)


def _is_complete(run_dir: Path) -> bool:
    rows = read_rows(run_dir / ATTEMPTS_JSONL)
    return bool(rows) and rows[-1].get("outcome") == "completed"


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _words(one)


def _is_in(word: str, folder: Path) -> bool:
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # no path
        return Path(word).expanduser().resolve().is_relative_to(folder)
    return False
