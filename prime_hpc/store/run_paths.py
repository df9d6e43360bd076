"""Names of everything in a run directory, and the incarnations that fence its attempts.

Every role builds its paths here; nobody joins path strings by hand. The supervisor claims an incarnation at the
start of each attempt; writers carry it and are refused once a newer one exists.
"""

import os
import pwd
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from prime_hpc.config.run_files import ATTEMPTS_JSONL, LOCK_JSON, RUN_YAML
from prime_hpc.observe.metric_files import metrics_file
from prime_hpc.store.errors import FencedError, StoreError
from prime_hpc.store.io import files

_NOBODY = 65534
_STEP = re.compile(r"step_(\d+)")
_NUMBER = re.compile(r"\d+")
_START = re.compile(r"(\d+)\.from_(\d+)")
_MAX_CLAIMS = 1000
"""Attempts racing for one number; far above anything real, so that a broken file system ends the loop."""


@dataclass(frozen=True)
class RunPaths:
    """Paths below one run directory.
    `checkpoints_root`: where checkpoints live when not in `<root>/checkpoints` (`ckpt.path`)."""

    root: Path
    checkpoints_root: Path | None = None

    @property
    def run_yaml(self) -> Path:
        """The resolved experiment."""
        return self.root / RUN_YAML

    @property
    def lock_json(self) -> Path:
        """Code version, packages and command line of the run."""
        return self.root / LOCK_JSON

    @property
    def attempts(self) -> Path:
        """One JSON line per attempt."""
        return self.root / ATTEMPTS_JSONL

    @property
    def rollouts(self) -> Path:
        """Batches."""
        return self.root / "rollouts"

    @property
    def carried_groups(self) -> Path:
        """Groups of rollouts that a stopped attempt had complete, for the next one."""
        return self.rollouts / "carried.npz"

    @property
    def archived_rollouts(self) -> Path:
        """Batches that were trained on, compressed (`store/batch_archive.py`)."""
        return self.root / "rollouts_packed"

    @property
    def reference_sums(self) -> Path:
        """Log-probabilities of preference pairs under the weights that training began with."""
        return self.root / "reference.npz"

    @property
    def weights(self) -> Path:
        """Weight versions."""
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints."""
        return self.checkpoints_root or self.root / "checkpoints"

    @property
    def leases(self) -> Path:
        """Leases: what each reader still needs."""
        return self.root / "leases"

    @property
    def incarnation(self) -> Path:
        """One empty file per attempt of the run, named by its number."""
        return self.root / "incarnation"

    def logs(self, attempt: int, role: str) -> Path:
        """Directory of one role's logs in one attempt."""
        return self.root / "logs" / f"attempt_{attempt}" / role

    def metrics(self, role: str) -> Path:
        """Metrics file of one role, one JSON object a line."""
        return metrics_file(self.root, role)

    def rollouts_step(self, step: int) -> Path:
        """Directory of batch `step`."""
        return self.rollouts / step_name(step)

    def archived_step(self, step: int) -> Path:
        """Directory of batch `step` once it is compressed."""
        return self.archived_rollouts / step_name(step)

    def weights_step(self, version: int) -> Path:
        """Directory of weight version `version`."""
        return self.weights / step_name(version)

    def failed_step(self, step: int) -> Path:
        """Directory of a step that was refused: a run directory of its own (`trainer/replay`)."""
        return self.root / "failed" / step_name(step)

    def checkpoint_step(self, step: int) -> Path:
        """Directory of the checkpoint after step `step`."""
        return self.checkpoints / step_name(step, 0)


def step_name(number: int, digits: int = 6) -> str:
    """Name of the directory of a step or version: `step_<n>`, padded to `digits`."""
    return f"step_{number:0{digits}d}"


def parse_step(name: str, digits: int = 6) -> int | None:
    """Return the number in a directory name `step_<n>` padded to `digits`; None for any other name (`step_7.bak`)."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    number = int(match.group(1))
    return number if name == step_name(number, digits) else None


def list_steps(parent: Path, digits: int = 6) -> list[int]:
    """Sorted numbers of the `step_<n>` entries of a directory; [] where it does not exist.

    Artifacts get their name by one rename when they are whole, so a name is enough: no file is opened.
    `digits`: padding of the numbers; 0 for checkpoints.
    """
    numbers = (parse_step(name, digits) for name in files.list_dir(parent))
    return sorted(n for n in numbers if n is not None)


def current_incarnation(paths: RunPaths) -> int:
    """Return the number of the run's newest attempt; 0 where none was ever claimed."""
    # opendir revalidates the directory on NFS, a lookup by name could be answered from a cached miss.
    return newest_incarnation(files.list_dir(paths.incarnation))


