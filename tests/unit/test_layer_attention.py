"""What layers ask of packed attention besides scale: softcap, sinks, windows, chunks, narrower values; rows of their
own."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from prime_hpc.trainer.ops import attention
from prime_hpc.trainer.ops.prefix_attention import shared_rows


def explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **wants: Any) -> torch.Tensor:
    """float64 attention of one sequence `[T, H, D]`, all scores in memory: softcap, sinks `[H]`, window, chunk."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    times = len(q) // len(k)
    k, v = k.repeat_interleave(times, 0), v.repeat_interleave(times, 0)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    if "softcap" in wants:
        scores = wants["softcap"] * torch.tanh(scores / wants["softcap"])
    i = torch.arange(q.shape[1])
    seen = i[:, None] >= i
    if "window" in wants:
        seen &= i[:, None] - i < wants["window"]
    if "chunk" in wants:
        seen &= i[:, None] // wants["chunk"] == i // wants["chunk"]
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if "sinks" in wants:
        total = total + wants["sinks"].double().exp()[:, None, None]
    return (weights / total @ v).transpose(0, 1)


class Layer(torch.nn.Module):
    """A layer as transformers' attention functions see it."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config, self.layer_idx = SimpleNamespace(**config), 0


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize(
    ("config", "passed", "wants"),
    [
        ({}, {"softcap": 2.0}, {"softcap": 2.0}),
        ({}, {"sinks": True, "sliding_window": 5}, {"sinks": True, "window": 5}),
        ({"sliding_window": 5}, {}, {"window": 5}),  # other kernels find it in a mask
        ({"sliding_window": 5}, {"sliding_window": None}, {}),
        ({"sliding_window": 5, "layer_types": ["full_attention"]}, {}, {}),
        ({"attention_chunk_size": 6, "layer_types": ["chunked_attention"]}, {}, {"chunk": 6}),
    ],
)
def test_what_layers_ask_for(config: dict, passed: dict, wants: dict, spread: bool) -> None:
    torch.manual_seed(0)
    lengths, width, out_width = np.array([9, 21, 16]), 8, 6  # values narrower than keys: latent attention
    ids = np.concatenate([np.arange(9), np.arange(100, 121), np.arange(100, 116)])
    rows = shared_rows(ids, lengths, np.array([0, 1, 1])) if spread else None
    count = 46 if rows is None else int(rows.max()) + 1
    q, k, v = (torch.randn(count, h, d) for h, d in ((4, width), (2, width), (2, out_width)))
    wants = {key: torch.randn(4) if key == "sinks" else value for key, value in wants.items()}
    passed = {"s_aux" if key == "sinks" else key: wants.get(key, value) for key, value in passed.items()}
    plan = attention.plan_packing(lengths, rows=rows)
    with attention.packing(plan, "sdpa"):
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        got, _ = attention.packed_attention_forward(Layer(**config), *heads, None, **passed)
    of_tokens = slice(None) if rows is None else rows
    parts = [x[of_tokens].split(lengths.tolist()) for x in (q, k, v)]
    expected = torch.cat([explicit(*part, **wants) for part in zip(*parts, strict=True)]).float()
    torch.testing.assert_close(got[0][of_tokens], expected, rtol=1e-5, atol=1e-5)


def test_rows_of_their_own_are_one_packed_row() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, h, 7, 8) for h in (4, 2, 2))
    with attention.packing(attention.plan_packing(np.full(3, 7), num_rows=3), "sdpa"):
        got, _ = attention.packed_attention_forward(Layer(), q, k, v, None)
    for row in range(3):
        alone = explicit(*(x[row].transpose(0, 1) for x in (q, k, v))).float()
        torch.testing.assert_close(got[row], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "later tokens"),
        ({"s_aux": torch.zeros(3)}, r"3 attention sinks for 2 heads of a rank: set trainer\.parallel\.tp = 1"),
    ],
)
def test_what_packed_attention_lacks_is_refused(wanted: dict, message: str) -> None:
    x = torch.zeros(1, 2, 4, 8)
    with attention.packing(attention.plan_packing(np.array([4])), "sdpa"):
        with pytest.raises(ValueError, match=message):
            attention.packed_attention_forward(Layer(), x, x, x, None, **wanted)
        with pytest.raises(ValueError, match="a mask of its own"):
            attention.packed_attention_forward(Layer(), x, x, x, torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize("out_width", [6, 12])
def test_kernels_of_one_width_get_values_of_another(monkeypatch: pytest.MonkeyPatch, out_width: int) -> None:
    """As flash kernels do, and the exchange of heads between context-parallel ranks."""
    torch.manual_seed(0)

    def same_width(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Any, *rest: Any) -> torch.Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1]
        return attention.padded_attention(q, k, v, packing, *rest)

    monkeypatch.setattr(attention, "select_kernel", lambda *_: same_width)
    q, k, v = (torch.randn(9, h, d) for h, d in ((4, 8), (2, 8), (2, out_width)))
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    with attention.packing(attention.plan_packing(np.array([9]))):
        got, _ = attention.packed_attention_forward(Layer(), *heads, None)
    assert torch.allclose(got[0].double(), explicit(q, k, v), atol=1e-5)
