"""Find the sweep that a SWEEP argument means: its file, its directory, or its name under the outputs folder."""

from difflib import get_close_matches
from pathlib import Path

from prime_hpc.config.errors import ConfigError, missing_file_message
from prime_hpc.config.sources.files import SUFFIXES
from prime_hpc.launch.sweep.resolve import load_base
from prime_hpc.launch.sweep.spec import is_sweep_file
from prime_hpc.launch.sweep.state import POINTS, SWEEP_YAML
from prime_hpc.store.run_dirs import outputs_folder


def is_sweep(path: Path) -> bool:
    """Return whether a directory is a sweep's."""
    return (path / SWEEP_YAML).is_file() and (path / POINTS).is_file()


def find_file(word: str) -> Path | None:
    """Return the sweep file that is meant, None where the word is a directory's or a sweep's name.
    Raises ConfigError: it is a config file, but of an experiment."""
    path = Path(word).expanduser()
    if path.name == SWEEP_YAML and is_sweep(path.parent):
        return None
    if not path.is_file():
        return None
    if not is_sweep_file(path):
        raise ConfigError(
            f"{path} is no sweep file: it has neither `experiment` nor `axes` (`prime-hpc submit` runs it)"
        )
    return path


def find_sweep(word: str, argv: list[str] | None = None) -> Path:
    """Return the directory of a sweep that was submitted.
    `argv`: flags with which the file was submitted, where they name or place it (`--output-dir`).
    Raises ConfigError: there is none; says which there are."""
    file = find_file(word)
    if file is not None:
        sweep_dir = load_base(file, argv or []).sweep_dir
        if not is_sweep(sweep_dir):
            raise ConfigError(f"{file} was not submitted yet: there is no sweep in {sweep_dir}")
        return sweep_dir
    path = Path(word).expanduser()
    folder = outputs_folder()
    for candidate in (path.parent if path.name == SWEEP_YAML else path, folder / word):
        if candidate.is_dir() and is_sweep(candidate):
            return candidate.resolve()
    if path.suffix in SUFFIXES:
        raise ConfigError(f"{path}: {missing_file_message(path)}")
    names = sorted(entry.name for entry in folder.iterdir() if is_sweep(entry)) if folder.is_dir() else []
    near = get_close_matches(word, names, n=3)
    if near:
        hint = f"did you mean {', '.join(near)}?"
    else:
        hint = f"{folder} holds {', '.join(names[:10]) or 'none'}; give its file or its directory"
    raise ConfigError(f"no sweep {word!r}; {hint}")
