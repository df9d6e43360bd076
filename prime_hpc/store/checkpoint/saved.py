"""`<run>/saved.json`: the newest checkpoint that was committed.

Whoever finds none in its place knows by it that there was one, and does not start over.
"""

import json
from dataclasses import asdict, dataclass

from loguru import logger

from prime_hpc.store.errors import StoreError
from prime_hpc.store.io import files
from prime_hpc.store.run_paths import RunPaths

SAVED = "saved.json"


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint."""

    step: int
    incarnation: int
    """Attempt that committed it."""


def note_saved(paths: RunPaths, step: int, incarnation: int) -> None:
    """Write it down, after the commit. That it cannot be is no reason to call a whole checkpoint unsaved."""
    try:
        files.write_atomic(paths.root / SAVED, json.dumps(asdict(Saved(step, incarnation))).encode())
    except (StoreError, OSError) as error:
        logger.warning(f"{paths.root / SAVED} could not be written: {error}")


def read_saved(paths: RunPaths) -> Saved | None:
    """Read what was noted last; None where nothing was.

    Raises:
        OSError: it cannot be read now.
        StoreError: it is not what was written.
    """
    path = paths.root / SAVED
    try:
        return Saved(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise StoreError(f"{path} is not what was written there ({error}): restore or delete it") from error
