"""Batches survive the disk bit for bit, cost at most 16 bytes a token, and damage is found."""

import json
import shutil
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from prime_hpc.store.batch.rank_batch import NOT_SAMPLED, RankBatch
from prime_hpc.store.batch.rank_files import read_rank_batch, write_batch
from prime_hpc.store.batches import list_batches, read_state, remove_batches_after
from prime_hpc.store.errors import ArtifactError, ArtifactExists, FencedError, StoreError
from prime_hpc.store.io import files
from prime_hpc.store.manifest import read_manifest
from prime_hpc.store.run_paths import RunPaths, claim_incarnation


def make_rank(lengths, micro_sizes, seed=0, version=5):
    """A rank whose sequences have `lengths` tokens, `micro_sizes` sequences a micro-batch."""
    rng = np.random.default_rng(seed)
    num_tokens, num_sequences = int(sum(lengths)), len(lengths)
    mask = rng.random(num_tokens) < 0.7
    return RankBatch(
        token_ids=rng.integers(0, 200_000, num_tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(num_tokens), 0).astype(np.float32),
        versions=np.where(mask, rng.integers(max(0, version - 3), version + 1, num_tokens), -1).astype(np.int32),
        advantages=rng.standard_normal(num_tokens).astype(np.float32),
        seq_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        micro_offsets=np.concatenate([[0], np.cumsum(micro_sizes)]).astype(np.int64),
        temperatures=np.full(num_sequences, 0.7, np.float32),
        rewards=rng.random(num_sequences).astype(np.float32),
        sample_ids=rng.integers(0, 2**62, num_sequences),
        group_ids=np.arange(num_sequences, dtype=np.int64),
        env_ids=rng.integers(0, 3, num_sequences).astype(np.int32),
    )


def assert_equal(one, other):
    for field in fields(RankBatch):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if a is None:
            assert b is None, field.name
            continue
        assert a.dtype == b.dtype, field.name
        np.testing.assert_array_equal(a, b, err_msg=field.name)


@st.composite
def ragged_ranks(draw):
    num_micro = draw(st.integers(1, 4))
    ranks = []
    for _ in range(draw(st.integers(1, 3))):
        micro_sizes = draw(st.lists(st.integers(0, 3), min_size=num_micro, max_size=num_micro))
        total = sum(micro_sizes)
        lengths = draw(st.lists(st.integers(0, 40), min_size=total, max_size=total))
        ranks.append(make_rank(lengths, micro_sizes, draw(st.integers(0, 2**31)), draw(st.integers(0, 10**6))))
    return ranks


@settings(deadline=None, max_examples=60)
@given(ragged_ranks())
def test_ragged_batches_round_trip(tmp_path_factory, ranks):
    paths = RunPaths(tmp_path_factory.mktemp("run"))
    state = {"cursor": 3, "nested": {"list": [1, 2.5, None, "x"]}}
    manifest = write_batch(paths, 7, ranks, state=state, meta={"note": "n"})
    for rank, batch in enumerate(ranks):
        assert_equal(read_rank_batch(paths.rollouts_step(7), rank, deadline_s=0), batch)
    assert read_state(paths.rollouts_step(7)) == state
    assert manifest.meta["num_loss_tokens"] == sum(int(b.loss_mask.sum()) for b in ranks)
    assert manifest.meta["num_sequences"] == sum(b.num_sequences for b in ranks)
    assert manifest.meta["num_samples"] == len({int(i) for b in ranks for i in b.sample_ids})
    assert manifest.meta["policy_version"] == 6
    assert manifest.meta["note"] == "n"


def test_ids_of_any_size_come_back(tmp_path):
    paths = RunPaths(tmp_path)
    for step, number in enumerate((-(2**62), -(2**31) - 1, -(2**31), 2**31 - 1, 2**31, 2**62), 1):
        write_batch(paths, step, [replace(make_rank([3, 2], [2]), sample_ids=np.array([number, 0]))], state={})
        assert read_rank_batch(paths.rollouts_step(step), 0).sample_ids.tolist() == [number, 0]


