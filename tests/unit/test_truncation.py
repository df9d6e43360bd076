"""Top-p, top-k and min-p in the trainer: the distribution that is left, against float64 and against vLLM's rules."""

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from prime_hpc.trainer import truncation as module
from prime_hpc.trainer.batches import make_micro_batch, select_micro_batches
from prime_hpc.trainer.logprobs import VocabShard, token_logprobs
from prime_hpc.trainer.truncation import Truncation, find_cut
from tests.support.tiny_model import random_rank_batch

RULES: list[dict[str, float]] = [
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_k": 7},
    {"top_k": 1},
    {"min_p": 0.05},
    {"top_p": 0.8, "top_k": 20},
    {"top_p": 0.8, "top_k": 5, "min_p": 0.02},
    {"top_p": 0.999},
    {},
]


def stated(rules: list[dict[str, float]]) -> Truncation:
    top_p, top_k, min_p = ([r.get(k, off) for r in rules] for k, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)))
    bounded = all(k or p == 1 for p, k in zip(top_p, top_k, strict=True))
    return Truncation(
        torch.tensor(top_p), torch.tensor(top_k, dtype=torch.int64), torch.tensor(min_p), int(max(top_k)), bounded
    )


def kept(logits: np.ndarray, rule: dict[str, float]) -> np.ndarray:
    """bool[V] by the definitions, one token after another, float64; ties are none."""
    p = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    keep = p >= rule.get("min_p", 0.0) * p.max()
    if "top_k" in rule:
        keep &= p >= np.sort(p)[::-1][int(rule["top_k"]) - 1]
    left = np.where(keep, p, 0) / p[keep].sum()
    likelier = np.array([left[left > x].sum() for x in left])
    return keep & (likelier < rule["top_p"]) if rule.get("top_p", 1) < 1 else keep


def reference(arrays: list[np.ndarray], rules: list[dict[str, float]]) -> tuple[np.ndarray, ...]:
    """log p, entropy and the gradients of sum(outer * log p) in hidden and head, by hand, float64."""
    hidden, head, targets, temperatures, outer = arrays
    logits = hidden @ head.T / temperatures[:, None]
    log_p, entropy, d_logits = np.zeros(len(targets)), np.zeros(len(targets)), np.zeros_like(logits)
    for i, (row, target, rule) in enumerate(zip(logits, targets, rules, strict=True)):
        support = kept(row, rule)
        support[target] = True
        p = np.where(support, np.exp(row - row.max()), 0)
        p /= p.sum()
        log_p[i], entropy[i] = np.log(p[target]), -(p[p > 0] * np.log(p[p > 0])).sum()
        d_logits[i] = (np.arange(len(row)) == target) - p
    d_logits *= (outer / temperatures)[:, None]
    return log_p, entropy, d_logits @ head, d_logits.T @ hidden


def instance(num: int, vocab: int, seed: int) -> tuple[list[np.ndarray], list[dict[str, float]]]:
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal((num, 8)), rng.standard_normal((vocab, 8)), rng.integers(0, vocab, num)]
    arrays += [rng.choice([0.6, 1.0, 1.3], num), rng.standard_normal(num)]
    return arrays, [RULES[i % len(RULES)] for i in range(num)]


def ours(arrays: list[np.ndarray], rules: list[dict[str, float]], **options: Any) -> tuple[torch.Tensor, ...]:
    hidden, head, targets, temperatures, outer = (
        torch.from_numpy(x).float() if x.dtype == np.float64 else torch.from_numpy(x) for x in arrays
    )
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    logprobs, entropy = token_logprobs(
        hidden, head, targets, temperatures, truncation=stated(rules), with_entropy=True, **options
    )
    (outer * logprobs).sum().backward()
    assert hidden.grad is not None and head.grad is not None
    return logprobs.detach(), entropy, hidden.grad, head.grad


@pytest.mark.parametrize("listed", [4, 1024])  # so few that most rows are sorted whole; none is
@pytest.mark.parametrize("chunk_tokens", [7, 2048])
def test_values_and_gradients_match_float64(chunk_tokens: int, listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTED", listed)
    arrays, rules = instance(90, 61, seed=chunk_tokens)
    found = ours(arrays, rules, chunk_tokens=chunk_tokens)
    for mine, theirs in zip(found, reference(arrays, rules), strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=2e-4, atol=2e-5)
    outside = [not kept(arrays[0][i] @ arrays[1].T / arrays[3][i], rule)[arrays[2][i]] for i, rule in enumerate(rules)]
    assert 10 < sum(outside) < 80  # targets on both sides of the cut


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
        thread.join(60)
    heads = torch.cat([part[3] for part in found])
    for part in found:
        for mine, theirs in zip((*part[:3], heads), whole, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_of_tokens_that_tie_at_the_boundary_as_much_counts_as_the_sampler_keeps() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 1.0, 0.0]])  # softmax: 0.38, four times 0.139, 0.051
    cut = find_cut(logits, stated([{"top_p": 0.6}]), None)
    assert cut.least.item() == 1.0 and cut.share.exp().item() == pytest.approx(0.5)  # 0.38 and two of the four
    cut = find_cut(logits, stated([{"top_k": 2}]), None)
    assert cut.least.item() == 1.0 and cut.share.item() == 0  # vLLM's CPU sampler keeps all that tie for the k-th place
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
