"""A run directory brought back to the step from which a new life goes on.

Called by who begins the life: the supervisor, or, for one of several runs of a trainer, trainer rank 0.
"""

from loguru import logger

from prime_hpc.store.artifact import clean_stale_stages
from prime_hpc.store.batches import remove_batches_after
from prime_hpc.store.checkpoints import remove_checkpoints_after
from prime_hpc.store.layout import RunPaths
from prime_hpc.store.leases import clear_leases
from prime_hpc.store.weights import remove_versions_after


def rewind(paths: RunPaths, step: int, incarnation: int) -> None:
    """Remove what comes after `step`, and the leftovers of earlier lives.

    Checkpoints go first: killed half-way, no checkpoint is left whose weights are gone.

    Raises:
        FencedError: a newer life has begun.
        StoreError: something cannot be removed.
    """
    removed = {
        "checkpoints": remove_checkpoints_after(paths, step, incarnation),
        "batches": remove_batches_after(paths, step, incarnation),
        "weights": remove_versions_after(paths, step, incarnation),
    }
    for what, steps in removed.items():
        if steps:
            logger.info(f"{paths.root.name}: removed {what} of {len(steps)} steps after step {step}")
    artifacts = (paths.checkpoints, paths.rollouts, paths.packed_rollouts, paths.weights)
    for parent in (*artifacts, paths.leases, paths.root, paths.root / "logs"):
        clean_stale_stages(parent)
    clear_leases(paths)
