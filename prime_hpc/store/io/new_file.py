"""A file that somebody else's code writes by its path, and that is there whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from prime_hpc.store.io import files
from prime_hpc.store.io.disk import disk_errors


@contextlib.contextmanager
def new_file(target: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield the path of a file to write beside `target`, whose name it gets in one rename, or is removed.

    Args:
        target: may be there: it is replaced.
        durable: have it on the disk first; a cache, which can be made again, need not be.

    Raises:
        StoreError: the disk is full, not writable or broken.
    """
    files.make_dir(target.parent)
    partial = target.with_name(f".tmp-{files.unique_suffix()}-{target.name}")  # numpy looks at the end of a name
    try:
        with disk_errors(target):
            yield partial
            if durable:
                with partial.open("rb") as file:
                    os.fsync(file.fileno())
        files.rename(partial, target)
        if durable:
            files.fsync_dir(target.parent)
    finally:
        partial.unlink(missing_ok=True)
