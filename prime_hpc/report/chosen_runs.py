"""Runs that a command line of `report` or `usage` means: runs by name, directory or job, sweeps, folders of runs, and
the runs below a run whose trainer trains many."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prime_hpc.config.errors import ConfigError
from prime_hpc.store.child_runs import PREFIX
from prime_hpc.store.run_dirs import find_run, is_run, list_runs, outputs_folder, refuse_closed, run_name

MOST_RUNS = 200


@dataclass(frozen=True)
class ChosenRuns:
    """Runs for one page, or one table."""

    paths: list[Path]
    names: list[str]
    home: Path
    """Directory of the page, unless one is named."""
    title: str
    num_left_out: int = 0
    closed: list[Path] = field(default_factory=list)
    """Directories below a folder of runs that cannot be read, each of them a run or not."""


def choose_runs(words: Sequence[str], most: int | None = MOST_RUNS, *, may_be_none: bool = False) -> ChosenRuns:
    """Find the runs.

    Args:
        most: runs at most; None: all.
        may_be_none: a folder without runs means none, and is no mistake.

    Raises:
        ConfigError: a word means no run, sweep or folder of runs.
    """
    found: list[tuple[Path, str]] = []
    homes: list[Path] = []
    closed: list[Path] = []
    for word in words:
        home, some = _of_word(word, may_be_none, closed)
        homes.append(home)
        found += some
    unique = list({path.resolve(): (path, name) for path, name in found}.values())
    paths, names = [path for path, _ in unique], [name for _, name in unique]
    if len(words) == 1:
        home, title = homes[0], names[0] if len(names) == 1 else homes[0].resolve().name
    else:
        home, title = Path(), f"{len(names)} runs"
    most = len(paths) if most is None else most
    return ChosenRuns(paths[:most], names[:most], home, title, max(0, len(paths) - most), closed)


def _of_word(word: str, may_be_none: bool, closed: list[Path]) -> tuple[Path, list[tuple[Path, str]]]:
    direct = Path(word).expanduser()
    for folder in (direct, outputs_folder() / word):
        if folder.is_dir() and not is_run(folder):
            below = _sorted(list_runs(folder, closed), folder)
            if below:
                return folder, below
    try:
        run = find_run(word)
    except ConfigError:
        if may_be_none and direct.is_dir():
            refuse_closed(direct)
            return direct, []
        raise
    children = [child for child in run.glob(f"{PREFIX}*") if child.is_dir() and is_run(child)]
    return run, [(run, run.resolve().name), *_sorted(children, run.parent)]


def _sorted(paths: Iterable[Path], folder: Path) -> list[tuple[Path, str]]:
    return sorted(((path, run_name(path, folder)) for path in paths), key=lambda pair: pair[1])


def refuse_no_directory(path: Path) -> None:
    """Raise a ConfigError where the page's directory is none."""
    if not path.parent.is_dir():
        raise ConfigError(f"--output {path}: {path.parent} is no directory; make it first")
    if path.is_dir():
        raise ConfigError(f"--output {path}: is a directory; name a file in it")
