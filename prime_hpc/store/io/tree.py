"""Listings that say so when they cannot be made.

`Path.glob` and `Path.rglob` pass over a folder that may not be listed, and from Python 3.12 on over one that could not
be (an I/O error, a stale handle): what lies in it looks as if it were not there.
"""

import os
from collections.abc import Callable
from pathlib import Path


def list_tree(folder: Path, enters: Callable[[str], bool] = lambda name: True) -> list[Path]:
    """Return everything below a folder, sorted; links to folders are not followed.
    `enters`: by a folder's name, whether what is below it is listed, too.
    Raises OSError: a folder in it cannot be listed."""

    def fail(error: OSError) -> None:
        raise error

    found: list[Path] = []
    for above, folders, files in os.walk(folder, onerror=fail):
        found += [Path(above, name) for name in (*folders, *files)]
        folders[:] = filter(enters, folders)
    return sorted(found)