def newest_incarnation(names: Iterable[str]) -> int:
    """Return the highest number among the names in `incarnation/`; 0 where there is none."""
    return max((int(name) for name in names if _NUMBER.fullmatch(name)), default=0)


def claim_incarnation(paths: RunPaths, after: int | None = None) -> int:
    """Begin a new attempt: takes the next number atomically (exclusive create, decided by the file server).

    Args:
        after: the newest attempt when the caller looked at the run; what it decided then holds only if no other has
            begun since. None: whichever number is next.

    Raises:
        FencedError: another attempt has begun since `after`; nothing is changed, and it is not fenced.
        StoreError: the directory is not writable or the disk is full.
    """
    files.make_dir(paths.incarnation)
    if after is not None:
        if current_incarnation(paths) > after or not files.create_exclusive(paths.incarnation / f"{after + 1:06d}"):
            raise FencedError(
                f"{paths.root}: another attempt of this run has begun at the same moment; it goes on alone"
            )
        files.fsync_dir(paths.incarnation)
        return after + 1
    number = current_incarnation(paths) + 1
    for candidate in range(number, number + _MAX_CLAIMS):
        if files.create_exclusive(paths.incarnation / f"{candidate:06d}"):
            files.fsync_dir(paths.incarnation)
            return candidate
    raise FencedError(f"{paths.incarnation}: {_MAX_CLAIMS} numbers in a row were taken by others while claiming one")


def record_start(paths: RunPaths, incarnation: int, step: int) -> None:
    """Note durably that an attempt goes on from `step`, before it changes anything. Whoever claimed it only.

    One that was held up notes nothing: by its word, what the newer attempt goes on from would be late.

    Raises:
        FencedError: a newer attempt has begun.
        StoreError: the directory is not writable or the disk is full.
    """
    check_incarnation(paths, incarnation)
    note = paths.incarnation / f"{incarnation:06d}.from_{step}"
    is_new = files.create_exclusive(note)
    try:
        check_incarnation(paths, incarnation)
    except FencedError:
        if is_new:
            files.remove_file(note)
        raise
    files.fsync_dir(paths.incarnation)


def incarnation_starts(paths: RunPaths, names: Iterable[str] | None = None) -> dict[int, int]:
    """Incarnation -> the step that it went on from; attempts that changed nothing are not in it.
    `names`: in `incarnation/`, where they were listed already."""
    found = (_START.fullmatch(name) for name in (files.list_dir(paths.incarnation) if names is None else names))
    return {int(match.group(1)): int(match.group(2)) for match in found if match is not None}


def is_late(step: int, incarnation: int, starts: Mapping[int, int]) -> bool:
    """Return whether an artifact of `step` came after a newer attempt had begun below it: a fenced attempt's, which
    counts as not there. What a still newer attempt went on from is the run's own, whoever wrote it.
    `starts`: from `incarnation_starts`."""
    below = max((number for number, start in starts.items() if number > incarnation and start < step), default=0)
    return below > max((number for number, start in starts.items() if start == step), default=0)


def why_late(step: int, incarnation: int, starts: Mapping[int, int]) -> str | None:
    """Say why an artifact is late; None: it is not. See `is_late`."""
    words = f"incarnation {incarnation} wrote it after a newer attempt had begun below step {step}"
    return words if is_late(step, incarnation, starts) else None


def other_owner(run_dir: Path) -> str | None:
    """Say which other user's a run directory is; None: this user's.

    The user that no user maps to (nobody: root on a squashed NFS export) is nobody else.
    """
    owner, own = run_dir.stat().st_uid, os.geteuid()
    if owner in (own, 0, _NOBODY):
        return None
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = "unknown"
    return f"{run_dir} belongs to another user ({name}, uid {owner}; this is uid {own})"


def refuse_other_owner(run_dir: Path) -> None:
    """Raise a StoreError where a run directory is another user's; nothing in it is read or changed."""
    if (theirs := other_owner(run_dir)) is not None:
        raise StoreError(
            f"{theirs}: choose another --name or output_dir, and start from one of its checkpoints with "
            "--ckpt.resume-step PATH"
        )


def check_incarnation(paths: RunPaths, incarnation: int) -> int:
    """Refuse to go on as an old attempt; returns the newest one, which is lower only where the directory is gone.
    Raises FencedError: an attempt with a higher number has begun."""
    newest = current_incarnation(paths)
    if incarnation < newest:
        raise FencedError(
            f"{paths.root}: this process belongs to incarnation {incarnation}, but incarnation {newest} has begun; "
            "it may not write any more. Another command, or a job that came back, has taken the run over (`prime-hpc "
            "status` shows it)"
        )
    return newest
