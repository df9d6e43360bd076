"""The sums of a checkpoint that is about to be loaded: each rank reads the files that it wrote, or its share of them.

The supervisor compares sizes alone: one process that read 840 GB before every attempt would take as long as many
attempts do. What a rank finds broken is noted (`failed_reads`), and the next attempt reads it again before it goes back
to an older.
"""

from loguru import logger

from prime_hpc.store.checkpoint.checkpoints import CheckpointInfo
from prime_hpc.store.checkpoint.failed_reads import record_failed_read
from prime_hpc.store.errors import ArtifactError, StoreError, Unreadable
from prime_hpc.store.io.retry_reads import Patience
from prime_hpc.store.manifest import check_file
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.trainer.rank_group import RankGroup

READ_S = 240.0
"""How long a rank tries to read what cannot be read; the others wait for it in a collective."""


def share_of(names: list[str], rank: int, world_size: int) -> list[str]:
    """Return the files whose sums a rank checks: its own `__<rank>_<n>.distcp`, of other numbers of ranks its share."""
    return [name for name in names if _reader(name) % world_size == rank]


def _reader(name: str) -> int:
    parts = name.rpartition("/")[2].split("_")
    return int(parts[2]) if len(parts) > 3 and parts[2].isdigit() else 0


def verify_parts(info: CheckpointInfo, paths: RunPaths, patience_s: float | None = None) -> None:
    """Check all sums of a checkpoint, each rank some. Collective.
    `patience_s`: how long to try again what cannot be read; None: `READ_S`. Short where others wait, too.
    Raises Unreadable: on all ranks alike: a file differs (it is noted, and read again by the next attempt), or cannot
    be read."""
    patience = Patience(READ_S if patience_s is None else patience_s, limited_by=None)
    ranks = RankGroup()
    rows = ranks.gather_all(_verify_share(info, paths, patience, ranks))
    found = [f"rank {rank}: {words}" for rank, words in enumerate(rows) if words is not None]
    if found:
        raise Unreadable(info.path, "; ".join(found[:3]))


def _verify_share(info: CheckpointInfo, paths: RunPaths, patience: Patience, ranks: RankGroup) -> str | None:
    """Describe what is wrong with this rank's share; None where nothing is."""
    names = share_of(sorted(info.manifest.files), ranks.rank, ranks.world_size)
    for name in names:
        path, entry = info.path / name, info.manifest.files[name]
        try:
            patience(lambda path=path, entry=entry: check_file(path, entry, deep=True))  # type: ignore[misc]
        except ArtifactError as error:
            try:
                record_failed_read(paths, info.step, info.manifest, name, error)
            except (StoreError, OSError) as failure:
                logger.error(f"{error}; and this could not be noted for the next attempt: {failure}")
            return f"{error}; the next attempt reads it again, and goes back to an older checkpoint if it is so"
        except (StoreError, OSError) as error:
            return str(error)
    return None
