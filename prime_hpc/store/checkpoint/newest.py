"""The checkpoint from which a run goes on: the newest whole one, and never one that is older than it must be.

A checkpoint is passed over only where it is proved broken (read twice, `failed_reads`), where a fenced attempt wrote it
too late, or where it is of another kind. Nobody starts over, or goes back, because something could not be read or was
not there to be listed: what the run saved is written down (`saved.json`, `attempts.jsonl`, the starts of its attempts).
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from loguru import logger

from prime_hpc.store.checkpoint.checkpoints import CheckpointInfo, load_checkpoint, read_saved
from prime_hpc.store.checkpoint.failed_reads import FailedReads
from prime_hpc.store.errors import ArtifactError, StoreError, Unreadable
from prime_hpc.store.io import files
from prime_hpc.store.run_paths import RunPaths, incarnation_starts, list_steps, newest_incarnation, why_late

POINTER = "checkpoints.json"
"""In the run directory: where its checkpoints are, when that is outside."""
SMALL = 1 << 20
"""Bytes of a file whose sum is checked before an attempt begins; the others' by the ranks that load them."""


@dataclass
class Choice:
    """The checkpoint to go on from."""

    info: CheckpointInfo | None
    passed_over: dict[int, str] = field(default_factory=dict)
    """Newer steps -> why not."""


def expected_step(paths: RunPaths, claims: Iterable[tuple[int, int]] = (), incarnation: int = 0) -> int:
    """Return the step at or above which the run must have a checkpoint, by all that is written down; 0: none.

    Args:
        claims: (incarnation, step that was saved when it ended), from `attempts.jsonl`.
        incarnation: the newest that the caller knows of.

    Raises:
        OSError, StoreError: it cannot be read now, or is not what was written.
    """
    starts = starts_of(paths, incarnation)
    saved = read_saved(paths)
    told = [*claims, *([(saved.incarnation, saved.step)] if saved is not None else [])]
    step = 0
    for incarnation in sorted({*starts, *(number for number, _ in told)}):
        step = starts.get(incarnation, step)  # where it began, by what it knew, everything newer is given up
        step = max([step, *(saved_step for number, saved_step in told if number == incarnation)])
    return step


def choose_newest(
    paths: RunPaths,
    failed_reads: FailedReads,
    *,
    expected: int,
    incarnation: int = 0,
    unfit: Callable[[CheckpointInfo], str | None] = lambda info: None,
) -> Choice:
    """Return the newest whole checkpoint.

    Args:
        failed_reads: first readings so far.
        expected: from `expected_step`.
        incarnation: the newest that the caller knows of; a directory that does not list it is not all there.
        unfit: why a whole one is none to go on from.

    Raises:
        Unreadable: something cannot be read, or is not there and must be; InDoubt: or has to be read once more.
        StoreError: what must be there is proved broken, and nothing else is.
    """
    starts = starts_of(paths, incarnation)
    steps = list_steps(paths.checkpoints, digits=0)
    choice = Choice(None)
    for step in reversed(steps):
        try:
            info = load_checkpoint(paths.checkpoints, step, small=SMALL)
            why = why_late(step, info.manifest.incarnation, starts) or unfit(info)
            if why is None:
                failed_reads.read_again(paths, step, info.path, info.manifest)
                choice.info = info
                break
        except ArtifactError as error:
            failed_reads.confirm(error)
            why = f"{error} (read twice)"
        choice.passed_over[step] = why
    _must_be_there(paths, choice, expected, steps)
    for step, why in choice.passed_over.items():
        logger.warning(f"checkpoint of step {step} is skipped: {why}")
    return choice


def require(paths: RunPaths, choice: Choice) -> CheckpointInfo:
    """Return the checkpoint that was chosen. Raises StoreError: there is none; says why."""
    if choice.info is not None:
        return choice.info
    reasons = "; ".join(f"step {step}: {why}" for step, why in choice.passed_over.items())
    reasons = reasons or "none is there: a run without a section `ckpt` saves none"
    raise StoreError(f"{paths.checkpoints}: no whole checkpoint to resume from ({reasons})")


def starts_of(paths: RunPaths, incarnation: int) -> dict[int, int]:
    """`incarnation_starts` of a directory that lists all attempts.
    Raises Unreadable: attempt `incarnation` has begun, and is not listed: its file system went away."""
    names = files.list_dir(paths.incarnation)
    if newest_incarnation(names) < incarnation:
        raise Unreadable(
            paths.incarnation, f"incarnation {incarnation} of this run is not listed there: is it mounted here?"
        )
    return incarnation_starts(paths, names)


def _must_be_there(paths: RunPaths, choice: Choice, expected: int, steps: list[int]) -> None:
    """Refuse to go back below what was saved for want of a listing."""
    if choice.info is not None and choice.info.step >= expected:
        return
    if choice.info is not None and max(choice.passed_over, default=0) >= expected:
        return  # it is there, and looked at
    if not expected:
        return
    listed = ", ".join(map(str, steps)) or "none"
    if max(choice.passed_over, default=0) < expected:
        _elsewhere(paths, expected)
        raise Unreadable(
            paths.checkpoints,
            f"the run saved a checkpoint of step {expected}, and it is not listed (steps there: {listed}); is its file "
            "system mounted here? Should it have been deleted on purpose: name one that is left with "
            "--ckpt.resume-step N, or start over with --clean",
        )
    reasons = "; ".join(f"step {step}: {why}" for step, why in choice.passed_over.items())
    raise StoreError(
        f"{paths.checkpoints}: no checkpoint is left to go on from ({reasons}). The run does not start over by itself: "
        "restore one, or start over with --clean"
    )


def _elsewhere(paths: RunPaths, expected: int) -> None:
    """Raise a StoreError where the checkpoints lie in another directory than the config names."""
    if not files.list_dir(paths.root):
        raise Unreadable(paths.root, "it is listed as empty: is it mounted here?")
    known = read_pointer(paths) or paths.root / "checkpoints"
    if known.absolute() == paths.checkpoints.absolute():
        return
    raise StoreError(
        f"ckpt.path is {paths.checkpoints}, but this run's checkpoints (newest: step {expected}) lie in {known}: set "
        f"ckpt.path back, take one along with ckpt.resume_step = {known}, or start over with --clean"
    )


def read_pointer(paths: RunPaths) -> Path | None:
    """Read where the run's checkpoints are, when they were outside its directory in an earlier attempt.

    Raises:
        OSError: it cannot be read now.
        StoreError: it is not what was written.
    """
    path = paths.root / POINTER
    if POINTER not in files.list_dir(paths.root):
        return None
    try:
        return Path(json.loads(path.read_bytes())["path"])
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is not what was written there ({error}): restore or delete it") from error
