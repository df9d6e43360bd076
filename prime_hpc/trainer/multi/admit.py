"""What a child must be to be trained, and where it goes on. Rank 0 only; called by `roster.py`."""

from dataclasses import dataclass
from pathlib import Path

from loguru import logger

from prime_hpc.config import ConfigError, Experiment, Problem
from prime_hpc.config.children import check_child
from prime_hpc.config.snapshot import RUN_YAML, read_experiment
from prime_hpc.store import files
from prime_hpc.store.artifact import ArtifactError, verify_artifact
from prime_hpc.store.checkpoints import CheckpointInfo, newest_first
from prime_hpc.store.layout import RunPaths, claim_incarnation, record_start
from prime_hpc.store.rewind import rewind


@dataclass(frozen=True)
class Admission:
    """A child that begins: what every rank must know of it."""

    name: str
    path: Path
    experiment: Experiment
    slot: int
    incarnation: int
    """Its life that begins."""
    resume: CheckpointInfo | None
    """Checkpoint that it goes on from."""
    republish: bool
    """Whether the version of that checkpoint is not on disk any more."""

    @property
    def is_done(self) -> bool:
        """Whether its last step was saved already."""
        return self.resume is not None and self.resume.step >= self.experiment.max_steps


def read_child(parent: Experiment, path: Path) -> Experiment:
    """The experiment in a child's directory.

    Raises:
        ConfigError: it is no experiment, one that cannot share this trainer, or a copy of another child.
    """
    child = read_experiment(path / RUN_YAML)
    if child.name != path.name:
        message = f"says {child.name!r}, but lies in {path.name}: a copied directory? Make it with `prime-hpc runs add`"
        raise ConfigError(Problem(message, "name"))
    check_child(parent, child)
    return child


def prepare(parent: Experiment, path: Path, slot: int) -> Admission:
    """Begin a life of the child: claim it, choose the checkpoint, bring the directory back to its step.

    Raises:
        ConfigError: see `read_child`.
        StoreError: its directory cannot be used.
    """
    child, paths = read_child(parent, path), RunPaths(path)
    incarnation = claim_incarnation(paths)
    resume = next((info for info in newest_first(paths.checkpoints, deep=True) if _has_both_halves(info)), None)
    if incarnation > 1:  # what lies there before its first life was put there to be trained on
        step = resume.step if resume is not None else 0
        record_start(paths, incarnation, step)
        rewind(paths, step, incarnation)
    republish = resume is not None and not _is_whole(paths.weights_step(resume.step))
    return Admission(path.name, path, child, slot, incarnation, resume, republish)


def _is_whole(version: Path) -> bool:
    """Whether a weights version can be served; a broken one is taken away."""
    try:
        verify_artifact(version, deadline_s=1.0)
    except ArtifactError:
        if version.exists():
            files.discard(version)
        return False
    return True


def _has_both_halves(info: CheckpointInfo) -> bool:
    if info.orchestrator_state is not None:
        return True
    logger.warning(f"{info.path} is skipped: it holds no orchestrator state")
    return False
