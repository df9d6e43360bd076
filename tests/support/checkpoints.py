"""Small checkpoints and weight versions without a trainer, and the ways in which they break."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from prime_hpc.store.artifact import ArtifactWriter, hash_files, prepare_stage
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.checkpoint.checkpoints import commit_checkpoint
from prime_hpc.store.run_paths import RunPaths

SHARD = "trainer/__0_0.distcp"


def make_weights(paths: RunPaths, version: int, incarnation: int = 0) -> None:
    """Publish a version."""
    paths.root.mkdir(parents=True, exist_ok=True)
    with ArtifactWriter(
        paths.weights_step(version), kind="weights", version=version, writer="trainer", incarnation=incarnation
    ) as writer:
        writer.write("model.safetensors", [np.full(10, version, np.int32)])


def make_checkpoint(
    paths: RunPaths, step: int, *, kind: str = "rl", incarnation: int = 0, meta: dict[str, Any] | None = None
) -> None:
    """Commit a checkpoint with the batch whose state it holds; `meta` is added to the manifest's."""
    paths.root.mkdir(parents=True, exist_ok=True)
    batch_dir = None
    if kind == "rl":
        state = {"step": step, "prompts": {"seed": 0}}
        if not paths.rollouts_step(step).exists():
            write_batch(paths, step, [RankBatch.empty(1)], state=state, incarnation=incarnation)
        batch_dir = paths.rollouts_step(step)
    stage = prepare_stage(paths.checkpoint_step(step), incarnation, run=paths)
    (stage / "trainer").mkdir()
    (stage / SHARD).write_bytes(bytes([step]) * 100)
    (stage / "trainer" / ".metadata").write_bytes(b"meta")
    entries = hash_files(stage, [SHARD, "trainer/.metadata"])
    meta = {"kind": kind, "progress": {"step": step}, **(meta or {})}
    commit_checkpoint(paths, step, entries, batch_dir, incarnation=incarnation, meta=meta)


def damage(checkpoint: Path, kind: str) -> None:
    """Break a checkpoint."""
    shard, manifest = checkpoint / SHARD, checkpoint / "manifest.json"
    if kind == "truncate":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif kind == "flip":
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif kind == "manifest":
        manifest.unlink()
    elif kind == "missing":
        (checkpoint / "trainer" / ".metadata").unlink()
    elif kind == "format":
        content = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(content | {"format": 99}))
    else:
        raise ValueError(kind)
