"""The ranks' parallel dimensions: arithmetic, refusals, the documented flag, and rows that ranks split."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.sections.parallel import ParallelConfig, ParallelDims
from prime_hpc.config.sources.load import load_experiment
from prime_hpc.trainer.batching.micro_batches import make_micro_batch
from prime_hpc.trainer.ops.context_parallel import local_targets, repeats
from prime_hpc.trainer.parallel import Parallel
from prime_hpc.trainer.parallel.distribute import _check_heads
from tests.support.every_family import tiny_config
from tests.support.tiny_model import random_rank_batch


def parallel(rank: int, **layout: int) -> Parallel:
    """A place in a layout, without meshes."""
    return Parallel(ParallelDims(**layout), rank, None, None, None, None, None)  # type: ignore[arg-type]


def test_by_default_all_ranks_shard_one_copy() -> None:
    assert ParallelConfig().dims(6) == ParallelDims(dp_shard=6)


def test_what_the_others_leave_is_sharded() -> None:
    dims = ParallelConfig(dp_replicate=2, tp=2, cp=2).dims(16)
    assert dims == ParallelDims(dp_replicate=2, dp_shard=2, cp=2, tp=2)
    assert (dims.world_size, dims.num_data_ranks, dims.ranks_per_part, dims.fsdp) == (16, 4, 4, 4)
    assert dims.describe() == "dp_replicate 2 x dp_shard 2 x cp 2 x tp 2"


@pytest.mark.parametrize(
    ("config", "num_ranks", "message"),
    [
        ({"tp": 3}, 4, r"trainer\.parallel \(tp 3\) does not divide trainer\.num_ranks = 4: use a multiple of 3"),
        ({"dp_shard": 4, "cp": 2}, 4, r"\(cp 2 x dp_shard 4\) makes 8 ranks and trainer\.num_ranks is 4"),
        ({"dp_replicate": 2, "ep": 4}, 4, r"ep = 4 does not divide the 2 ranks of one copy .*: use 2"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(config: dict[str, int], num_ranks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**config).dims(num_ranks)


def test_a_config_that_does_not_fit_names_where_it_was_stated() -> None:
    with pytest.raises(ConfigError, match=r"tp 3.*trainer\.num_ranks: command line"):
        load_experiment(["--trainer.num-ranks", "4", "--trainer.parallel.tp", "3", "--data.type", "fake"], "sft", {})


@pytest.mark.parametrize(
    ("argv", "entrypoint", "cp"),
    [
        (["--model.cp", "--num-ranks", "4", "--data.fake"], "trainer", 2),
        (["--trainer.num-ranks", "4", "--model.cp", "4", "--data.type", "fake"], "sft", 4),
        (["--trainer.num-ranks", "4", "--trainer.model.cp=2", "--sft.data.type", "fake"], "sft", 2),
    ],
)
def test_the_documented_flag_of_context_parallelism(argv: list[str], entrypoint: str, cp: int) -> None:
    assert load_experiment(argv, entrypoint, {}).experiment.trainer.parallel_dims == ParallelDims(
        dp_shard=4 // cp, cp=cp
    )


def test_neighbours_share_a_part_of_the_batch() -> None:
    places = [parallel(r, dp_shard=2, cp=2, tp=2) for r in range(8)]
    assert [p.data_rank for p in places] == [0] * 4 + [1] * 4
    assert [p.cp_rank for p in places] == [0, 0, 1, 1] * 2
    assert [p.leads for p in places] == [True, False, False, False] * 2


@given(
    lengths=st.lists(st.integers(1, 40), max_size=6), cp=st.integers(1, 4), tp=st.integers(1, 3), seed=st.integers(0, 9)
)
def test_ranks_split_a_row_into_its_parts(lengths: list[int], cp: int, tp: int, seed: int) -> None:
    batch = random_rank_batch([lengths], seed=seed)
    whole = make_micro_batch(batch, 0, share_prefixes=False)
    parts = [make_micro_batch(batch, 0, parallel=parallel(rank, cp=cp, tp=tp)) for rank in range(cp * tp)]
    assert len({p.input_ids.shape for p in parts}) == 1
    assert parts[0].input_ids.shape[1] % tp == 0
    own = parts[::tp]
    for key in ("input_ids", "position_ids"):
        together = torch.cat([getattr(p, key) for p in own], dim=1)
        assert torch.equal(together[:, : whole.input_ids.shape[1]], getattr(whole, key))
    assert int(own[0].packing.lengths.sum()) == together.shape[1]
    targets = [t for p in own for t in p.targets[p.own].tolist()]
    assert targets == whole.targets.tolist()
    for p in own:
        assert torch.equal(p.targets, whole.targets) and torch.equal(p.targets_of_sequence, whole.targets_of_sequence)
        span = p.input_ids.shape[1]
        assert ((p.target_index >= 0) & (p.target_index < span)).all()


def test_targets_belong_to_the_token_that_predicts_them() -> None:
    index = np.array([0, 3, 4, 7])
    assert [local_targets(index, 4 * r, 4 * r + 4) for r in range(2)] == [slice(0, 2), slice(2, 4)]
    assert local_targets(index, 8, 12) == slice(4, 4)


def test_heads_are_split_or_repeated_or_refused() -> None:
    assert (repeats(8, 4, 2), repeats(8, 2, 4), repeats(8, 1, 8)) == (1, 2, 8)
    with pytest.raises(ValueError, match="cp = 3 does not divide the 8 attention heads"):
        repeats(8, 8, 3)
    with pytest.raises(ValueError, match="6 key-value heads of a rank can be neither split nor repeated"):
        repeats(12, 6, 4)


def test_heads_of_layers_that_differ_are_each_checked() -> None:
    def check(cp: int) -> None:
        heads = {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
        hf = SimpleNamespace(config=tiny_config("gemma4_text", num_attention_heads=8, **heads))
        _check_heads(hf, parallel(0, cp=cp))

    check(4)
    with pytest.raises(ValueError, match="cp = 3 does not divide the 8"):
        check(3)
