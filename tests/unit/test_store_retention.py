"""Leases, pruning of weight versions, checkpoints: nothing that is still needed is deleted."""

import errno
import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prime_hpc.store.artifact import ArtifactWriter, hash_files, prepare_stage
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.batches import STATE
from prime_hpc.store.checkpoint.checkpoints import (
    commit_checkpoint,
    list_checkpoints,
    move_checkpoints_aside,
    resolve_resume,
)
from prime_hpc.store.errors import FencedError, StoreError
from prime_hpc.store.leases import clear_leases, drop_lease, min_floor, set_floor
from prime_hpc.store.run_paths import RunPaths, claim_incarnation
from prime_hpc.store.weights import list_versions, prune_weights, remove_versions_after
from prime_hpc.trainer import trainer


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "run")


def publish(paths, *versions):
    for version in versions:
        with ArtifactWriter(paths.weights_step(version), kind="weights", version=version, writer="trainer") as w:
            w.write("model.safetensors", [np.full(10, version, np.int32)])


def checkpoint(paths, step, with_batch=True):
    batch_dir = None
    if with_batch:
        write_batch(paths, step, [RankBatch.empty(1)], state={"after": step})
        batch_dir = paths.rollouts_step(step)
    stage = prepare_stage(paths.checkpoint_step(step), run=paths)
    (stage / "trainer").mkdir()
    (stage / "trainer" / "__0_0.distcp").write_bytes(bytes([step]) * 100)
    (stage / "trainer" / ".metadata").write_bytes(b"meta")
    entries = hash_files(stage, ["trainer/__0_0.distcp", "trainer/.metadata"])
    return commit_checkpoint(paths, step, entries, batch_dir)


def test_versions_are_listed(paths):
    assert list_versions(paths) == []
    publish(paths, 1, 2, 10)
    assert list_versions(paths) == [1, 2, 10]
    assert remove_versions_after(paths, 1) == [2, 10]
    assert list_versions(paths) == [1]


def test_floors(paths):
    assert min_floor(paths) is None
    set_floor(paths, "orchestrator", 7)
    set_floor(paths, "evals-0", 5)
    assert min_floor(paths) == 5
    set_floor(paths, "evals-0", 9)
    assert min_floor(paths) == 7
    drop_lease(paths, "orchestrator")
    drop_lease(paths, "orchestrator")
    assert min_floor(paths) == 9
    clear_leases(paths)
    assert min_floor(paths) is None
    for name in ("", "a/b", "../a", ".hidden"):
        with pytest.raises(ValueError, match="lease reader"):
            set_floor(paths, name, 1)


def test_prune_keeps_the_newest(paths):
    publish(paths, *range(1, 7))
    assert prune_weights(paths, keep_last=2) == [1, 2, 3, 4]
    assert list_versions(paths) == [5, 6]
    assert prune_weights(paths, keep_last=2) == []
    with pytest.raises(ValueError, match="keep_last"):
        prune_weights(paths, keep_last=0)


def test_a_lease_protects(paths):
    publish(paths, *range(1, 7))
    set_floor(paths, "orchestrator", 3)
    set_floor(paths, "evals", 5)
    assert prune_weights(paths, keep_last=1) == [1, 2]
    set_floor(paths, "orchestrator", 100)  # ahead of everything: keep_last still holds
    set_floor(paths, "evals", 100)
    assert prune_weights(paths, keep_last=1) == [3, 4, 5]
    assert list_versions(paths) == [6]


def test_an_unreadable_lease_protects_everything(paths):
    publish(paths, 1, 2, 3)
    set_floor(paths, "orchestrator", 3)
    (paths.leases / "evals.json").write_text("{")
    assert prune_weights(paths, keep_last=1) == []
    assert list_versions(paths) == [1, 2, 3]


def test_a_checkpoint_protects_its_version(paths):
    publish(paths, *range(1, 7))
    checkpoint(paths, 2)
    checkpoint(paths, 4)
    assert prune_weights(paths, keep_last=1, keep=[3]) == [1, 5]
    assert list_versions(paths) == [2, 3, 4, 6]


def test_checkpoints_elsewhere_protect_too(paths, tmp_path):
    elsewhere = RunPaths(paths.root, checkpoints_root=tmp_path / "elsewhere")
    publish(elsewhere, 1, 2, 3)
    checkpoint(elsewhere, 1)
    assert (tmp_path / "elsewhere" / "step_1" / "manifest.json").exists()
    assert prune_weights(elsewhere, keep_last=1) == [2]


def test_a_damaged_newest_version_does_not_count_as_kept(paths):
    publish(paths, 1, 2, 3)
    (paths.weights_step(3) / "model.safetensors").write_bytes(b"short")
    assert prune_weights(paths, keep_last=1) == [1]
    assert list_versions(paths) == [2, 3]