def test_at_most_16_bytes_a_token_and_plain_safetensors(tmp_path):
    paths = RunPaths(tmp_path)
    ranks = [make_rank([900, 1100, 48] * 8, [12, 12], seed) for seed in range(2)]
    manifest = write_batch(paths, 6, ranks, state={"samples": 48})
    num_tokens = sum(b.num_tokens for b in ranks)
    on_disk = sum(p.stat().st_size for p in paths.rollouts_step(6).iterdir())
    assert on_disk <= 16 * num_tokens
    assert manifest.meta["num_tokens"] == num_tokens
    arrays = load_file(paths.rollouts_step(6) / "rank_0001.safetensors")
    np.testing.assert_array_equal(arrays["token_ids"], ranks[1].token_ids)
    np.testing.assert_array_equal(arrays["loss_mask"].astype(bool), ranks[1].loss_mask)


def test_large_arrays_are_views_of_the_file(tmp_path):
    paths = RunPaths(tmp_path)
    write_batch(paths, 1, [make_rank([100], [1])], state={})
    batch = read_rank_batch(paths.rollouts_step(1), 0)
    for name in ("token_ids", "loss_mask", "logprobs", "advantages"):
        array = getattr(batch, name)
        assert not array.flags.owndata, name
        assert not array.flags.writeable, name
        assert array.flags.aligned, name


def test_micro_batches_are_slices(tmp_path):
    batch = make_rank([3, 4, 5], [2, 0, 1])
    assert (batch.num_tokens, batch.num_sequences, batch.num_micro_batches) == (12, 3, 3)
    assert [batch.tokens_of(m) for m in range(3)] == [slice(0, 7), slice(7, 7), slice(7, 12)]
    assert batch.sequences_of(2) == slice(2, 3)
    empty = RankBatch.empty(3)
    empty.check()
    write_batch(RunPaths(tmp_path), 1, [batch, empty], state={})
    assert read_rank_batch(RunPaths(tmp_path).rollouts_step(1), 1).num_micro_batches == 3


def test_damage_is_found(tmp_path):
    paths = RunPaths(tmp_path)
    write_batch(paths, 1, [make_rank([50, 60], [1, 1])], state={"a": 1})
    target = paths.rollouts_step(1) / "rank_0000.safetensors"
    whole = target.read_bytes()
    for position in (0, 9, len(whole) // 2, len(whole) - 1):
        target.write_bytes(whole[:position] + bytes([whole[position] ^ 0x40]) + whole[position + 1 :])
        with pytest.raises(ArtifactError, match=r"rank_0000\.safetensors: expected xxh3") as caught:
            read_rank_batch(paths.rollouts_step(1), 0, deadline_s=0)
        assert caught.value.file == target
    target.write_bytes(whole[:-1])
    with pytest.raises(ArtifactError, match=f"expected {len(whole)} bytes, found {len(whole) - 1} bytes"):
        read_rank_batch(paths.rollouts_step(1), 0, deadline_s=0.05)
    state = paths.rollouts_step(1) / "orchestrator.json"
    state.write_text(state.read_text().replace("1", "2"))
    with pytest.raises(ArtifactError, match=r"orchestrator\.json"):
        read_state(paths.rollouts_step(1), deadline_s=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.zeros(5, np.int64)}, "token_ids: must be a int32 vector"),
        ({"token_ids": [1, 2, 3, 4, 5]}, "token_ids: must be a int32 vector, is list"),
        ({"logprobs": np.zeros(4, np.float32)}, "logprobs: has 4 values, must have 5"),
        ({"advantages": np.full(5, np.nan, np.float32)}, "advantages: holds values that are not finite"),
        ({"seq_offsets": np.array([0, 4])}, "seq_offsets: must grow from 0 to 5"),
        ({"micro_offsets": np.array([0, 1, 0, 1])}, "micro_offsets: must grow"),
        ({"rewards": np.zeros(2, np.float32)}, "rewards: has 2 values, must have 1"),
        ({"versions": np.array([0, 0, 0, 0, 70_000], np.int32)}, "versions: must be -1 or lie within"),
        ({"versions": np.array([-2, 0, 0, 0, 0], np.int32)}, "versions"),
    ],
)
def test_arrays_that_do_not_fit_are_named_and_leave_nothing(tmp_path, change, message):
    good = make_rank([5], [1])
    with pytest.raises(ValueError, match=message):
        write_batch(RunPaths(tmp_path), 1, [replace(good, **change)], state={})
    assert list_batches(RunPaths(tmp_path)) == []
    assert not list(tmp_path.glob("rollouts/.*"))


