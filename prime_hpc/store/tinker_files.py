"""The files of a tinker service that others than the trainer know; `trainer/tinker/paths.py` knows the rest."""

import contextlib
import json
from pathlib import Path

from prime_hpc.config.run_files import TINKER_URL
from prime_hpc.store.io import files

INDEX = "index.json"
"""Of an adapter: its shape, and its saves by name."""


def adapters_root(run_dir: Path) -> Path:
    """Directory of the adapters of a service, one below it for each."""
    return run_dir / "tinker"


def count_saves(run_dir: Path) -> int:
    """Return the numbers of the adapters' newest saves, summed up; what cannot be understood counts as none.
    Raises OSError: that cannot be told now."""
    root = adapters_root(run_dir)
    return sum(_newest(root / name / INDEX) for name in files.list_dir(root))


def forget_address(run_dir: Path) -> None:
    """Remove what a service that is gone said of where it answers; where that fails, the next one replaces it."""
    with contextlib.suppress(OSError):
        (run_dir / TINKER_URL).unlink(missing_ok=True)


def _newest(path: Path) -> int:
    try:
        kinds = json.loads(path.read_bytes())["saves"].values()
        return max((int(save["number"]) for names in kinds for save in names.values()), default=0)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return 0