def test_an_older_life_may_not_prune_nor_checkpoint(paths):
    publish(paths, 1, 2, 3)
    claim_incarnation(paths)
    with pytest.raises(FencedError):
        prune_weights(paths, keep_last=1, incarnation=0)
    assert list_versions(paths) == [1, 2, 3]
    with pytest.raises(FencedError):
        checkpoint(paths, 1, with_batch=False)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), StoreError("not writable")])
def test_what_cannot_be_removed_ends_no_training(paths, monkeypatch, error):
    def fail(*args, **named):
        raise error

    for name in ("prune_weights", "prune_batches"):
        monkeypatch.setattr(trainer, name, fail)
    config = SimpleNamespace(keep_rollouts=1, compress_rollouts=False)
    own: Any = SimpleNamespace(
        experiment=SimpleNamespace(orchestrator=config, trainer=SimpleNamespace(keep_weights=1)),
        context=SimpleNamespace(incarnation=1),
        saver=SimpleNamespace(steps_in_flight=set()),
        given=set(),
        bus=SimpleNamespace(publish=lambda *args, **named: None),
        paths=paths,
        rank=0,
        packer=None,
    )

    version: Any = SimpleNamespace(version=3, digest="")

    def prune():
        trainer.Trainer._announce(own, version)
        trainer.Trainer.prune_rollouts(own, 3)

    prune()
    error = FencedError("a newer attempt has begun")
    with pytest.raises(FencedError):
        prune()


def test_checkpoint_holds_both_halves(paths):
    checkpoint(paths, 10)
    info = resolve_resume(paths.checkpoints, 10)
    assert info.step == 10
    assert info.path == paths.checkpoint_step(10)
    assert info.orchestrator_state is not None
    assert json.loads(info.orchestrator_state.read_text()) == {"after": 10}
    assert (info.trainer_dir / ".metadata").read_bytes() == b"meta"
    assert checkpoint(paths, 20, with_batch=False).step == 20
    assert resolve_resume(paths.checkpoints, "latest").orchestrator_state is None
    assert [c.step for c in list_checkpoints(paths.checkpoints)] == [10, 20]
    assert [path.name.split("-")[2] for path in move_checkpoints_aside(paths, 10)] == ["step_20"]


def test_the_state_that_a_checkpoint_holds_is_the_one_that_was_verified(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may give a file well once, and badly the next time."""
    read, count = Path.read_bytes, itertools.count()

    def read_bytes(path: Path) -> bytes:
        content = read(path)
        return content.replace(b":", b" ") if path.name == STATE and next(count) % 2 else content

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    checkpoint(paths, 1)
    monkeypatch.undo()
    saved = resolve_resume(paths.checkpoints, 1).orchestrator_state
    assert saved is not None and saved.read_bytes() == (paths.rollouts_step(1) / STATE).read_bytes()


def test_checkpoint_without_trainer_files_is_refused(paths):
    prepare_stage(paths.checkpoint_step(1), run=paths)
    with pytest.raises(StoreError, match="nothing to resume from"):
        commit_checkpoint(paths, 1, {}, None)


@pytest.mark.parametrize("damage", ["truncate", "flip", "manifest", "missing", "renamed", "foreign"])
def test_latest_skips_a_damaged_checkpoint(paths, damage):
    for step in (9, 10, 20):
        checkpoint(paths, step)
    newest = paths.checkpoint_step(20)
    shard = newest / "trainer" / "__0_0.distcp"
    if damage == "truncate":
        shard.write_bytes(b"x")
    elif damage == "flip":
        shard.write_bytes(b"x" * 100)
    elif damage == "manifest":
        (newest / "manifest.json").unlink()
    elif damage == "missing":
        (newest / "trainer" / ".metadata").unlink()
    elif damage == "renamed":
        newest.rename(paths.checkpoint_step(30))
        newest = paths.checkpoint_step(30)
    else:
        shutil.rmtree(newest)
        newest.mkdir()
        (newest / "notes.txt").write_text("mine")
    assert resolve_resume(paths.checkpoints, "latest").step == 10
    with pytest.raises(StoreError, match=r"damaged.*other whole ones: 9, 10"):
        resolve_resume(paths.checkpoints, int(newest.name.removeprefix("step_")))


def test_resume_from_a_step_that_does_not_exist_lists_those_that_do(paths):
    with pytest.raises(StoreError, match="steps there: none"):
        resolve_resume(paths.checkpoints, "latest")
    checkpoint(paths, 9)
    checkpoint(paths, 10)
    (paths.checkpoints / "lost+found").mkdir()
    (paths.checkpoints / ".stage-step_11-i0000").mkdir()
    with pytest.raises(StoreError, match=r"no checkpoint of step 7 \(steps there: 9, 10\)"):
        resolve_resume(paths.checkpoints, 7)
