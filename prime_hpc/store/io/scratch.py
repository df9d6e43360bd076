"""Temporary folders of a node that go with their owners, also where these were killed: the next owner removes them."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

LOCK_NAME, UNLOCKED_NAME = "alive", "starting"


def make_scratch(parent: Path, prefix: str) -> Path:
    """Return a new folder below `parent`; leftovers of dead owners are removed.

    A folder is its owner's while a lock on the file `alive` in it is held: by this process and by those that it forks.
    So the folder of a killed one is recognised whatever process-id namespace it lived in.

    Owners that start together meet the same leftovers, and in a shared temporary directory anything else may have
    such a name: what cannot be looked at or removed is left there, and ends no start.

    Args:
        parent: directory on a file system of this node.
        prefix: of the names of such folders, all of which have such a lock or are left alone.
    """
    remove_leftovers(parent, prefix)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    hold(scratch)
    return scratch


def remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove this user's folders whose owners are gone."""
    for stale in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if stale.stat().st_uid == os.getuid() and not is_held(stale):
                shutil.rmtree(stale, ignore_errors=True)


def hold(folder: Path) -> None:
    """Keep a folder for as long as this process and those that it forks live. It may have several owners: it is the
    last one's to call this."""
    # Never closed: the lock must live exactly as long as the processes.
    own = folder / f"{UNLOCKED_NAME}-{os.getpid()}"
    descriptor = os.open(own, os.O_CREAT | os.O_RDWR, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: `is_held` then says that it is
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    # Renamed once it is held: who looks in between would take this folder for a dead one's.
    own.rename(folder / LOCK_NAME)


def is_held(folder: Path) -> bool:
    """Return whether an owner of a folder lives, or nobody can say."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR)
    except OSError:
        return True  # an owner that is just making its folder, or no such folder at all
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # BlockingIOError, or a file system without locks
        return True
    finally:
        os.close(descriptor)
    return False
