"""A run directory brought back to the step from which a new attempt goes on."""

from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from prime_hpc.store.artifact import SET_ASIDE, clean_stale_stages, move_aside
from prime_hpc.store.batches import list_batches_after, remove_batches_after
from prime_hpc.store.checkpoint.checkpoints import move_checkpoints_aside, note_saved, read_saved
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.disk import size_text
from prime_hpc.store.leases import clear_leases
from prime_hpc.store.manifest import read_manifest
from prime_hpc.store.run_paths import RunPaths, check_incarnation, list_steps
from prime_hpc.store.weights import list_versions, remove_versions_after


def rewind(paths: RunPaths, step: int, incarnation: int, *, keep: bool = False, spare_given: bool = False) -> None:
    """Take what comes after `step` out of the way, and remove the leftovers of earlier attempts.

    Where no checkpoint is newer, batches and versions above `step` are what the attempt makes anew: they are deleted.
    Where there is one (damaged, late, or newer than what was asked for) everything above `step` is set aside instead:
    renamed to `set-aside-step_<n>-...`, which nothing lists and no retention deletes. Checkpoints go last: killed
    half-way, the next try knows by them that nothing is to be deleted.

    Args:
        step: where the attempt goes on.
        keep: set aside in any case.
        spare_given: leave batches that no attempt wrote (incarnation 0): nobody makes them anew.

    Raises:
        FencedError: a newer attempt has begun.
        StoreError: something cannot be moved or removed; what is above `step` is still there, or set aside.
    """
    check_incarnation(paths, incarnation)
    saved = read_saved(paths)
    if keep or any(n > step for n in list_steps(paths.checkpoints, digits=0)):
        _move_aside(paths, step, incarnation, spare_given)
    else:
        removed = {
            "batches": remove_batches_after(paths, step, incarnation, spare_given=spare_given),
            "weights": remove_versions_after(paths, step, incarnation),
        }
        for what, steps in removed.items():
            if steps:
                logger.info(f"{paths.root.name}: removed {what} of {len(steps)} steps after step {step}")
    if saved is not None and saved.step > step:
        note_saved(paths, step, incarnation)
    artifacts = (paths.checkpoints, paths.rollouts, paths.archived_rollouts, paths.weights)
    for parent in (*artifacts, paths.leases, paths.root, paths.root / "logs"):
        check_incarnation(paths, incarnation)
        clean_stale_stages(parent, before_incarnation=incarnation)
    check_incarnation(paths, incarnation)
    clear_leases(paths)


def _move_aside(paths: RunPaths, step: int, incarnation: int, spare_given: bool) -> None:
    batches = list_batches_after(paths, step, spare_given=spare_given)[::-1]
    names = [directory for n in batches for directory in (paths.rollouts_step(n), paths.archived_step(n))]
    names += [paths.weights_step(n) for n in reversed(list_versions(paths)) if n > step]
    moved = [move_aside(paths, path, incarnation) for path in names]
    all_moved = [*filter(None, moved), *move_checkpoints_aside(paths, step, incarnation)]
    if all_moved:
        logger.warning(
            f"{paths.root.name}: {len(all_moved)} batches, weight versions and checkpoints after step {step} "
            f"({_size(all_moved)}) are set aside, not deleted: delete {SET_ASIDE}* below {_places(all_moved)} when "
            "nobody needs them"
        )


def _size(moved: Sequence[Path]) -> str:
    """For people: what is broken does not count."""
    total = 0
    for path in moved:
        try:
            total += read_manifest(path).total_size
        except StoreError:
            continue
    return size_text(total)


def _places(moved: Sequence[Path]) -> str:
    return ", ".join(sorted({str(path.parent) for path in moved}))
