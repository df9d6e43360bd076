"""Files of a training batch: one safetensors file a data-parallel rank, memory-mapped by the rank that reads it.

The orchestrator writes batch n with `write_batch`, together with its own state after batch n; trainer rank r reads
its file with `read_rank_batches`, handed over by the orchestrator (`store.messaging`) or from disk. A token costs 15
bytes (id 4, mask 1, log-probability 4, version 2, advantage 4), a sequence 24 to 36 more; positions count from 0 in
each sequence and follow from its offsets. Files are plain safetensors: `safetensors.numpy.load_file` reads them too.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_hpc.store.artifact import ArtifactWriter
from prime_hpc.store.batch.rank_batch import RankBatch, decode_rank, encode_rank
from prime_hpc.store.batches import RAW, STATE
from prime_hpc.store.errors import ArtifactError
from prime_hpc.store.io import files, zstd
from prime_hpc.store.manifest import Manifest, check_file, read_manifest
from prime_hpc.store.messaging.file_transfer import Handover
from prime_hpc.store.run_paths import RunPaths, parse_step

_MAX_WRITERS = 8  # threads of one batch: fsync of many files overlaps, more does not help


def write_batch(
    paths: RunPaths,
    step: int,
    ranks: Sequence[RankBatch],
    *,
    state: Mapping[str, Any],
    meta: Mapping[str, Any] | None = None,
    incarnation: int = 0,
) -> Manifest:
    """Commit batch `step` for all ranks, with the orchestrator's state after it.

    Args:
        ranks: one per data-parallel rank, all with the same number of micro-batches.
        state: plain JSON; with it the orchestrator goes on after this batch (`read_state`).
        meta: plain JSON for the manifest. Added where absent: `num_ranks`, `num_micro_batches`, `num_tokens`,
            `num_loss_tokens`, `num_sequences`, `num_samples` (distinct sample ids), `policy_version` (step - 1).

    Raises:
        ValueError: arrays that do not fit together, or state/meta that is not plain JSON.
        NoRoom: the disk is full, or a quota used up.
        StoreError: fenced, or another batch of this number exists (see `artifact.commit_stage`).
    """
    _check_ranks(ranks)
    full_meta = _totals(ranks, step) | dict(meta or {})
    try:
        state_bytes = (json.dumps(state) + "\n").encode()
    except TypeError as error:
        raise ValueError(f"the orchestrator's state must be plain JSON: {error}") from error
    final = paths.rollouts_step(step)
    version = int(full_meta["policy_version"])
    with ArtifactWriter(
        final, kind="batch", step=step, version=version, writer="orchestrator", incarnation=incarnation, run=paths
    ) as writer:
        writer.meta.update(full_meta)
        with ThreadPoolExecutor(min(_MAX_WRITERS, len(ranks))) as pool:
            written = [pool.submit(writer.write, _rank_name(r), encode_rank(batch)) for r, batch in enumerate(ranks)]
            for future in written:
                future.result()
        writer.write(STATE, [state_bytes])
    assert writer.manifest is not None
    return writer.manifest


def _check_ranks(ranks: Sequence[RankBatch]) -> None:
    if not ranks:
        raise ValueError("a batch needs at least one rank")
    for rank, batch in enumerate(ranks):
        try:
            batch.check()
        except ValueError as error:
            raise ValueError(f"rank {rank}: {error}") from error
        if batch.num_micro_batches != ranks[0].num_micro_batches:
            raise ValueError(
                f"rank {rank} has {batch.num_micro_batches} micro-batches, rank 0 has {ranks[0].num_micro_batches}: "
                "all ranks must have the same number (pad with empty ones)"
            )


def _totals(ranks: Sequence[RankBatch], step: int) -> dict[str, int]:
    return {
        "num_ranks": len(ranks),
        "num_micro_batches": ranks[0].num_micro_batches,
        "num_tokens": sum(b.num_tokens for b in ranks),
        "num_loss_tokens": sum(int(np.count_nonzero(b.loss_mask)) for b in ranks),
        "num_sequences": sum(b.num_sequences for b in ranks),
        "num_samples": len(np.unique(np.concatenate([b.sample_ids for b in ranks]))),
        "policy_version": step - 1,
    }


def _rank_name(rank: int) -> str:
    return f"rank_{rank:04d}.safetensors"


def read_rank_batch(directory: Path, rank: int, *, deadline_s: float = files.VISIBLE_S) -> RankBatch:
    """One rank's file of a batch, mapped; see `read_rank_batches`."""
    return read_rank_batches(directory, lambda _: [rank], deadline_s=deadline_s)[0]


def read_rank_batches(
    directory: Path,
    choose: Callable[[int], Sequence[int]],
    *,
    handover: Handover | None = None,
    deadline_s: float = files.VISIBLE_S,
) -> list[RankBatch]:
    """Return the files of some ranks of a batch, their sums checked; the large arrays are read-only views of them.

    Args:
        choose: number of ranks that it was packed for -> ranks to read.
        handover: the writer's socket, which is asked first.
        deadline_s: keep trying this many seconds while a file is not (yet) what the manifest says.

    Raises:
        ArtifactError: names the file, what was expected and what was found.
        ValueError: the batch was packed for fewer ranks.
    """

    def names(manifest: Manifest) -> list[str]:
        num_ranks = int(manifest.meta["num_ranks"])
        chosen = choose(num_ranks)
        for rank in chosen:
            if rank >= num_ranks:
                raise ValueError(f"{directory}: was packed for {num_ranks} ranks, there is no rank {rank}")
        return [_rank_name(rank) for rank in chosen]

    step = parse_step(directory.name)
    fetched = handover.fetch(directory, step, names) if handover is not None and step is not None else None
    if fetched is not None:
        manifest, content = fetched
        return [decode_rank(content[name], directory / name) for name in names(manifest)]

    def read() -> list[RankBatch]:
        manifest = read_manifest(directory)
        return [_map(directory, name, manifest) for name in names(manifest)]

    files.await_name(directory, deadline_s=deadline_s)
    return files.retry_read(read, deadline_s=deadline_s, parent=directory.parent)


def _map(directory: Path, name: str, manifest: Manifest) -> RankBatch:
    size = manifest.meta.get(RAW, {}).get(name)
    path = directory / (name if size is None else name + zstd.SUFFIX)
    entry = manifest.files[path.name]
    check_file(path, entry, deep=True)  # which also brings it into the page cache
    raw: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
    if raw.nbytes != entry.size:
        raise ArtifactError(path, f"{entry.size} bytes", f"{raw.nbytes} bytes")
    return decode_rank(raw if size is None else np.frombuffer(zstd.decompress(raw, size), np.uint8), path)
