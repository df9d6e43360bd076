"""Checkpoints: trainer and orchestrator state of one step, made one by a manifest that comes last.

`checkpoints/step_<n>/` holds `trainer/` (torch DCP, written by all ranks), `orchestrator/state.json` (the state that
was stored with batch n) and `manifest.json`. Trainer rank 0 commits it and prunes old ones; the supervisor resolves
what to resume from. Version n of the weights belongs to it and is kept as long as it exists (`weights.prune_weights`).

`<run>/saved.json` names the newest that was committed: whoever finds none in its place knows by it that there was one,
and does not start over.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from loguru import logger

from prime_hpc.store import batches
from prime_hpc.store.artifact import commit_stage, discard, is_artifact, move_aside, stage_dir
from prime_hpc.store.errors import ArtifactError, StoreError, Unreadable
from prime_hpc.store.io import files
from prime_hpc.store.io.files import FileEntry
from prime_hpc.store.manifest import Manifest, check_file, read_manifest, verify_artifact
from prime_hpc.store.run_paths import RunPaths, check_incarnation, incarnation_starts, is_late, list_steps

TRAINER = "trainer"
ORCHESTRATOR_STATE = "orchestrator/state.json"
KIND = "checkpoint"
_HASH_THREADS = 8
SAVED = "saved.json"


@dataclass(frozen=True)
class CheckpointInfo:
    """A whole checkpoint.
    `step`: updates that it has seen; the run goes on with step + 1."""

    step: int
    path: Path
    manifest: Manifest

    @property
    def trainer_dir(self) -> Path:
        """The directory that torch DCP loads from."""
        return self.path / TRAINER

    @property
    def orchestrator_state(self) -> Path | None:
        """The orchestrator's half; None for SFT."""
        return self.path / ORCHESTRATOR_STATE if ORCHESTRATOR_STATE in self.manifest.files else None


def commit_checkpoint(
    run: RunPaths,
    step: int,
    trainer_files: Mapping[str, FileEntry],
    batch_dir: Path | None,
    *,
    incarnation: int = 0,
    meta: Mapping[str, Any] | None = None,
) -> Manifest:
    """Join both halves and commit them as one checkpoint. Trainer rank 0, after all ranks wrote and summed: DCP wrote
    into `trainer` of what `artifact.prepare_stage(run.checkpoint_step(step), incarnation)` has made.

    Args:
        trainer_files: entries of `trainer/...` from all ranks (`artifact.hash_files`).
        batch_dir: artifact of batch n, whose orchestrator state becomes `orchestrator/state.json`; None for SFT.
        meta: plain JSON, e.g. world size and model name.

    Raises:
        ArtifactError: batch n or its state is broken.
        StoreError: no trainer files, disk full, fenced (see `artifact.commit_stage`).
    """
    final = run.checkpoint_step(step)
    stage = stage_dir(final, incarnation)
    if not any(name.startswith(f"{TRAINER}/") for name in trainer_files):
        raise StoreError(f"{stage}: holds no files under {TRAINER}/, nothing to resume from would be saved")
    entries = dict(trainer_files)
    if batch_dir is not None:
        content = batches.read_state_bytes(batch_dir)
        files.make_dir((stage / ORCHESTRATOR_STATE).parent)
        entries[ORCHESTRATOR_STATE] = files.write_file(stage / ORCHESTRATOR_STATE, [content])
    manifest = Manifest(KIND, step, step, TRAINER, incarnation, entries, dict(meta or {}))
    committed = commit_stage(stage, final, manifest, run=run)
    note_saved(run, step, incarnation)
    return committed


def newest_first(root: Path, *, deep: bool = False) -> Iterator[CheckpointInfo]:
    """Whole checkpoints below `root`, newest first, each checked in its turn; others are skipped with a warning.

    For those who look. An attempt that begins takes `newest.choose_newest`.

    Args:
        root: directory of `step_<n>` directories.
        deep: check sums too, not only sizes.

    Raises:
        Unreadable, OSError: whether one is whole cannot be told now.
    """
    for step in reversed(list_steps(root, digits=0)):
        try:
            info = load_checkpoint(root, step, deep=deep)
        except ArtifactError as error:
            logger.warning(f"checkpoint of step {step} is skipped: {error}")
        else:
            yield info


def list_checkpoints(root: Path, *, deep: bool = False) -> list[CheckpointInfo]:
    """Whole checkpoints below `root`, oldest first; others are skipped with a warning that says why.
    `deep`: check sums too, not only sizes."""
    return list(newest_first(root, deep=deep))[::-1]


def resolve_resume(root: Path, which: Literal["latest"] | int, *, deep: bool = True, small: int = 0) -> CheckpointInfo:
    """Return the checkpoint to resume from.

    Args:
        which: a step, or `latest`: the newest one that is whole.
        deep: check sums too, not only sizes.
        small: of the step, check the sums of files of at most so many bytes in any case.

    Raises:
        StoreError: there is none (lists the steps that exist), or the one asked for is not whole (says why).
        Unreadable, OSError: that cannot be told now.
    """
    steps = list_steps(root, digits=0)
    listed = ", ".join(map(str, steps)) if steps else "none"
    if which == "latest":
        for info in newest_first(root, deep=deep):
            return info
        raise StoreError(f"{root}: no whole checkpoint to resume from (steps there: {listed})")
    if which not in steps:
        raise StoreError(f"{root}: no checkpoint of step {which} (steps there: {listed})")
    try:
        return load_checkpoint(root, which, deep=deep, small=small)
    except ArtifactError as error:
        others = ", ".join(str(info.step) for info in list_checkpoints(root) if info.step != which) or "none"
        raise StoreError(f"checkpoint of step {which} is damaged: {error} (other whole ones: {others})") from error


