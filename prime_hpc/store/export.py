"""Rollouts as Parquet, one row a sequence, for analysis with pandas, DuckDB, Polars and the like.

Batches are read as they are stored, one after another, and written as one row group each: memory is that of a single
batch. Needs pyarrow (the `export` extra).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_hpc.store.batch.rank_batch import NOT_SAMPLED, SPECS, RankBatch
from prime_hpc.store.batch.rank_files import read_rank_batch
from prime_hpc.store.batches import PastBatch
from prime_hpc.store.errors import StoreError
from prime_hpc.store.io.new_file import new_file
from prime_hpc.store.manifest import read_manifest
from prime_hpc.store.run_paths import RunPaths

COMPRESSIONS = ("zstd", "snappy", "gzip", "none")
READ_DEADLINE_S = 2.0
_ARROW = {np.bool_: "bool_", np.int32: "int32", np.int64: "int64", np.float32: "float32"}
_BEFORE = {"step": "int32", "policy_version": "int32", "rank": "int32", "micro_batch": "int32", "env": "string"}
_AFTER = {"num_tokens": "int32", "num_loss_tokens": "int32", "lag_max": "int32"}
_PER_SEQUENCE = {spec.column: name for name, spec in SPECS.items() if spec.column}
"""Column -> field of the batch."""
_PER_TOKEN = [
    name for name, spec in SPECS.items() if spec.per == "token" and not spec.trailing and spec.together != "images"
]


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    path: Path
    num_steps: int
    num_sequences: int
    num_tokens: int
    num_bytes: int


def require_pyarrow() -> Any:
    """Return the pyarrow module. Raises StoreError: it is not installed; says how to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise StoreError("export needs pyarrow: pip install 'prime-hpc[export]'") from error
    return pyarrow


def export_batches(
    paths: RunPaths, steps: Sequence[int], output: Path, env_names: Sequence[str], *, compression: str = "zstd"
) -> Exported:
    """Write the sequences of some batches into one Parquet file, which appears whole or not at all.

    Columns: step, policy_version (that the batch trains), rank, micro_batch, env, every column of the table
    `rank_batch.SPECS` (temperature, reward, sample_id, group_id, top_p (1: off), top_k and min_p (0: off), ...),
    num_tokens, num_loss_tokens, lag_max (versions between the oldest sampled token and policy_version; 0 where nothing
    was sampled), and as a list each field of that table with one value a token (token_ids, loss_mask, logprobs,
    versions (-1: not sampled), advantages, ...; null where the batch does not have it).

    Args:
        steps: batches to write, in this order.
        output: the file; replaced if it exists.
        env_names: label of each environment, in the config's order.
        compression: one of COMPRESSIONS.

    Raises:
        ArtifactError: a batch is not what its manifest says.
        StoreError: no pyarrow, disk full.
    """
    arrow = require_pyarrow()
    kinds = {name: getattr(arrow, _ARROW[SPECS[name].dtype])() for name in (*_PER_SEQUENCE.values(), *_PER_TOKEN)}
    schema = arrow.schema(
        [
            *((name, getattr(arrow, kind)()) for name, kind in _BEFORE.items()),
            *((column, kinds[name]) for column, name in _PER_SEQUENCE.items()),
            *((name, getattr(arrow, kind)()) for name, kind in _AFTER.items()),
            *((name, arrow.list_(kinds[name])) for name in _PER_TOKEN),
        ]
    )
    num_sequences = num_tokens = 0
    with new_file(output) as temporary:
        codec = None if compression == "none" else compression
        with arrow.parquet.ParquetWriter(temporary, schema, compression=codec) as writer:
            for step in steps:
                for rank, batch in enumerate(_parts(paths, step)):
                    table = _table(arrow, schema, step, rank, batch, env_names)
                    writer.write_table(table, row_group_size=max(table.num_rows, 1))
                    num_sequences += batch.num_sequences
                    num_tokens += batch.num_tokens
    return Exported(output, len(steps), num_sequences, num_tokens, output.stat().st_size)


def _parts(paths: RunPaths, step: int) -> Iterator[RankBatch]:
    batch = PastBatch(paths, step)
    manifest = batch.read(partial(read_manifest, deadline_s=READ_DEADLINE_S))
    for rank in range(int(manifest.meta["num_ranks"])):
        yield batch.read(partial(read_rank_batch, rank=rank, deadline_s=READ_DEADLINE_S))


def _table(arrow: Any, schema: Any, step: int, rank: int, batch: RankBatch, env_names: Sequence[str]) -> Any:
    offsets, count, version = batch.seq_offsets, batch.num_sequences, step - 1
    sampled = batch.versions != NOT_SAMPLED
    oldest = _per_sequence(np.minimum, np.where(sampled, batch.versions, version), offsets, version)
    columns: dict[str, Any] = {
        "step": np.full(count, step, np.int32),
        "policy_version": np.full(count, version, np.int32),
        "rank": np.full(count, rank, np.int32),
        "micro_batch": np.repeat(np.arange(batch.num_micro_batches, dtype=np.int32), np.diff(batch.micro_offsets)),
        "env": [env_names[i] if 0 <= i < len(env_names) else str(i) for i in batch.env_ids],
        **{column: batch.values(name) for column, name in _PER_SEQUENCE.items()},
        "num_tokens": np.diff(offsets).astype(np.int32),
        "num_loss_tokens": _per_sequence(np.add, batch.loss_mask.astype(np.int32), offsets, 0),
        "lag_max": (version - oldest).astype(np.int32),
    }
    bounds = arrow.array(offsets.astype(np.int32))
    arrays = [arrow.array(column, schema.field(name).type) for name, column in columns.items()]
    for name in _PER_TOKEN:
        kind, values = schema.field(name).type, getattr(batch, name)
        if values is None:
            arrays.append(arrow.nulls(count, kind))
        else:
            arrays.append(arrow.ListArray.from_arrays(bounds, arrow.array(values, kind.value_type)))
    return arrow.Table.from_arrays(arrays, schema=schema)


def _per_sequence(
    reduce: np.ufunc, values: npt.NDArray[Any], offsets: npt.NDArray[np.int64], empty: int
) -> npt.NDArray[np.int32]:
    """One value a sequence, `empty` where it has no token."""
    result = np.full(len(offsets) - 1, empty, np.int32)
    filled = np.diff(offsets) > 0
    if filled.any():
        result[filled] = reduce.reduceat(values, offsets[:-1][filled])
    return result
