"""Admission of a child run: its checks, and where it goes on. Rank 0 only."""

from dataclasses import dataclass
from pathlib import Path

from prime_hpc.config import ConfigError, Experiment
from prime_hpc.config.child_config import check_child
from prime_hpc.config.run_files import RUN_YAML
from prime_hpc.config.snapshot import read_experiment
from prime_hpc.store.artifact import move_aside
from prime_hpc.store.checkpoint.checkpoints import CheckpointInfo
from prime_hpc.store.checkpoint.failed_reads import FailedReads, clear_failed_reads
from prime_hpc.store.checkpoint.newest import choose_newest, expected_step
from prime_hpc.store.checkpoint.rollback import rewind
from prime_hpc.store.errors import ArtifactError
from prime_hpc.store.manifest import verify_artifact
from prime_hpc.store.run_paths import RunPaths, check_incarnation, claim_incarnation, current_incarnation, record_start

READ_DEADLINE_S = 1.0
"""How long a version may be what a network file system shows while names change."""


@dataclass(frozen=True)
class Admission:
    """A child that begins: what every rank must know of it."""

    name: str
    path: Path
    experiment: Experiment
    slot: int
    incarnation: int
    """Its attempt that begins."""
    resume: CheckpointInfo | None
    republish: bool
    """True if the version of that checkpoint is not on disk any more."""

    @property
    def is_done(self) -> bool:
        """True if its last step was saved already, and its version is there."""
        return self.resume is not None and self.resume.step >= self.experiment.max_steps and not self.republish


def read_child(parent: Experiment, path: Path) -> Experiment:
    """Return the experiment in a child's directory.
    Raises ConfigError: it is no experiment, one that cannot share this trainer, or a copy of another child."""
    child = read_experiment(path / RUN_YAML)
    if child.name != path.name:
        message = f"says {child.name!r}, but lies in {path.name}: a copied directory? Make it with `prime-hpc runs add`"
        raise ConfigError(message, "name")
    check_child(parent, child)
    return child


def prepare(
    parent: Experiment,
    path: Path,
    slot: int,
    failed_reads: FailedReads,
    known: int = 0,
    *,
    parent_incarnation: int = 0,
) -> Admission:
    """Begin an attempt of the child: choose the checkpoint, claim it, bring the directory back to its step.

    Args:
        failed_reads: first readings of this child's files.
        parent_incarnation: the trainer's own attempt; an older one takes no child over.

    Raises:
        ConfigError: see `read_child`.
        FencedError: a newer attempt of the parent, or of the child, has begun meanwhile.
        StoreError: its directory cannot be used, or all checkpoints that it had are proved broken.
        Unreadable, OSError: that cannot be told now; nothing was deleted.
    """
    child, paths = read_child(parent, path), RunPaths(path)
    newest = max(known, current_incarnation(paths))
    expected = expected_step(paths, incarnation=newest)
    choice = choose_newest(paths, failed_reads, expected=expected, incarnation=newest, unfit=_lacks_half)
    check_incarnation(RunPaths(path.parent), parent_incarnation)  # all this may have taken long
    incarnation = claim_incarnation(paths, after=newest)
    step = choice.info.step if choice.info is not None else 0
    if incarnation > 1:  # what lies there before its first attempt was put there to be trained on
        record_start(paths, incarnation, step)
        rewind(paths, step, incarnation, keep=bool(choice.passed_over), spare_given=True)
        clear_failed_reads(paths)
    republish = choice.info is not None and not _is_whole(paths, choice.info.step, incarnation)
    return Admission(path.name, path, child, slot, incarnation, choice.info, republish)


def _is_whole(paths: RunPaths, version: int, incarnation: int) -> bool:
    """Return whether a weights version can be served; a broken one is set aside.
    Raises Unreadable: that cannot be told now."""
    try:
        verify_artifact(paths.weights_step(version), deadline_s=READ_DEADLINE_S)
    except ArtifactError:
        if paths.weights_step(version).exists():
            move_aside(paths, paths.weights_step(version), incarnation)
        return False
    return True


def _lacks_half(info: CheckpointInfo) -> str | None:
    return None if info.orchestrator_state is not None else "it holds no orchestrator state"
