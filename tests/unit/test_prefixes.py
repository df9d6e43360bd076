"""Samples that begin alike are computed together: same log-probabilities and gradients, fewer tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from prime_hpc.trainer.batching.micro_batches import build_rank_batch, make_micro_batch
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.ops import attention, cpu_matmul, prefix_attention
from tests.unit.test_attention import ALONE


def group_batch(seed: int = 0):
    """Three groups, members interleaved: prompts of 20, 9 and 30 tokens; the last group's members differ at once."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 300, n, dtype=np.int32) for n in (20, 9, 30)]
    groups = np.array([0, 1, 0, 2, 1, 0, 1, 2, 0])
    ids = [
        np.concatenate([prompts[g], rng.integers(0, 300, n, dtype=np.int32)])
        for g, n in zip(groups, range(1, 10), strict=True)
    ]
    ids[2] = ids[2][:20]  # the whole sample is the others' prompt
    ids[7][0] = (ids[7][0] + 1) % 300
    masks = [rng.random(len(row)) < 0.6 for row in ids]
    batch = build_rank_batch([list(range(len(ids)))], ids, masks, rng.standard_normal(len(ids)).astype(np.float32))
    return replace(batch, group_ids=groups, temperatures=(1 + groups / 2).astype(np.float32))


def test_rows_are_the_longest_common_prefixes_of_groups() -> None:
    ids = np.array([1, 2, 3, 4, 1, 2, 9, 1, 2, 3, 7, 7, 1, 2])
    lengths, groups = np.array([4, 3, 3, 2, 2]), np.array([5, 5, 8, 8, 5])
    rows = prefix_attention.shared_rows(ids, lengths, groups)
    assert rows is not None
    assert rows.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8, 9, 0, 1]
    kept = ids[np.unique(rows, return_index=True)[1]]
    assert (kept[rows] == ids).all()
    assert prefix_attention.shared_rows(ids, lengths, np.arange(5)) is None


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_sharing_changes_neither_logprobs_nor_gradients(kind: str) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
    torch.manual_seed(0)
    config = {"qwen3": Qwen3Config, "llama": LlamaConfig}[kind](**shape, attn_implementation=attention.register())
    policy = Policy(AutoModelForCausalLM.from_config(config).eval().double(), "sdpa", chunk_tokens=512, parallel=ALONE)
    batch, found = group_batch(), []
    for share in (False, True):
        micro = make_micro_batch(batch, 0, share_prefixes=share)
        with policy.packing(micro):
            logprobs, _ = policy(micro)
            (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        found.append((micro, logprobs, [p.grad for p in policy.parameters()]))
        policy.zero_grad()
    (alone, expected, wanted), (shared, logprobs, grads) = found
    assert shared.num_shared == 3 * 20 + 2 * 9
    assert shared.input_ids.shape[1] == shared.num_tokens - shared.num_shared == alone.input_ids.shape[1] - 78
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)  # float32 in the output head
    for a, b in zip(grads, wanted, strict=True):
        assert b is not None
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.abs().max()))


def test_a_layers_output_is_rows_whatever_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models view it as complex numbers, or as heads (Llama 4)."""
    monkeypatch.setattr(cpu_matmul, "onednn_is_faster", lambda: True)
    for rows, inputs, outputs in ((40, 64, 16), (1, 64, 16), (300, 16, 64), (300, 400, 16)):
        weight = torch.randn(outputs, inputs, requires_grad=True)
        out = cpu_matmul.linear(torch.randn(1, rows, inputs), weight)
        assert out.is_contiguous()
        out += 1  # in place, as residuals of some models
        out.sum().backward()


@pytest.mark.parametrize("faster", [False, True])
def test_products_are_torchs(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "onednn_is_faster", lambda: faster)
    torch.manual_seed(0)
    x, grad = torch.randn(2, 300, 48, requires_grad=True), torch.randn(2, 300, 96)
    layer = torch.nn.Linear(48, 96)
    expected = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), grad)
    assert cpu_matmul.use_products(torch.nn.Sequential(layer)) == int(faster)
    got = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), grad)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    out = torch.empty(600, 96)
    cpu_matmul.product_into(out, x.detach().view(600, 48), layer.weight.detach().T)
    torch.testing.assert_close(out, x.detach().view(600, 48) @ layer.weight.detach().T, rtol=1e-5, atol=1e-5)
