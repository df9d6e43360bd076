"""Listings that say so when they cannot be made.

`Path.glob` and `Path.rglob` pass over a folder that may not be listed, and from Python 3.12 on over one that could not
be (an I/O error, a stale handle): what lies in it looks as if it were not there.
"""

import os
from pathlib import Path


def list_tree(folder: Path) -> list[Path]:
    """Return everything below a folder, sorted; links to folders are not followed.

    Raises:
        OSError: a folder in it cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    levels = os.walk(folder, onerror=fail)
    return sorted(Path(above, name) for above, folders, files in levels for name in (*folders, *files))
