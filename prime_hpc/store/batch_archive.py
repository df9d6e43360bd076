"""Batches that were trained on, compressed: `rollouts_packed/step_<n>` takes the place of `rollouts/step_<n>`.

Trainer rank 0 archives them beside the training (`RolloutArchiver`); `replay` and `export` read both places. The
archived one is a whole artifact before the plain one is taken away, so that at every moment one of them is there; where
both are, a crash came between, and the next archiving ends what was begun.
"""

import os
import threading
from collections.abc import Collection
from pathlib import Path

from loguru import logger

from prime_hpc.store.artifact import ArtifactWriter, discard
from prime_hpc.store.batches import RAW, STATE, is_given
from prime_hpc.store.errors import ArtifactError, FencedError, StoreError
from prime_hpc.store.io import files, zstd
from prime_hpc.store.manifest import verify_artifact
from prime_hpc.store.run_paths import RunPaths, list_steps

LEFT_PLAIN = 2
"""The newest batches stay as they are: one may be read again, or belong to a checkpoint that is being written."""
NICE = 19
JOIN_S = 600.0


def archive_batch(paths: RunPaths, step: int, incarnation: int = 0) -> tuple[int, int]:
    """Compress one batch.

    Returns:
        Bytes before and after.

    Raises:
        ArtifactError: the batch is not what its manifest says; it stays as it is.
        StoreError: disk full, fenced, no pyarrow.
    """
    source, final = paths.rollouts_step(step), paths.archived_step(step)
    manifest = verify_artifact(source)
    if not _is_whole(final, step):
        writing = ArtifactWriter(
            final,
            kind="batch",
            step=step,
            version=manifest.version,
            writer="trainer",
            incarnation=incarnation,
            run=paths,
        )
        with writing as writer:
            raw = {}
            for name, entry in manifest.files.items():
                content = (source / name).read_bytes()
                if files.hash_bytes(content) != entry:
                    raise ArtifactError(source / name, f"xxh3 {entry.xxh3}", "another sum")
                if name == STATE:
                    writer.write(name, [content])
                else:
                    writer.write(name + zstd.SUFFIX, [zstd.compress(content)])
                    raw[name] = entry.size
            writer.meta.update({**manifest.meta, RAW: raw})
    after = verify_artifact(final).total_size
    discard(paths, source, incarnation)
    return manifest.total_size, after


def _is_whole(final: Path, step: int) -> bool:
    """Return whether it was committed before a crash came. What is broken is taken away."""
    if not final.exists():
        return False
    try:
        return verify_artifact(final, deep=True).step == step
    except ArtifactError:
        files.discard(final)
        return False


class RolloutArchiver:
    """Packs in a thread of its own, with the least priority. One process has it: trainer rank 0."""

    def __init__(self, paths: RunPaths, incarnation: int) -> None:
        self._paths, self._incarnation = paths, incarnation
        self._thread: threading.Thread | None = None
        self._closing = False
        self._left: set[int] = set()
        """Batches that stay as they are: damaged, or no attempt's. They are not read again after every step."""
        self._is_troubled = False
        self.num_bytes = [0, 0]
        """Before and after, of all batches archived so far."""

    def up_to(self, trained: int, keep: Collection[int] = ()) -> None:
        """All ranks have taken step `trained`: what is old enough is archived, unless that still goes on. Never raises:
        a batch that could not be archived stays as it is.
        `keep`: steps of checkpoints that are still being written: their batches are not touched."""
        if self._thread is not None and self._thread.is_alive():
            return
        last = min([trained - LEFT_PLAIN, *(step - 1 for step in keep)])
        self._thread = threading.Thread(target=self._run, args=(last,), name="pack", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let the batch that is being archived come to its end."""
        self._closing = True
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self, last: int) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # on Linux of this thread alone
        try:
            for step in list_steps(self._paths.rollouts):
                if step > last or self._closing:
                    return
                if step not in self._left:
                    self._archive(step)
        except FencedError:
            return  # the training itself will say so
        except (StoreError, OSError) as error:  # of the disk: the next step's turn tries again
            if not self._is_troubled:
                logger.warning(f"batches cannot be compressed now, and stay as they are until they can be: {error}")
            self._is_troubled = True

    def _archive(self, step: int) -> None:
        """Archive one batch; a damaged one stays, and is said once. Raises what is not the batch's own fault."""
        try:
            if self._incarnation and is_given(self._paths.rollouts_step(step)):
                self._left.add(step)  # an attempt that goes back trains on it again, and nobody makes it anew
                return
            before, after = archive_batch(self._paths, step, self._incarnation)
        except FencedError:
            raise
        except (StoreError, OSError) as error:
            if step not in list_steps(self._paths.rollouts):
                return  # `keep_rollouts` gave it up meanwhile
            if not isinstance(error, ArtifactError):
                raise
            self._left.add(step)
            logger.warning(f"batch {step} is damaged and stays as it is: {error}")
            return
        self._is_troubled = False
        self.num_bytes[0] += before
        self.num_bytes[1] += after
