"""Rules of retention, asked before anything is deleted."""

from collections.abc import Callable, Sequence
from pathlib import Path

from loguru import logger

from prime_hpc.store.artifact import ArtifactError, Unreadable, verify_artifact
from prime_hpc.store.run_paths import RunPaths, incarnation_starts, is_late


def oldest_of_newest_whole(
    paths: RunPaths, steps: Sequence[int], keep_last: int, path_of: Callable[[int], Path]
) -> int | None:
    """Return the lowest of the newest `keep_last` steps whose artifact is whole; None where there are fewer.

    What a fenced attempt left late, or does not fit its manifest, does not count: retention that counted it would
    delete what the run can still go on from.

    Args:
        paths: the run.
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
