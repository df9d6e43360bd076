"""Compressed batches: the same to the last bit, never absent for a moment, and gone when they should be."""

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from loguru import logger

from prime_hpc.config import Experiment, write_snapshot
from prime_hpc.report import rollouts
from prime_hpc.store import export
from prime_hpc.store.artifact import clean_stale_stages
from prime_hpc.store.batch.rank_batch import RankBatch
from prime_hpc.store.batch.rank_files import read_rank_batch, write_batch
from prime_hpc.store.batch_archive import LEFT_PLAIN, RolloutArchiver, archive_batch
from prime_hpc.store.batches import PastBatch, find_batch, list_batches, prune_batches, read_state, remove_batches_after
from prime_hpc.store.errors import ArtifactError, StoreError
from prime_hpc.store.io import files, zstd
from prime_hpc.store.manifest import verify_artifact
from prime_hpc.store.run_paths import RunPaths, claim_incarnation, list_steps
from tests.support.tiny_model import random_rank_batch
from tests.unit.test_store_batches import assert_equal, make_rank

pytest.importorskip("pyarrow")


def store(paths: RunPaths, step: int):
    ranks = [make_rank([40, 3, 17], [2, 1], seed=step, version=step), make_rank([9], [1, 0], seed=100 + step)]
    write_batch(paths, step, ranks, state={"step": step})
    return ranks


def assert_same(paths: RunPaths, step: int, ranks) -> None:
    directory = find_batch(paths, step)
    for rank, batch in enumerate(ranks):
        assert_equal(read_rank_batch(directory, rank, deadline_s=0), batch)
    assert read_state(directory, deadline_s=0) == {"step": step}


def finish(packer: RolloutArchiver) -> None:
    """`close` ends it after the batch that it is at."""
    assert packer._thread is not None
    packer._thread.join(200)
    packer.close()


