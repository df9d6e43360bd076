"""Checkpoints: trainer and orchestrator state of one step, made one by a manifest that comes last.

`checkpoints/step_<n>/` holds `trainer/` (torch DCP, written by all ranks), `orchestrator/state.json` (the state that
was stored with batch n) and `manifest.json`. Trainer rank 0 commits it; the supervisor resolves what to resume from.
Version n of the weights belongs to it and is kept as long as it exists (`weights.prune_weights`).
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from loguru import logger

from prime_hpc.store import batches, files
from prime_hpc.store.artifact import (
    ArtifactError,
    FileEntry,
    Manifest,
    StoreError,
    check_file,
    commit_stage,
    read_manifest,
)
from prime_hpc.store.layout import RunPaths, list_steps

TRAINER = "trainer"
ORCHESTRATOR_STATE = "orchestrator/state.json"
KIND = "checkpoint"
_HASH_THREADS = 8


@dataclass(frozen=True)
class CheckpointInfo:
    """A whole checkpoint.

    Args:
        step: updates that it has seen; the run goes on with step + 1.
        path: its directory.
        manifest: what it holds.
    """

    step: int
    path: Path
    manifest: Manifest

    @property
    def trainer_dir(self) -> Path:
        """Where torch DCP loads from."""
        return self.path / TRAINER

    @property
    def orchestrator_state(self) -> Path | None:
        """The orchestrator's half; None for SFT."""
        return self.path / ORCHESTRATOR_STATE if ORCHESTRATOR_STATE in self.manifest.files else None


def commit_checkpoint(
    stage: Path,
    final: Path,
    *,
    step: int,
    trainer_files: Mapping[str, FileEntry],
    batch_dir: Path | None,
    run: RunPaths,
    incarnation: int = 0,
    meta: Mapping[str, Any] | None = None,
    writer: str = "trainer",
) -> Manifest:
    """Join both halves and commit them as one checkpoint. Trainer rank 0, after all ranks wrote and summed.

    Args:
        stage: from `artifact.prepare_stage(final, incarnation)`; DCP wrote into `stage / "trainer"`.
        final: `paths.checkpoint_step(step)`.
        step: n.
        trainer_files: entries of `trainer/...` from all ranks (`artifact.hash_files`).
        batch_dir: artifact of batch n, whose orchestrator state becomes `orchestrator/state.json`; None for SFT.
        run: the run whose incarnations fence it.
        incarnation: life of the run.
        meta: plain JSON, e.g. world size and model name.
        writer: for people.

    Raises:
        ArtifactError: batch n or its state is broken.
        StoreError: no trainer files, disk full, fenced (see `artifact.commit_stage`).
    """
    if not any(name.startswith(f"{TRAINER}/") for name in trainer_files):
        raise StoreError(f"{stage}: holds no files under {TRAINER}/, nothing to resume from would be saved")
    entries = dict(trainer_files)
    if batch_dir is not None:
        batches.read_state(batch_dir)  # verified before it is copied
        files.make_dir((stage / ORCHESTRATOR_STATE).parent)
        content = (batch_dir / batches.STATE).read_bytes()
        entries[ORCHESTRATOR_STATE] = files.write_file(stage / ORCHESTRATOR_STATE, [content])
    manifest = Manifest(
        kind=KIND,
        step=step,
        version=step,
        writer=writer,
        incarnation=incarnation,
        files=entries,
        meta=dict(meta or {}),
    )
    return commit_stage(stage, final, manifest, run=run)


def list_checkpoints(root: Path, *, deep: bool = False) -> list[CheckpointInfo]:
    """Whole checkpoints below `root`, oldest first; others are skipped with a warning that says why.

    Args:
        root: directory of `step_<n>` directories.
        deep: check sums too, not only sizes.
    """
    found = (_check(root, step, deep) for step in list_steps(root, digits=0))
    return [info for info in found if info is not None]


def resolve_resume(root: Path, which: Literal["latest"] | int, *, deep: bool = True) -> CheckpointInfo:
    """The checkpoint to resume from.

    Args:
        root: directory of checkpoints.
        which: a step, or `latest`: the newest one that is whole.
        deep: check sums too, not only sizes.

    Raises:
        StoreError: there is none (lists the steps that exist), or the one asked for is not whole (says why).
    """
    steps = list_steps(root, digits=0)
    listed = ", ".join(map(str, steps)) if steps else "none"
    if which == "latest":
        for step in reversed(steps):
            info = _check(root, step, deep)
            if info is not None:
                return info
        raise StoreError(f"{root}: no whole checkpoint to resume from (steps there: {listed})")
    if which not in steps:
        raise StoreError(f"{root}: no checkpoint of step {which} (steps there: {listed})")
    try:
        return _load(root, which, deep)
    except ArtifactError as error:
        others = ", ".join(str(info.step) for info in list_checkpoints(root) if info.step != which) or "none"
        raise StoreError(f"checkpoint of step {which} is damaged: {error} (other whole ones: {others})") from error


def remove_checkpoints_after(root: Path, step: int) -> list[int]:
    """Delete checkpoints of steps above `step`, for a run that is resumed there. Supervisor only.

    Returns:
        The steps that were removed.
    """
    removed = [n for n in list_steps(root, digits=0) if n > step]
    for n in reversed(removed):
        files.discard(root / f"step_{n}")
    return removed


def _check(root: Path, step: int, deep: bool) -> CheckpointInfo | None:
    try:
        return _load(root, step, deep)
    except ArtifactError as error:
        logger.warning(f"checkpoint of step {step} is skipped: {error}")
        return None


def _load(root: Path, step: int, deep: bool) -> CheckpointInfo:
    path = _named(root, step)
    manifest = read_manifest(path)
    if manifest.kind != KIND or manifest.step != step:
        raise ArtifactError(path, f"the checkpoint of step {step}", f"a {manifest.kind} of step {manifest.step}")
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        checks = [pool.submit(check_file, path / n, entry, deep=deep) for n, entry in manifest.files.items()]
        for check in checks:
            check.result()
    return CheckpointInfo(step, path, manifest)


def _named(root: Path, step: int) -> Path:
    return RunPaths(root.parent, checkpoints_root=root).checkpoint_step(step)
