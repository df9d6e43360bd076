"""Training batches of a run: which there are, the orchestrator's state after each, and what is removed when.

What is in one is written and read by `store.batch.rank_files`; this module opens no array, so that whoever only looks
at a run loads no numpy.
"""

import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from loguru import logger

from prime_hpc.store.artifact import clear_name, discard, is_artifact
from prime_hpc.store.errors import ArtifactError, StoreError, failed_read
from prime_hpc.store.io import files
from prime_hpc.store.manifest import MANIFEST, read_manifest
from prime_hpc.store.run_paths import RunPaths, check_incarnation, list_steps

STATE = "orchestrator.json"
RAW = "raw_bytes"
"""In the manifest of an archived batch: size of each rank's file before it was compressed."""
T = TypeVar("T")


def read_state(directory: Path, *, deadline_s: float = files.VISIBLE_S) -> dict[str, Any]:
    """Return the orchestrator's state after this batch. Raises as `read_state_bytes`."""
    return json.loads(read_state_bytes(directory, deadline_s=deadline_s))


def read_state_bytes(directory: Path, *, deadline_s: float = files.VISIBLE_S) -> bytes:
    """Return the same as it is in its file.
    Raises ArtifactError: names the file, what was expected and what was found."""
    path = directory / STATE

    def read() -> bytes:
        entry = read_manifest(directory).files.get(STATE)
        if entry is None:
            raise ArtifactError(directory / MANIFEST, f"an entry {STATE}", "none")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise failed_read(error, path, f"{entry.size} bytes") from error
        if (found := files.hash_bytes(content)) != entry:
            raise ArtifactError(path, f"xxh3 {entry.xxh3}", f"xxh3 {found.xxh3} ({found.size} bytes)")
        return content

    files.await_name(directory, deadline_s=deadline_s)
    return files.retry_read(read, deadline_s=deadline_s, parent=directory.parent)


def list_batches(paths: RunPaths) -> list[int]:
    """Sorted steps whose batch is on disk, plain or archived."""
    return sorted({*list_steps(paths.rollouts), *list_steps(paths.archived_rollouts)})


def find_batch(paths: RunPaths, step: int) -> Path:
    """Directory of batch `step`: the plain one, unless only the archived one is there. For batches of the past alone:
    who waits for one asks for `paths.rollouts_step`."""
    if step in list_steps(paths.rollouts) or step not in list_steps(paths.archived_rollouts):
        return paths.rollouts_step(step)
    return paths.archived_step(step)


class PastBatch:
    """A batch of the past, which a run that goes on may compress while it is read."""

    def __init__(self, paths: RunPaths, step: int) -> None:
        self._paths, self._step = paths, step
        self._directory = find_batch(paths, step)

    def read(self, read: Callable[[Path], T]) -> T:
        """Call `read` with its directory, once more where it lies in the other place by then. Raises what that does."""
        try:
            return read(self._directory)
        except StoreError:
            moved_to = find_batch(self._paths, self._step)
            if moved_to == self._directory:
                raise
            self._directory = moved_to
            return read(moved_to)


def _discard(paths: RunPaths, step: int, incarnation: int) -> None:
    """Remove a batch wherever it is; another process may just be packing it. What is no artifact stays."""
    for directory in (paths.rollouts_step(step), paths.archived_step(step)):
        if is_artifact(directory):
            discard(paths, directory, incarnation)


def prune_batches(
    paths: RunPaths,
    keep_last: int,
    trained: int,
    incarnation: int = 0,
    *,
    keep: Collection[int] = (),
    given: set[int] | None = None,
) -> list[int]:
    """Delete old batches; returns their steps. One process calls it: trainer rank 0, after a step of all ranks.

    Kept are the newest `keep_last` of the batches up to `trained`, everything after it, `keep`, and what no attempt
    wrote: batches that somebody put there to be trained on. A checkpoint needs no batch once it is whole: the
    orchestrator's state is part of it.

    Args:
        keep_last: at least 1.
        keep: steps of checkpoints that are still being written.
        given: steps that are known to be no attempt's; those that are found are added. Else all are read each time.

    Raises:
        FencedError: a newer attempt has begun.
        ValueError: `keep_last` below 1.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, is {keep_last}: a checkpoint of the last step needs its batch")
    check_incarnation(paths, incarnation)
    given = set() if given is None else given
    old = [s for s in list_batches(paths) if s <= trained - keep_last and s not in keep and s not in given]
    given.update(step for step in old if incarnation and is_given(paths.rollouts_step(step)))
    removed = [step for step in old if step not in given]
    for step in removed:
        _discard(paths, step, incarnation)
    return removed


def list_batches_after(paths: RunPaths, step: int, *, spare_given: bool = False) -> list[int]:
    """Sorted steps above `step` whose batch is on disk.
    `spare_given`: without those that no attempt wrote (incarnation 0): they were put there to be trained on.
    Raises Unreadable: who wrote one cannot be told now."""
    after = [n for n in list_batches(paths) if n > step]
    return [n for n in after if not is_given(paths.rollouts_step(n))] if spare_given else after


def is_given(directory: Path) -> bool:
    """Return whether no attempt wrote a batch (incarnation 0): it was put there to be trained on."""
    try:
        return read_manifest(directory).incarnation == 0
    except ArtifactError:
        return False


def remove_batches_after(paths: RunPaths, step: int, incarnation: int = 0, *, spare_given: bool = False) -> list[int]:
    """Delete the batches of steps above `step`, which a resumed run makes anew; returns those. Supervisor only."""
    removed = list_batches_after(paths, step, spare_given=spare_given)
    for n in reversed(removed):
        for directory in (paths.rollouts_step(n), paths.archived_step(n)):
            clear_name(paths, directory, incarnation)
    if removed:
        logger.info(f"removed batches {removed[0]}..{removed[-1]}, which come after step {step}")
    return removed