def test_the_same_to_the_last_bit_and_smaller(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    ranks = [random_rank_batch([[900, 800], [700]], seed=1, step=1)]
    write_batch(paths, 1, ranks, state={"step": 1})
    before, after = archive_batch(paths, 1)
    assert after < 0.8 * before
    assert not paths.rollouts_step(1).exists() and find_batch(paths, 1) == paths.archived_step(1)
    assert_same(paths, 1, ranks)
    assert verify_artifact(paths.archived_step(1), deep=True).meta["num_tokens"] == ranks[0].num_tokens
    with pytest.raises(ValueError, match="packed for 1 ranks"):
        read_rank_batch(paths.archived_step(1), 1, deadline_s=0)


def test_killed_anywhere_it_is_there_and_the_next_time_ends_it(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    at, done = 0, False
    while not done:
        paths = RunPaths(tmp_path / str(at))
        ranks = store(paths, 1)
        count = 0

        def strike(operation: str, path: Path) -> None:
            nonlocal count
            count += 1
            if count > at:  # noqa: B023
                raise Killed

        try:
            with files.observe_operations(strike):
                archive_batch(paths, 1)
            done = True
        except Killed:
            assert_same(paths, 1, ranks)
            for parent in (paths.rollouts, paths.archived_rollouts):
                clean_stale_stages(parent)
            assert_same(paths, 1, ranks)
            if list_steps(paths.rollouts):
                archive_batch(paths, 1)
        assert_same(paths, 1, ranks)
        assert list_steps(paths.rollouts) == [] and list_steps(paths.archived_rollouts) == [1]
        at += 1
    assert at > 10


def test_a_damaged_batch_stays_and_a_damaged_packed_one_is_made_anew(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    ranks = store(paths, 1)
    copy = shutil.copytree(paths.rollouts_step(1), tmp_path / "copy")
    archive_batch(paths, 1)
    shutil.copytree(copy, paths.rollouts_step(1))
    shard = paths.archived_step(1) / ("rank_0000.safetensors" + zstd.SUFFIX)
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtifactError, match="xxh3"):
        read_rank_batch(paths.archived_step(1), 0, deadline_s=0)
    archive_batch(paths, 1)
    assert_same(paths, 1, ranks)
    store(paths, 2)
    plain = paths.rollouts_step(2) / "rank_0000.safetensors"
    plain.write_bytes(plain.read_bytes()[:-1] + b"?")
    with pytest.raises(ArtifactError, match="another sum"):
        archive_batch(paths, 2)
    assert paths.rollouts_step(2).exists() and not paths.archived_step(2).exists()


def test_the_packer_leaves_the_newest_and_retention_counts_both(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    batches = {step: store(paths, step) for step in range(1, 9)}
    packer = RolloutArchiver(paths, 0)
    packer.up_to(8, keep=[4])  # the checkpoint of step 4 still needs its batch
    finish(packer)
    assert list_steps(paths.archived_rollouts) == [1, 2, 3]
    packer = RolloutArchiver(paths, 0)
    packer.up_to(8)
    finish(packer)
    assert list_steps(paths.rollouts) == list(range(9 - LEFT_PLAIN, 9)) and list_batches(paths) == list(range(1, 9))
    assert packer.num_bytes[0] > packer.num_bytes[1] > 0
    for step, ranks in batches.items():
        assert_same(paths, step, ranks)
    assert prune_batches(paths, 5, 8) == [1, 2, 3] and list_batches(paths) == [4, 5, 6, 7, 8]
    assert remove_batches_after(paths, 5) == [6, 7, 8] and list_batches(paths) == [4, 5]


def test_batches_that_no_attempt_wrote_stay_as_they_are(tmp_path: Path) -> None:
    """An attempt that goes back trains on them again; archived ones go with the steps that are made anew."""
    paths = RunPaths(tmp_path)
    for step in range(1, 7):
        store(paths, step)
    packer = RolloutArchiver(paths, claim_incarnation(paths))
    packer.up_to(6)
    finish(packer)
    assert list_steps(paths.archived_rollouts) == []
    assert remove_batches_after(paths, 0, 1, spare_given=True) == [] and list_batches(paths) == list(range(1, 7))


def warnings_of(packer: RolloutArchiver, *steps: int) -> list[str]:
    """What it says while it packs up to each of these steps."""
    said: list[str] = []
    sink = logger.add(said.append, level="WARNING", format="{message}")
    try:
        for step in steps:
            packer.up_to(step)
            assert packer._thread is not None
            packer._thread.join(200)
    finally:
        logger.remove(sink)
    return said


def test_a_damaged_batch_is_said_once_and_the_others_are_packed(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for step in (1, 2, 3, 4, 5):
        store(paths, step)
    (paths.rollouts_step(1) / "rank_0001.safetensors").unlink()
    [said] = warnings_of(RolloutArchiver(paths, 0), 4, 5)
    assert "batch 1 is damaged and stays as it is" in said
    assert list_steps(paths.rollouts) == [1, 4, 5] and list_steps(paths.archived_rollouts) == [2, 3]


def test_a_disk_that_fails_for_a_while_is_said_once_and_tried_again(tmp_path: Path) -> None:
    paths, packer = RunPaths(tmp_path), RolloutArchiver(RunPaths(tmp_path), 0)
    for step in (1, 2, 3, 4):
        store(paths, step)

    def full(operation: str, path: Path) -> None:
        if operation == "write" and path.is_relative_to(paths.archived_rollouts):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with files.observe_operations(full):
        [said] = warnings_of(packer, 3, 4)
    assert "cannot be compressed now" in said and list_steps(paths.archived_rollouts) == []
    assert warnings_of(packer, 4) == [] and list_steps(paths.archived_rollouts) == [1, 2]


def test_export_reads_both_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from prime_hpc.cli.verbs.run import export as verb

    tree = {"name": "x", "output_dir": str(tmp_path), "orchestrator": {"env": [{"id": "reverse-text"}]}}
    write_snapshot(Experiment.model_validate(tree), tmp_path / "x", ["test"])
    paths = RunPaths(tmp_path / "x")
    batches = {step: store(paths, step) for step in (1, 2)}
    archive_batch(paths, 1)
    assert verb.run([str(paths.root), "--json"], "prime-hpc export") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["steps"] == [1, 2] and said["num_tokens"] == sum(b.num_tokens for r in batches.values() for b in r)
    import pyarrow.parquet as pq

    table = pq.read_table(said["path"])
    ids = np.concatenate([b.token_ids for ranks in batches.values() for b in ranks])
    assert np.concatenate([np.asarray(row) for row in table["token_ids"].to_pylist()]).tolist() == ids.tolist()


@pytest.mark.parametrize("after", [0, 1])
def test_a_batch_that_is_compressed_while_it_is_read_is_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    paths, calls = RunPaths(tmp_path), [0]
    monkeypatch.setattr(export, "READ_DEADLINE_S", 0.0)
    ranks = store(paths, 1)

    def compress_before(directory: Path, rank: int, **named: float) -> RankBatch:
        if calls[0] == after:
            archive_batch(paths, 1)
        calls[0] += 1
        return read_rank_batch(directory, rank, **named)

    for module in (export, rollouts):
        monkeypatch.setattr(module, "read_rank_batch", compress_before)
    done = export.export_batches(paths, [1], tmp_path / "out.parquet", ["a"])
    assert done.num_tokens == sum(batch.num_tokens for batch in ranks)
    shutil.rmtree(paths.archived_rollouts)
    store(paths, 1)
    calls[0] = 0
    chosen = rollouts.choose_rollouts(paths, ["a"], "no-model", 1_000_000)
    assert chosen.num_stored == sum(batch.num_sequences for batch in ranks)
    assert not [problem for problem in chosen.problems if "batch 1" in problem]
    shutil.rmtree(paths.archived_rollouts / "step_000001")
    with pytest.raises(StoreError):
        PastBatch(paths, 1).read(verify_artifact)


def test_without_pyarrow_the_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prime_hpc.launch import checks

    exp = Experiment.model_validate({"output_dir": str(tmp_path), "orchestrator": {"compress_rollouts": True}})
    assert checks._compression(exp) == []
    monkeypatch.setattr(zstd, "is_there", lambda: False)
    (problem,) = checks._compression(exp)
    assert problem.key == "orchestrator.compress_rollouts" and "pip install" in str(problem)
