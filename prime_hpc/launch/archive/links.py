"""Symbolic links of a run: one that stays within it goes into the archive as a link, and comes out as one."""

import os
from pathlib import Path


def stays_within(link: Path, root: Path) -> bool:
    """Return whether a link leads to somewhere below `root`, wherever that is moved to.
    `link`: a symbolic link below `root`; what it leads to need not be there."""
    target, home = link.readlink(), os.path.realpath(root)
    if target.is_absolute():
        return False
    # by its words and by the links on its way: `tar` goes by the one, the kernel by the other
    named = os.path.normpath(os.path.join(os.path.realpath(link.parent), target))  # noqa: PTH118
    return all(Path(path).is_relative_to(home) for path in (named, os.path.realpath(link)))
