"""Log-probabilities of targets through the LM head: against float64 numpy, chunked, with entropy and soft-capping."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from prime_hpc.trainer.ops.logprobs import token_logprobs


def reference(
    hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, temperatures: np.ndarray, outer: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log p, and the gradients of sum(outer * log p) in hidden and head by hand, all float64."""
    logits = hidden @ head.T / temperatures[:, None]
    shifted = logits - logits.max(axis=1, keepdims=True)
    p = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    rows = np.arange(len(targets))
    onehot = np.zeros_like(p)
    onehot[rows, targets] = 1.0
    d_logits = (outer / temperatures)[:, None] * (onehot - p)
    return np.log(p[rows, targets]), d_logits @ head, d_logits.T @ hidden


@pytest.mark.parametrize("chunk_tokens", [7, 50, 2048])
@pytest.mark.parametrize("seed", [0, 1])
def test_values_and_gradients_match_float64(seed: int, chunk_tokens: int) -> None:
    rng, num = np.random.default_rng(seed), 50
    arrays = [rng.standard_normal((num, 8)), rng.standard_normal((31, 8)), rng.integers(0, 31, num)]
    arrays += [rng.choice([0.6, 1.0, 1.3], num), rng.standard_normal(num)]
    log_p, d_hidden, d_head = reference(*arrays)
    hidden, head, targets, temperatures, outer = (
        torch.from_numpy(x).float() if x.dtype == np.float64 else torch.from_numpy(x) for x in arrays
    )
    hidden, head = hidden.requires_grad_(), head.requires_grad_()
    logprobs, _ = token_logprobs(hidden, head, targets, temperatures, chunk_tokens=chunk_tokens)
    (outer * logprobs).sum().backward()
    np.testing.assert_allclose(logprobs.detach().numpy(), log_p, rtol=1e-5, atol=1e-5)
    assert hidden.grad is not None and head.grad is not None
    np.testing.assert_allclose(hidden.grad.numpy(), d_hidden, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(head.grad.numpy(), d_head, rtol=1e-4, atol=1e-5)


def test_no_targets_give_nothing_and_zero_gradients() -> None:
    hidden = torch.zeros(0, 8, requires_grad=True)
    head = torch.randn(31, 8, requires_grad=True)
    empty = torch.zeros(0)
    logprobs, entropy = token_logprobs(hidden, head, empty.long(), empty, with_entropy=True)
    logprobs.sum().backward()
    assert logprobs.shape == entropy.shape == (0,)
    assert head.grad is not None and torch.equal(head.grad, torch.zeros_like(head))


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
        (logprobs * torch.arange(40) - 9 * entropy).sum().backward()
        grads.append((logprobs.detach(), entropy.detach(), h.grad, w.grad, b.grad))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk_tokens", [7, 2048])
def test_a_float32_head_does_not_round_its_logits(chunk_tokens: int) -> None:
    torch.manual_seed(0)
    hidden, head, bias = (torch.randn(*s).bfloat16() for s in ((40, 8), (31, 8), (31,)))
    targets, temperatures = torch.randint(0, 31, (40,)), torch.ones(40)
    exact = torch.nn.functional.linear(hidden.float(), head.float(), bias.float()).log_softmax(-1)
    rounded = torch.nn.functional.linear(hidden, head, bias).float().log_softmax(-1)
    for whole, expected in ((True, exact), (False, rounded)):
        found, entropy = token_logprobs(
            hidden, head, targets, temperatures, bias=bias, chunk_tokens=chunk_tokens, with_entropy=True, exact=whole
        )
        torch.testing.assert_close(found, expected.gather(1, targets[:, None])[:, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), rtol=0, atol=1e-5)
    assert (exact - rounded).abs().max() > 1e-3


@pytest.mark.parametrize(("chunk_tokens", "parts"), [(2048, 3), (7, 4)])  # in chunks, logits are computed twice
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_head_costs_no_gradient_of_its_own(dtype: torch.dtype, chunk_tokens: int, parts: int) -> None:
    torch.manual_seed(0)
    hidden, head, bias = (torch.randn(*shape).to(dtype) for shape in ((42, 8), (31, 8), (31,)))
    targets, temperatures = torch.randint(0, 31, (42,)), torch.ones(42)
    grads, flops = [], []
    for trained in (True, False):
        h, w, b = hidden.clone().requires_grad_(), head.clone(), bias.clone()
        w.requires_grad_(trained), b.requires_grad_(trained)
        with FlopCounterMode(display=False) as counter:
            logprobs, _ = token_logprobs(h, w, targets, temperatures, bias=b, chunk_tokens=chunk_tokens)
            logprobs.sum().backward()
        assert (w.grad is not None) == (b.grad is not None) == trained
        grads.append(h.grad)
        flops.append(counter.get_total_flops())
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    if dtype == torch.bfloat16:  # the counter knows torch's own products, which float32 on some CPUs does not use
        assert flops[1] * parts == flops[0] * (parts - 1)
