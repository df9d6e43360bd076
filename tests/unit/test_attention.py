"""Packed attention: every token's log-probability is that of its sequence alone."""

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.trainer.batching.micro_batches import make_micro_batch
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.ops import attention, flash
from prime_hpc.trainer.parallel import Parallel
from tests.support.tiny_model import random_rank_batch

ALONE = Parallel(ParallelDims(), 0, None, None, None, None, None)  # type: ignore[arg-type]
"""The layout of one rank, without meshes."""


@pytest.mark.parametrize("lengths", [[7], [1, 1], [16, 16, 16], [3, 64, 1, 17, 18, 200, 5, 64], [128, 2] * 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_packed_equals_each_sequence_alone(lengths: list[int], heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(total, h, 8, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    plan = attention.plan_packing(np.array(lengths))
    out = attention.padded_attention(q, k, v, plan)
    weights = torch.randn_like(out)
    got = torch.autograd.grad((out * weights).sum(), (q, k, v))
    pieces, at = [], 0
    for n in lengths:
        a, b, c = (x[at : at + n].transpose(0, 1)[None] for x in (q, k, v))
        pieces.append(F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        at += n
    expected = torch.cat(pieces)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_buckets_hold_every_sequence_once_and_limit_padding() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5, 1, 200), 1, 2000).astype(np.int64)
    groups = attention.choose_buckets(lengths)
    assert sorted(np.concatenate(groups).tolist()) == list(range(200))
    padded = sum(len(g) * int(lengths[g].max()) ** 2 for g in groups)
    assert padded < 1.4 * int((lengths**2).sum())
    assert len(groups) < 64
    assert len(attention.choose_buckets(lengths, bucket_cost=1e12)) == 1


def test_sliding_window() -> None:
    torch.manual_seed(0)
    lengths, window = [5, 30, 12], 8
    q, k, v = (torch.randn(47, 2, 8) for _ in range(3))
    out = attention.padded_attention(q, k, v, attention.plan_packing(np.array(lengths)), window=window)
    at = 0
    for n in lengths:
        a, b, c = (x[at : at + n].transpose(0, 1)[None] for x in (q, k, v))
        i = torch.arange(n)
        mask = (i[:, None] >= i) & (i[:, None] - i < window)
        expected = F.scaled_dot_product_attention(a, b, c, attn_mask=mask)[0].transpose(0, 1)
        torch.testing.assert_close(out[at : at + n], expected, rtol=1e-5, atol=1e-5)
        at += n


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_policy_logprobs_equal_the_unpacked_models(kind: str) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
    config = {"qwen3": Qwen3Config, "llama": LlamaConfig}[kind](**shape)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config).eval()
    packed = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention.register()).eval()
    packed.load_state_dict(plain.state_dict())
    batch = random_rank_batch([[40, 3, 17, 64, 2]], seed=0)
    micro = make_micro_batch(batch, 0)
    policy = Policy(packed, "sdpa", chunk_tokens=11, parallel=ALONE)
    with policy.packing(micro):
        logprobs, entropy = policy(micro, True)
        logprobs.sum().backward()
    assert packed.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    expected, entropies = [], []
    for s in range(batch.num_sequences):
        part = slice(int(batch.seq_offsets[s]), int(batch.seq_offsets[s + 1]))
        ids = torch.from_numpy(batch.token_ids[part].astype(np.int64))
        log_p = (plain(input_ids=ids[None]).logits[0] / batch.temperatures[s]).log_softmax(-1)[:-1]
        mask = torch.from_numpy(batch.loss_mask[part][1:])
        expected.append(log_p.gather(1, ids[1:, None])[:, 0][mask])
        entropies.append(-(log_p.exp() * log_p).sum(-1)[mask])
    torch.testing.assert_close(logprobs, torch.cat(expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, torch.cat(entropies), rtol=0, atol=1e-5)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Puts a module of that name and text where it is found; what was found before is asked anew."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def forget() -> None:
        for name in ("flash_attn", "flash_attn_interface"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        for cached in (attention.select_kernel, flash.flash_attn_2, flash.activate_flash_attn_3):
            cached.cache_clear()

    def put(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        forget()

    forget()
    yield put
    forget()


def test_flash_on_cpu_is_refused_with_the_reason(packages: Callable[[str, str], None]) -> None:
    with pytest.raises(ValueError, match=r"model\.attn = flash needs CUDA.*not installed.*auto takes torch's own"):
        attention.select_kernel("flash", "cpu", torch.float32)
    assert attention.select_kernel("auto", "cpu", torch.float32) is attention.padded_attention


def test_the_kernel_is_the_one_that_loads(
    packages: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    half = ("cuda", torch.bfloat16)
    assert attention.select_kernel("auto", *half) is attention.torch_varlen_attention
    packages("flash_attn", "")  # another package of that name
    assert attention.select_kernel("auto", *half) is attention.torch_varlen_attention
    with pytest.raises(ValueError, match="flash-attn not installed"):
        attention.select_kernel("flash", *half)
    packages("flash_attn", "import flash_attn_2_cuda_of_another_torch")
    assert attention.select_kernel("auto", *half) is attention.torch_varlen_attention
    packages("flash_attn", "def flash_attn_varlen_func(*args, **kwargs): return args[0]")
    assert attention.select_kernel("auto", *half) is attention.flash_attention
    assert attention.select_kernel("flash", *half) is attention.flash_attention
    assert attention.select_kernel("auto", "cuda", torch.float32) is attention.padded_attention
    plan = attention.plan_packing(np.array([3]))
    rows = torch.ones(3, 2, 8)
    assert attention.flash_attention(rows, rows, rows, plan) is rows


def test_flash_attention_3_runs_behind_torchs_kernel_on_a_hopper(
    packages: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", started.append)
    half = ("cuda", torch.bfloat16)
    packages("flash_attn_interface", "")
    for major, impls in ((8, []), (9, ["FA3"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda m=major: (m, 0))
        packages("flash_attn", "def flash_attn_varlen_func(*args, **kwargs): return args[0]")
        kernel = attention.torch_varlen_attention if impls else attention.flash_attention
        assert attention.select_kernel("auto", *half) is kernel and started == impls

    def fails(name: str) -> None:
        raise RuntimeError(f"Module {name} does not expose FA3 kernels")

    monkeypatch.setattr("torch.nn.attention.activate_flash_attention_impl", fails)
    packages("flash_attn", "")
    assert attention.select_kernel("auto", *half) is attention.torch_varlen_attention
    with pytest.raises(ValueError, match="flash-attn not installed"):
        attention.select_kernel("flash", *half)
    assert attention.select_kernel("sdpa", *half) is attention.padded_attention


@pytest.mark.parametrize(("width", "value_width"), [(512, 512), (20, 20), (192, 264)])
def test_heads_that_no_flash_kernel_takes_are_padded(
    width: int, value_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4's global layers have heads of 512, its local ones of 256."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, w) for heads, w in ((4, width), (2, width), (2, value_width)))
    plan, layer = attention.plan_packing(np.array([5, 4]), pads=False), torch.nn.Module()

    def attend() -> torch.Tensor:
        with attention.packing(plan):
            return attention.packed_attention_forward(layer, query, key, value, None)[0]

    expected = attend()
    monkeypatch.setattr(attention, "select_kernel", lambda *_: attention.torch_varlen_attention)
    torch.testing.assert_close(attend(), expected)


def test_grouped_heads_may_be_repeated_instead() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8) for heads in (6, 2, 2))
    plan = attention.plan_packing(np.array([5, 4]))
    grouped = attention.padded_attention(q, k, v, plan)
    k, v = (attention.repeat_heads(x, 6) for x in (k, v))
    torch.testing.assert_close(attention.padded_attention(q, k, v, plan), grouped)
    assert attention.repeat_heads(q, 6) is q
