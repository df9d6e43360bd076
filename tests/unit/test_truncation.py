"""Top-p, top-k and min-p in the trainer: the distribution that is left, against float64 and against vLLM's rules."""

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from prime_hpc.store.batch.rank_batch import select_micro_batches
from prime_hpc.trainer.batching.micro_batches import make_micro_batch
from prime_hpc.trainer.ops import truncation as module
from prime_hpc.trainer.ops.logprobs import VocabShard
from prime_hpc.trainer.ops.truncation import find_cut
from tests.proofs import prove_sampling
from tests.proofs.prove_sampling import instance, kept, ours, stated
from tests.support.tiny_model import random_rank_batch


def test_log_probabilities_entropies_and_gradients_match_float64() -> None:
    proofs = list(prove_sampling.prove(2))
    assert [p for p in proofs if not p.holds] == [] and len(proofs) == 4 * (len(prove_sampling.RULES) + 2)
    arrays, rules = instance(90, 61, seed=0)
    outside = [not kept(arrays[0][i] @ arrays[1].T / arrays[3][i], rule)[arrays[2][i]] for i, rule in enumerate(rules)]
    assert 10 < sum(outside) < 80  # targets on both sides of the cut


def test_a_mistake_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_all = lambda logits, cut, column, own: None  # noqa: E731
    monkeypatch.setattr("prime_hpc.trainer.ops.logprobs.apply_cut", keep_all)
    broken = {p.subject for p in prove_sampling.prove(1) if not p.holds}
    assert broken == {p.subject for p in prove_sampling.prove(1)} - {"whole vocabulary"}


@dataclass(frozen=True)
class ThreadShard(VocabShard):
    """A rank that is a thread: exchanges with the others through a shared list."""

    rank: int = 0
    table: Any = None
    barrier: Any = None

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.table[self.rank] = x.clone()
        self.barrier.wait(60)
        parts = list(self.table)
        self.barrier.wait(60)
        return parts

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self.exchange(x)).sum(0))

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self.exchange(x)).amax(0))

    def columns(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.exchange(x), dim=1)


@pytest.mark.parametrize("listed", [4, 1024])
def test_ranks_that_split_the_vocabulary_cut_where_one_does(listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTED", listed)
    arrays, rules = instance(40, 60, seed=3)
    whole = ours(arrays, rules, chunk_tokens=16)
    found: list[tuple[torch.Tensor, ...]] = [()] * 3
    table, barrier = [None] * 3, threading.Barrier(3)

    def work(rank: int) -> None:
        own = [arrays[0], arrays[1][rank * 20 : rank * 20 + 20], *arrays[2:]]
        shard = ThreadShard(None, rank * 20, rank, table, barrier)  # type: ignore[arg-type]
        found[rank] = ours(own, rules, chunk_tokens=16, shard=shard)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    heads = torch.cat([part[3] for part in found])
    for part in found:
        for mine, theirs in zip((*part[:3], heads), whole, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_ranks_of_a_process_group_exchange_their_columns(group: None) -> None:
    shard = VocabShard(init_device_mesh("cpu", (1,)), 0)
    arrays, rules = instance(20, 61, seed=5)
    whole, found = ours(arrays, rules), ours(arrays, rules, shard=shard)
    for mine, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_of_tokens_that_tie_at_the_boundary_as_much_counts_as_the_sampler_keeps() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 1.0, 0.0]])  # softmax: 0.38, four times 0.139, 0.051
    cut = find_cut(logits, stated([{"top_p": 0.6}]), None)
    assert cut.least.item() == 1.0 and cut.share.exp().item() == pytest.approx(0.5)  # 0.38 and two of the four
    cut = find_cut(logits, stated([{"top_k": 2}]), None)
    assert cut.least.item() == 1.0 and cut.share.item() == 0  # vLLM's CPU sampler keeps all that tie for the k-th place
    cut = find_cut(logits, stated([{"top_k": 2}]), None, keeps_ties=False)
    assert cut.least.item() == 1.0 and cut.share.exp().item() == pytest.approx(0.25)  # its GPU kernel two tokens
    cut = find_cut(logits, stated([{"top_k": 3, "top_p": 0.7}]), None, keeps_ties=False)  # of 0.58, 0.21, 0.21
    assert cut.least.item() == 1.0 and cut.share.exp().item() == pytest.approx(0.25)
    cut = find_cut(logits, stated([{}]), None)
    assert cut.least.item() == -torch.inf and cut.share.item() == 0


def test_a_batch_says_of_each_target_what_it_was_sampled_from() -> None:
    batch = random_rank_batch([[20, 9], [15, 30]], seed=3)
    num = batch.num_sequences
    columns: dict[str, Any] = {
        "top_ps": np.array([1, 0.9, 1, 0.5], np.float32),
        "top_ks": np.array([0, 0, 0, 9], np.int32),
    }
    truncated = replace(
        batch, **columns, min_ps=np.zeros(num, np.float32), ce_weights=1 - batch.loss_mask * np.float32(1)
    )
    truncated.check()
    micro = make_micro_batch(truncated, 0)
    assert micro.top_p is not None and micro.trained is not None and micro.top_k is not None
    sampled = torch.zeros(micro.num_targets, dtype=torch.bool)
    sampled[micro.trained] = True
    assert torch.equal(micro.top_p, torch.where((micro.sequence == 1) & sampled, 0.9, 1.0).float())
    assert (micro.temperatures[~sampled] == 1).all()
    assert not micro.all_have_top_k and micro.most_top_k == 0
    other = make_micro_batch(truncated, 1)
    assert other.all_have_top_k and other.most_top_k == 9
    assert make_micro_batch(batch, 0).top_p is None
    merged = select_micro_batches([(truncated, 1), (batch, 0)], 3)
    merged.check()
    assert merged.top_ps is not None and merged.top_ks is not None
    assert merged.top_ps.tolist() == [1, 0.5, 1, 1] and merged.top_ks.tolist() == [0, 9, 0, 0]
    changes: list[dict[str, Any]] = [
        {"top_ps": None},
        {"top_ps": columns["top_ps"][:2]},
        {"min_ps": np.full(num, 2, np.float32)},
    ]
    for change in changes:
        with pytest.raises(ValueError, match=f"{next(iter(change))}: "):
            replace(truncated, **change).check()
