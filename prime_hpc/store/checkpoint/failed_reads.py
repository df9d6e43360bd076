"""First readings of files that were wrong: each is noted, and believed when it is wrong again minutes later.

A first reading that is wrong may be a cache of this node, or a server in the middle of its failover; an attempt that
believed it would go back to an older checkpoint. `FailedReads` keeps first readings within a process. A trainer rank
that finds another sum than the manifest's notes it in `<run>/doubts/`, and ends its attempt; the next attempt reads
that file again.
"""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from prime_hpc.store.errors import ArtifactError, InDoubt, StoreError
from prime_hpc.store.io import files
from prime_hpc.store.io.file_age import file_age_s
from prime_hpc.store.manifest import Manifest, check_file
from prime_hpc.store.run_paths import RunPaths

FOLDER = "doubts"


@dataclass(frozen=True)
class FailedRead:
    """One file of a checkpoint that a rank read, and that was not what its manifest says."""

    step: int
    digest: str
    """Of the checkpoint's manifest: a later one of the same step is another."""
    name: str
    found: str
    time: float
    """Of the rank's node, for people: clocks of nodes differ, so its age is its file's."""


def record_failed_read(paths: RunPaths, step: int, manifest: Manifest, name: str, error: ArtifactError) -> None:
    """Note durably that a file of a checkpoint was not what it should be.
    Raises StoreError: not writable, disk full."""
    folder = paths.root / FOLDER
    files.make_dir(folder)
    failed = FailedRead(step, manifest.digest, name, str(error), time.time())
    files.write_atomic(folder / f"step_{step}-{files.unique_suffix()}.json", json.dumps(asdict(failed)).encode())


def list_failed_reads(paths: RunPaths) -> dict[Path, FailedRead]:
    """All that ranks noted, by the file that says so. Raises OSError: they cannot be read now."""
    found = {}
    for name in files.list_dir(paths.root / FOLDER):
        if not name.endswith(".json"):
            continue
        path = paths.root / FOLDER / name
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # torn by a power cut: the rank reads again
            found[path] = FailedRead(**json.loads(path.read_bytes()))
    return found


def clear_failed_reads(paths: RunPaths) -> None:
    """Forget what was noted: this attempt has read it again, and decided. That it cannot does no harm."""
    with contextlib.suppress(OSError, StoreError):
        files.remove_tree(paths.root / FOLDER)


class FailedReads:
    """First readings, and when they were; shared by all tries of one start."""

    def __init__(self, recheck_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`recheck_s`: seconds between the first reading and the one that is believed."""
        self._recheck_s, self._clock = recheck_s, clock
        self._first: dict[Path, float] = {}

    def confirm(self, error: ArtifactError, since: float | None = None) -> None:
        """Return where this error is the second one of its file; it is believed then.
        `since`: when it was read first, by this process's clock, where that was noted.
        Raises InDoubt: it is the first, or the first is too short ago."""
        now = self._clock()
        first = min(self._first.setdefault(error.file, now), since if since is not None else now)
        left = first + self._recheck_s - now
        if left > 0:
            raise InDoubt(error.file, f"expected {error.expected}, found {error.found}", min(left, self._recheck_s))

    def read_again(self, paths: RunPaths, step: int, directory: Path, manifest: Manifest) -> None:
        """Read the files of a checkpoint that a rank doubted.

        Raises:
            ArtifactError: one is broken: proved.
            InDoubt: it is too early to tell.
            Unreadable: it cannot be read now.
        """
        for note, failed in list_failed_reads(paths).items():
            if failed.step != step or failed.digest != manifest.digest or failed.name not in manifest.files:
                continue
            try:
                check_file(directory / failed.name, manifest.files[failed.name], deep=True)
            except ArtifactError as error:
                self.confirm(error, since=self._clock() - _age_s(note))
                raise


def _age_s(note: Path) -> float:
    try:
        return max(0.0, file_age_s(note))
    except OSError:  # then it counts from now
        return 0.0