def prune_checkpoints(
    paths: RunPaths, keep_last: int | None, keep_interval: int | None = None, incarnation: int = 0
) -> list[int]:
    """Delete the checkpoints that retention gives up. One process calls it: trainer rank 0, after a commit or a resume.

    Kept are the newest `keep_last` whole checkpoints with everything newer than the oldest of them, and the first one
    at or after each multiple of `keep_interval`: that of the multiple itself only where the run saves there. Nothing is
    deleted before so many newer ones are whole. A directory without a manifest is somebody else's and stays.

    Args:
        keep_last: at least 1; None: 1 where `keep_interval` is given, else everything is kept.
        keep_interval: at least 1, or None.

    Raises:
        FencedError: a newer attempt has begun.
        ValueError: a number below 1.
    """
    if keep_last is None and keep_interval is None:
        return []
    if (keep_last is not None and keep_last < 1) or (keep_interval is not None and keep_interval < 1):
        raise ValueError(f"keep_last ({keep_last}) and keep_interval ({keep_interval}) must be at least 1")
    check_incarnation(paths, incarnation)
    steps = list_steps(paths.checkpoints, digits=0)
    oldest_kept = oldest_of_newest_whole(paths, steps, keep_last or 1, paths.checkpoint_step)
    if oldest_kept is None:
        return []
    interval = keep_interval or sys.maxsize
    firsts = {step // interval: step for step in reversed(steps) if step >= interval}
    to_delete = [step for step in steps if step < oldest_kept and firsts.get(step // interval) != step]
    removed = []
    for step in to_delete:
        if is_artifact(paths.checkpoint_step(step)):
            discard(paths, paths.checkpoint_step(step), incarnation)
            removed.append(step)
    if removed:
        logger.debug(f"removed checkpoints of steps {removed}")
    return removed


def move_checkpoints_aside(paths: RunPaths, step: int, incarnation: int = 0) -> list[Path]:
    """Take the checkpoints of steps above `step` out of the way of a run that goes on there; nothing is deleted.

    What it was that an attempt did not go on from (damaged, too late, newer than what was asked for), its owner
    decides.
    Returns where they are now.
    """
    after = [n for n in list_steps(paths.checkpoints, digits=0) if n > step]
    moved = [move_aside(paths, paths.checkpoint_step(n), incarnation) for n in reversed(after)]
    return [path for path in moved if path is not None]


def load_checkpoint(root: Path, step: int, *, deep: bool = False, small: int = 0) -> CheckpointInfo:
    """One checkpoint, its manifest and the sizes of its files checked.

    Args:
        deep: check all sums too.
        small: check the sums of files of at most so many bytes.

    Raises:
        ArtifactError: it is not whole.
        Unreadable: that cannot be told now.
    """
    path = RunPaths(root.parent, checkpoints_root=root).checkpoint_step(step)
    manifest = read_manifest(path)
    if manifest.kind != KIND or manifest.step != step:
        raise ArtifactError(path, f"the checkpoint of step {step}", f"a {manifest.kind} of step {manifest.step}")
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        checks = [
            pool.submit(check_file, path / n, entry, deep=deep or entry.size <= small)
            for n, entry in manifest.files.items()
        ]
        for check in checks:
            check.result()
    return CheckpointInfo(step, path, manifest)


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint."""

    step: int
    incarnation: int
    """Attempt that committed it."""


def note_saved(paths: RunPaths, step: int, incarnation: int) -> None:
    """Write it down, after the commit. That it cannot be, or that a newer attempt has begun, is no reason to call a
    whole checkpoint unsaved."""
    try:
        check_incarnation(paths, incarnation)
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


def oldest_of_newest_whole(
    paths: RunPaths, steps: Sequence[int], keep_last: int, path_of: Callable[[int], Path]
) -> int | None:
    """Return the lowest of the newest `keep_last` steps whose artifact is whole; None where there are fewer. Asked
    before anything is deleted.

    What a fenced attempt left late, or does not fit its manifest, does not count: retention that counted it would
    delete what the run can still go on from.

    Args:
        steps: sorted, of the artifacts on disk.
        keep_last: at least 1.
        path_of: step -> its artifact.
    """
    whole, starts = 0, incarnation_starts(paths)
    for step in reversed(steps):
        path = path_of(step)
        try:
            manifest = verify_artifact(path, deadline_s=1.0)
            if is_late(step, manifest.incarnation, starts):
                continue
        except (ArtifactError, Unreadable) as error:
            logger.warning(
                f"{path.parent.name}/{path.name} is not known to be whole and does not count as kept: {error}"
            )
            continue
        whole += 1
        if whole == keep_last:
            return step
    return None