def test_unequal_micro_batches_and_odd_state_are_refused(tmp_path):
    paths = RunPaths(tmp_path)
    with pytest.raises(ValueError, match="rank 1 has 2 micro-batches, rank 0 has 1"):
        write_batch(paths, 1, [make_rank([5], [1]), make_rank([5], [1, 0])], state={})
    with pytest.raises(ValueError, match="plain JSON"):
        write_batch(paths, 1, [make_rank([5], [1])], state={"rng": np.zeros(2)})
    with pytest.raises(ValueError, match="at least one rank"):
        write_batch(paths, 1, [], state={})


def test_rank_beyond_the_batch_is_refused_at_once(tmp_path):
    paths = RunPaths(tmp_path)
    write_batch(paths, 1, [make_rank([5], [1])] * 2, state={})
    with pytest.raises(ValueError, match="packed for 2 ranks, there is no rank 2"):
        read_rank_batch(paths.rollouts_step(1), 2)


def test_versions_at_the_limits(tmp_path):
    paths = RunPaths(tmp_path)
    versions = np.array([NOT_SAMPLED, 0, 65534, 100, NOT_SAMPLED], np.int32)
    for step, values in enumerate([versions, np.full(5, NOT_SAMPLED, np.int32), np.zeros(5, np.int32)], start=1):
        batch = replace(make_rank([5], [1]), versions=values)
        write_batch(paths, step, [batch], state={})
        assert_equal(read_rank_batch(paths.rollouts_step(step), 0), batch)


def test_listing_ignores_foreign_names_and_removal_after_a_step(tmp_path):
    paths = RunPaths(tmp_path)
    assert list_batches(paths) == []
    for step in (1, 2, 3, 12):
        write_batch(paths, step, [make_rank([5], [1])], state={"after": step})
    for name in ("step_5", "step_000006.bak", ".stage-step_000007-i0000", "notes.txt", "step_x"):
        (paths.rollouts / name).mkdir()
    assert list_batches(paths) == [1, 2, 3, 12]
    assert remove_batches_after(paths, 2) == [3, 12]
    assert list_batches(paths) == [1, 2]


def test_same_batch_again_other_batch_and_fencing(tmp_path):
    paths = RunPaths(tmp_path)
    first = write_batch(paths, 1, [make_rank([5], [1])], state={"a": 1})
    assert write_batch(paths, 1, [make_rank([5], [1])], state={"a": 1}).digest == first.digest
    with pytest.raises(ArtifactExists):
        write_batch(paths, 1, [make_rank([5], [1], seed=9)], state={"a": 1})
    claim_incarnation(paths)
    with pytest.raises(FencedError):
        write_batch(paths, 2, [make_rank([5], [1])], state={}, incarnation=0)
    assert write_batch(paths, 2, [make_rank([5], [1])], state={}, incarnation=1).incarnation == 1
    assert json.loads((paths.rollouts_step(2) / "manifest.json").read_text())["incarnation"] == 1
    assert read_manifest(paths.rollouts_step(2)).version == 1


def test_a_batch_whose_run_is_deleted_while_it_is_read_is_not_waited_for(tmp_path, monkeypatch):
    paths, seconds = RunPaths(tmp_path / "run"), [0.0]
    write_batch(paths, 1, [make_rank([3], [1])], state={"step": 1}, incarnation=0)

    def deleted_after_it_was_listed(*_: object, **__: object) -> None:
        shutil.rmtree(paths.root)

    def sleep(pause: float) -> None:
        seconds[0] += pause

    monkeypatch.setattr(files, "await_name", deleted_after_it_was_listed)
    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: seconds[0], sleep=sleep))
    with pytest.raises(StoreError, match="was deleted while it was read"):
        read_state(paths.rollouts_step(1))
    assert files.GONE_S < seconds[0] < files.GONE_S + 1
