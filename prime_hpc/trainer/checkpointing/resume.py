"""The checkpoint that a trainer goes on from: the supervisor's choice, or by hand what the config names."""

from pathlib import Path

from prime_hpc.config import Experiment
from prime_hpc.store.checkpoint.checkpoints import CheckpointInfo, resolve_resume
from prime_hpc.store.checkpoint.failed_reads import FailedReads, clear_failed_reads
from prime_hpc.store.checkpoint.import_checkpoint import find_checkpoint
from prime_hpc.store.checkpoint.newest import choose_newest, require
from prime_hpc.store.checkpoint.rollback import rewind
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.checkpointing.verify import READ_S


def checkpoint_to_resume(experiment: Experiment, paths: RunPaths, chosen: int | None) -> CheckpointInfo | None:
    """Return it, or None for a fresh start; whoever loads it checks its sums. On rank 0: the others wait meanwhile.

    Args:
        chosen: the supervisor's; None: there is no supervisor.

    Raises:
        StoreError: it does not exist or is damaged (lists those that are whole).
        Unreadable: that cannot be told now.
    """
    patience = Patience(READ_S, limited_by=None)
    if chosen is not None:
        return patience(lambda: resolve_resume(paths.checkpoints, chosen, deep=False))
    wanted = experiment.ckpt.resume_step if experiment.ckpt is not None else None
    if wanted is None:
        return None
    if isinstance(wanted, Path):
        return find_checkpoint(wanted)
    if wanted != "latest":
        return resolve_resume(paths.checkpoints, wanted, deep=False)
    # the other ranks wait meanwhile, in one collective, for all that is read again
    recheck_s = min(experiment.supervisor.recheck_s, experiment.trainer.dist_timeout_s / 10)
    failed_reads = FailedReads(recheck_s)  # those too that ranks noted the last time
    return require(paths, patience(lambda: choose_newest(paths, failed_reads, expected=0)))


def go_back_by_hand(paths: RunPaths, step: int, incarnation: int) -> None:
    """Take what comes after `step` out of the way, as a supervisor does before it starts the roles. On rank 0.
    Raises StoreError: something cannot be moved or removed."""
    rewind(paths, step, incarnation, spare_given=True)
    clear_failed_reads(paths)
