"""When a site's purge of its scratch file system would take files: `purge_days`, `purge_by` of its profile.

Looked at are the times of the files as the file system tells them; nothing is read, so nothing is made younger.
"""

import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.config.site import read_site

DAY_S = 86_400.0
SOON_DAYS = 7.0
"""So long before it happens people are warned; of a site that purges earlier half of its days."""
MOST_FILES = 20_000
"""More are not looked at: on a busy file system that alone takes a minute."""
_NEVER = (".trash-",)


@dataclass(frozen=True)
class Purge:
    """The first file of a directory that the site would delete."""

    path: Path
    when: float
    """Epoch seconds."""
    rule: str
    """The site's rule, for people."""

    @property
    def date(self) -> str:
        """Local date."""
        return time.strftime("%Y-%m-%d", time.localtime(self.when))

    def is_before(self, when: float) -> bool:
        """Return whether it happens by then, or has been due already."""
        return self.when <= when


def warn_s(site: SiteConfig) -> float:
    """Return how long before a purge people are warned, in seconds."""
    return min(SOON_DAYS, (site.purge_days or 0.0) / 2) * DAY_S


def first_purge(folder: Path, site: SiteConfig) -> Purge | None:
    """Return what would be purged first of a directory or file; None where nothing ever is.
    `folder`: it, and all that lies below it."""
    if site.purge_days is None or not _is_on_scratch(folder, site):
        return None
    oldest, first, count = float("inf"), folder, 0
    for path, about in _files(os.fspath(folder)):
        then = about.st_atime if site.purge_by == "atime" else about.st_mtime
        if then < oldest:
            oldest, first = then, Path(path)
        count += 1
        if count >= MOST_FILES:
            break
    if not count:
        return None
    what = "that nobody has read" if site.purge_by == "atime" else "that have not changed"
    rule = f"{site.name} deletes files {what} for {site.purge_days:g} days"
    return Purge(first, oldest + site.purge_days * DAY_S, rule)


def purge_warning(run_dir: Path) -> str | None:
    """Return what to tell people of a run of which files are purged soon; None where nothing is."""
    try:
        site = read_site(run_dir)
    except (ConfigError, OSError):  # damaged: whoever needs it says so
        return None
    purge = first_purge(run_dir, site)
    if purge is None or not purge.is_before(time.time() + warn_s(site)):
        return None
    first = os.path.relpath(purge.path, run_dir)
    archive = f"prime-hpc archive {shlex.quote(str(run_dir))} DESTINATION"
    return f"from {purge.date} on ({purge.rule}; first {first}): `{archive}` keeps the run"


def _is_on_scratch(folder: Path, site: SiteConfig) -> bool:
    if site.scratch is None:
        return True
    return folder.absolute().is_relative_to(site.scratch) or folder.resolve().is_relative_to(site.scratch.resolve())


def _files(folder: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the regular files of a tree with their times; what vanishes meanwhile, or is not ours to see, is passed."""
    try:
        with os.scandir(folder) as entries:
            found = [(entry.path, entry.is_dir(follow_symlinks=False), entry) for entry in entries]
    except NotADirectoryError:
        yield folder, os.stat(folder)  # noqa: PTH116 - a name as scandir gives it
        return
    except OSError:
        return
    for path, is_dir, entry in found:
        if is_dir and not entry.name.startswith(_NEVER):
            yield from _files(path)
        elif not is_dir:
            try:
                about = entry.stat(follow_symlinks=True)  # a hub's cache has links to its files
            except OSError:
                continue
            yield path, about
