"""The objective against a float64 numpy reference written from the formula; chunked log-probabilities; denominators."""

import numpy as np
import pytest
import torch

from prime_hpc.trainer.batches import make_micro_batch
from prime_hpc.trainer.losses import aipo_loss, sft_loss, target_weights, token_logprobs
from tests.support.tiny_model import random_rank_batch

DELTA = 2.0


def reference(
    hidden: np.ndarray,
    head: np.ndarray,
    targets: np.ndarray,
    temperatures: np.ndarray,
    mu: np.ndarray,
    advantages: np.ndarray,
    weights: np.ndarray,
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Loss, its gradients in hidden and head by hand, and the ratios, all float64."""
    logits = hidden @ head.T / temperatures[:, None]
    shifted = logits - logits.max(axis=1, keepdims=True)
    p = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    rows = np.arange(len(targets))
    log_pi = np.log(p[rows, targets])
    ratio = np.exp(log_pi - mu)
    factor = weights * np.minimum(ratio, DELTA) * advantages
    onehot = np.zeros_like(p)
    onehot[rows, targets] = 1.0
    d_logits = -(factor / temperatures)[:, None] * (onehot - p)
    return float(-(factor * log_pi).sum()), d_logits @ head, d_logits.T @ hidden, ratio


def problem(seed: int, num: int = 50) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "hidden": rng.standard_normal((num, 8)),
        "head": rng.standard_normal((31, 8)),
        "targets": rng.integers(0, 31, num),
        "temperatures": rng.choice([0.6, 1.0, 1.3], num),
        "mu": rng.normal(-4.0, 2.0, num),
        "advantages": rng.standard_normal(num),
        "weights": rng.random(num) / num,
    }


@pytest.mark.parametrize("chunk_tokens", [7, 50, 2048])
@pytest.mark.parametrize("seed", [0, 1])
def test_aipo_matches_the_formula(seed: int, chunk_tokens: int) -> None:
    arrays = problem(seed)
    loss, d_hidden, d_head, ratio = reference(**arrays)
    assert (ratio > DELTA).sum() > 3 and (ratio < DELTA).sum() > 3
    t = {k: torch.from_numpy(v).float() if v.dtype == np.float64 else torch.from_numpy(v) for k, v in arrays.items()}
    hidden, head = t["hidden"].requires_grad_(), t["head"].requires_grad_()
    logprobs, _ = token_logprobs(hidden, head, t["targets"], t["temperatures"], chunk_tokens=chunk_tokens)
    got, stats = aipo_loss(logprobs, t["mu"], t["advantages"], t["weights"], DELTA)
    got.backward()
    assert got.item() == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(hidden.grad.numpy(), d_hidden, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(head.grad.numpy(), d_head, rtol=1e-4, atol=1e-6)
    assert stats.sums["clipped"].item() == (ratio > DELTA).sum()
    assert stats.sums["ratio"].item() == pytest.approx(ratio.sum(), rel=1e-4)
    assert stats.maxima["ratio_max"].item() == pytest.approx(ratio.max(), rel=1e-4)
    assert stats.sums["logprob_diff"].item() == pytest.approx(np.abs(np.log(ratio)).sum(), rel=1e-4)
    assert stats.sums["kl"].item() == pytest.approx((ratio - 1 - np.log(ratio)).sum(), rel=1e-3)


def test_the_clip_is_on_the_ratio_and_from_above_only() -> None:
    log_pi = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    mu = torch.tensor([-1.0, -1.0 - np.log(10.0), -1.0 + np.log(10.0), -np.inf])
    loss, stats = aipo_loss(log_pi, mu, torch.tensor([1.0, 1.0, 1.0, -1.0]), torch.ones(4), DELTA)
    loss.backward()
    # ratio 1: as it is; 10: clipped to delta; 0.1: not clipped from below; infinite: delta, never NaN
    torch.testing.assert_close(log_pi.grad, torch.tensor([-1.0, -DELTA, -0.1, DELTA]))
    assert stats.sums["clipped"].item() == 2


def test_empty_micro_batch_has_loss_zero_and_zero_gradients() -> None:
    hidden = torch.zeros(0, 8, requires_grad=True)
    head = torch.randn(31, 8, requires_grad=True)
    empty = torch.zeros(0)
    logprobs, entropy = token_logprobs(hidden, head, empty.long(), empty, with_entropy=True)
    loss, _ = aipo_loss(logprobs, empty, empty, empty, DELTA)
    loss.backward()
    assert loss.item() == 0 and entropy.shape == (0,)
    assert torch.equal(head.grad, torch.zeros_like(head))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logprobs_and_entropy_equal_log_softmax(softcap: float | None) -> None:
    torch.manual_seed(0)
    hidden, head, bias = torch.randn(40, 8), torch.randn(31, 8), torch.randn(31)
    targets, temperatures = torch.randint(0, 31, (40,)), torch.rand(40) + 0.5
    temperatures[3] = 0.0  # greedy counts as 1
    grads = []
    for ours in (True, False):
        h, w, b = (x.clone().requires_grad_() for x in (hidden, head, bias))
        if ours:
            logprobs, entropy = token_logprobs(
                h, w, targets, temperatures, bias=b, logit_scale=0.5, softcap=softcap, chunk_tokens=9, with_entropy=True
            )
        else:
            logits = (h @ w.T + b) * 0.5 if softcap is None else torch.tanh((h @ (0.5 * w).T + b) / softcap) * softcap
            log_p = (logits / torch.where(temperatures > 0, temperatures, 1.0)[:, None]).log_softmax(-1)
            logprobs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        (logprobs * torch.arange(40)).sum().backward()
        grads.append((logprobs.detach(), entropy.detach(), h.grad, w.grad, b.grad))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def loss_of(
    batch: object, normalize: str, num_targets: int, num_sequences: int, parts: range
) -> tuple[float, torch.Tensor]:
    """Summed loss and gradient of a linear policy over micro-batches `parts`, with given global denominators."""
    torch.manual_seed(0)
    embedding = torch.randn(300, 8)
    head = torch.randn(300, 8, requires_grad=True)
    total = torch.zeros(())
    for i in parts:
        micro = make_micro_batch(batch, i)  # type: ignore[arg-type]
        hidden = embedding[micro.input_ids[0]][micro.target_index]
        logprobs, _ = token_logprobs(hidden, head, micro.targets, micro.temperatures)
        weights = target_weights(micro.sequence, micro.targets_of_sequence, normalize, num_targets, num_sequences)
        loss, _ = aipo_loss(logprobs, micro.behaviour_logprobs, micro.advantages, weights, 8.0)
        total = total + loss
    total.backward()
    assert head.grad is not None
    return total.item(), head.grad


@pytest.mark.parametrize("normalize", ["token", "sequence"])
def test_denominator_is_global(normalize: str) -> None:
    lengths = [[5, 20], [11], [], [30, 3, 4]]
    batch = random_rank_batch(lengths, seed=1)
    together = random_rank_batch([[n for micro in lengths for n in micro]], seed=1)
    count, sequences = int(batch.loss_mask.sum()), 6
    whole, whole_grad = loss_of(together, normalize, count, sequences, range(1))
    split, split_grad = loss_of(batch, normalize, count, sequences, range(4))
    assert split == pytest.approx(whole, rel=1e-5)
    torch.testing.assert_close(split_grad, whole_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("normalize", ["token", "sequence"])
def test_weights_sum_to_one(normalize: str) -> None:
    batch = random_rank_batch([[5, 20], [11], [30, 3, 4]], seed=1)
    total = torch.zeros(())
    for i in range(3):
        micro = make_micro_batch(batch, i)
        total += target_weights(
            micro.sequence, micro.targets_of_sequence, normalize, int(batch.loss_mask.sum()), batch.num_sequences
        ).sum()
    assert total.item() == pytest.approx(1.0, rel=1e-5)


def test_sequence_normalisation_gives_each_sequence_the_same_weight() -> None:
    micro = make_micro_batch(random_rank_batch([[5, 20]], seed=1), 0)
    weights = target_weights(micro.sequence, micro.targets_of_sequence, "sequence", 99, 2)
    per_sequence = torch.zeros(2).scatter_add_(0, micro.sequence, weights)
    torch.testing.assert_close(per_sequence, torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match=r"trainer\.loss\.normalize"):
        target_weights(micro.sequence, micro.targets_of_sequence, "batch", 1, 1)


def test_masked_tokens_change_nothing() -> None:
    batch = random_rank_batch([[5, 20], [11]], seed=1)
    rng = np.random.default_rng(5)
    logprobs, advantages = batch.logprobs.copy(), batch.advantages.copy()
    off = ~batch.loss_mask
    logprobs[off], advantages[off] = rng.normal(size=off.sum()), rng.normal(size=off.sum())
    other = type(batch)(**{**batch.__dict__, "logprobs": logprobs, "advantages": advantages})
    count = int(batch.loss_mask.sum())
    loss, grad = loss_of(batch, "token", count, 3, range(2))
    same_loss, same_grad = loss_of(other, "token", count, 3, range(2))
    assert loss == same_loss and torch.equal(grad, same_grad)
    # and trained tokens do
    advantages[np.flatnonzero(batch.loss_mask)[3]] += 1
    assert loss_of(other, "token", count, 3, range(2))[0] != loss


def test_a_first_token_is_never_a_target() -> None:
    batch = random_rank_batch([[5, 20], [11]], seed=1)
    everything = type(batch)(**{**batch.__dict__, "loss_mask": np.ones_like(batch.loss_mask)})
    micro = make_micro_batch(everything, 0)
    assert micro.num_targets == 4 + 19
    ids = everything.token_ids
    assert micro.targets.tolist() == ids[1:5].tolist() + ids[6:25].tolist()
    assert micro.target_index.tolist() == [*range(4), *range(5, 24)]
    assert micro.position_ids[0].tolist() == [*range(5), *range(20)]


def test_sft_loss_is_the_mean_nll() -> None:
    logprobs = torch.tensor([-1.0, -3.0], requires_grad=True)
    loss, _ = sft_loss(logprobs, torch.full((2,), 0.5))
    loss.backward()
    assert loss.item() == 2.0 and logprobs.grad.tolist() == [-0.5, -0.5]
