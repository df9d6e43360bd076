"""Packed varlen attention: the sequences of one packed row attend only within themselves.

`policy.py` registers it with transformers' `AttentionInterface`, so that any HF causal LM uses it; `train_step.py`
opens the `packing` context around the forward and backward pass of a micro-batch.

Three ways to the same result, none of which builds a `[tokens, tokens]` mask:
- torch's own varlen kernel (CUDA, half precision): FlashAttention 2, or 3 on a Hopper where `flash_attn_interface` is;
- flash-attention's varlen kernel (CUDA, half precision, `flash-attn` installed);
- padded buckets (everywhere): sequences of similar length are gathered into right-padded `[S, Lmax]` blocks, which
  `scaled_dot_product_attention(is_causal=True)` takes without a mask. A padded key comes after every real query of its
  sequence, so causality alone hides it; padded queries are thrown away.

Models with layers that know nothing of packing (convolutions, state spaces, linear attention) get their sequences as
rows of their own instead, padded at the end (`micro_batches.make_micro_batch`); attention sees these rows as one packed
row.
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from prime_hpc.trainer.ops.context_parallel import scatter_heads
from prime_hpc.trainer.ops.flash import activate_flash_attn_3, fits_flash, flash_attn_2
from prime_hpc.trainer.ops.prefix_attention import Spread
from prime_hpc.trainer.ops.reach import layer_reach
from prime_hpc.trainer.ops.transfer import to_device

IMPLEMENTATION = "prime_hpc_packed"
LENGTH_STEP = 16
"""Bucket lengths are multiples of this: few distinct shapes, few candidates to choose from."""
TOKEN_COST = 64.0
"""Cost of padding one token, in units of one query-key product (gather, scatter and projections of the slot)."""
BUCKET_COST = {"cpu": 4096.0, "cuda": 250_000.0}
"""Fixed cost of one more kernel call, in the same units (a call's overhead, about 0.1 ms forward and backward on CPU
and 0.05 ms on a GPU, over the time of one product with some hundred channels)."""


@dataclass(frozen=True)
class Bucket:
    """Sequences that share one `[num_sequences, length]` padded block."""

    num_sequences: int
    length: int


@dataclass
class Packing:
    """Positions of the sequences in a packed row, and how they are padded into buckets."""

    lengths: np.ndarray
    """int64[S], tokens of each sequence in row order."""
    cu_seqlens: torch.Tensor
    """int32[S + 1], start of each sequence; the last entry is the row's length."""
    max_length: int
    buckets: list[Bucket] = field(default_factory=list)
    """For `padded_attention`, as are `gather` and `slots`; none where another kernel is to be used."""
    gather: torch.Tensor | None = None
    """int64[slots]: the token that fills each padded slot (token 0 where none does); None: nothing needs padding."""
    slots: torch.Tensor | None = None
    """int64[tokens]: the slot of each token, the inverse of `gather`."""
    num_rows: int = 1
    """Rows of the model's input, of one length: 1, or one for every sequence."""
    spread: Spread | None = None
    """For samples that share their first tokens: from the rows that the model computes to the sequences' tokens."""

    _derived: dict[int, "Packing"] = field(default_factory=dict)

    def chunked(self, size: int) -> "Packing":
        """Return the packing of tokens that attend within chunks of their sequence alone (Llama 4's local layers):
        each chunk is a sequence. Of the sequences' tokens; the same object for the same size."""
        if size not in self._derived:
            pieces = [min(size, int(n) - at) for n in self.lengths for at in range(0, int(n), size)]
            self._derived[size] = self._again(np.array(pieces), pads=bool(self.buckets))
        return self._derived[size]

    def padded(self) -> "Packing":
        """Return this packing with buckets, for a layer that no other kernel serves."""
        if self.buckets:
            return self
        if 0 not in self._derived:
            self._derived[0] = self._again(self.lengths, pads=True)
        return self._derived[0]

    def _again(self, lengths: np.ndarray, *, pads: bool) -> "Packing":
        device = self.cu_seqlens.device
        return to_device(plan_packing(lengths, device, pads=pads), device)

    @property
    def num_computed(self) -> int:
        """Tokens that the model computes."""
        return int(self.lengths.sum()) if self.spread is None else len(self.spread.first)


def choose_buckets(lengths: np.ndarray, bucket_cost: float = BUCKET_COST["cpu"]) -> list[np.ndarray]:
    """Partition sequences by length so that padding and kernel calls together cost least.

    Args:
        lengths: int64[S], all positive.
        bucket_cost: see `BUCKET_COST`.

    Returns:
        Index arrays into `lengths`, one per bucket; exact over partitions of the rounded lengths (dynamic programme).
    """
    order = np.argsort(lengths, kind="stable")
    rounded = -(-lengths[order] // LENGTH_STEP) * LENGTH_STEP
    values, counts = np.unique(rounded, return_counts=True)
    ends = np.cumsum(counts)
    starts = np.concatenate(([0], ends))
    best = np.zeros(len(values) + 1)
    cut = np.zeros(len(values) + 1, dtype=np.int64)
    for j in range(1, len(values) + 1):
        top = int(lengths[order[ends[j - 1] - 1]])
        cost = best[:j] + (ends[j - 1] - starts[:j]) * top * (top + TOKEN_COST) + bucket_cost
        cut[j] = int(np.argmin(cost))
        best[j] = cost[cut[j]]
    groups = []
    j = len(values)
    while j > 0:
        groups.append(order[starts[cut[j]] : ends[j - 1]])
        j = int(cut[j])
    return groups[::-1]


def plan_packing(
    lengths: np.ndarray,
    device: torch.device | str = "cpu",
    rows: np.ndarray | None = None,
    num_rows: int = 1,
    *,
    pads: bool = True,
) -> Packing:
    """Plan the attention of one packed row, with tensors in host memory.

    Args:
        lengths: int[S], tokens of each sequence in row order; all positive, S >= 1.
        device: what attends: the cost of a kernel call depends on it.
        rows: `prefix_attention.shared_rows`, where sequences share tokens.
        num_rows: of the model's input: 1, or as many as sequences, all of one length.
        pads: plan the buckets of `padded_attention` too.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert len(lengths) and lengths.min() > 0, "a packed row holds at least one sequence, none of them empty"
    starts = np.concatenate(([0], np.cumsum(lengths)))
    packing = Packing(lengths, torch.from_numpy(starts.astype(np.int32)), int(lengths.max()), num_rows=num_rows)
    packing.spread = None if rows is None else Spread.of(rows)
    if pads:
        _plan_buckets(packing, starts, device)
    return packing


def _plan_buckets(packing: Packing, starts: np.ndarray, device: torch.device | str) -> None:
    """Fill in the buckets; `starts` int64[S + 1]."""
    lengths, total = packing.lengths, int(starts[-1])
    groups = choose_buckets(lengths, BUCKET_COST.get(torch.device(device).type, BUCKET_COST["cuda"]))
    buckets, gathers = packing.buckets, []
    slots = np.empty(total, dtype=np.int64)
    first_slot = 0
    for group in groups:
        length = int(lengths[group].max())
        buckets.append(Bucket(len(group), length))
        offsets = np.arange(length)
        tokens = starts[group][:, None] + offsets
        real = offsets < lengths[group][:, None]
        positions = first_slot + np.arange(len(group) * length).reshape(len(group), length)
        slots[tokens[real]] = positions[real]
        gathers.append(np.where(real, tokens, 0).ravel())
        first_slot += len(group) * length
    gather = np.concatenate(gathers)
    if len(gather) != total or (gather != np.arange(total)).any():
        packing.gather = torch.from_numpy(gather)
        packing.slots = torch.from_numpy(slots)


class _Rows(torch.autograd.Function):
    """`x[index]` over dim 0 where `index` and `back` are (partial) inverses: the backward pass is a plain copy too.

    forward: `[N, ...] -> [len(index), ...]`. backward with `back` as gather: each input row has exactly one slot whose
    gradient counts (`spread=False`), or input rows that no index names get zero (`spread=True`).
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, back: torch.Tensor, spread: bool) -> torch.Tensor:
        ctx.save_for_backward(index, back)
        ctx.spread, ctx.num_rows = spread, x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        index, back = ctx.saved_tensors
        if not ctx.spread:
            return grad.index_select(0, back), None, None, None
        out = grad.new_zeros((ctx.num_rows, *grad.shape[1:]))
        return out.index_copy_(0, index, grad), None, None, None


def _pad(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """`[T, H, D] -> [slots, H, D]`."""
    return x if packing.gather is None else _Rows.apply(x, packing.gather, packing.slots, False)


def _unpad(x: torch.Tensor, packing: Packing) -> torch.Tensor:
    """`[slots, H, D] -> [T, H, D]`; padded queries' gradients are exactly zero."""
    return x if packing.gather is None else _Rows.apply(x, packing.slots, packing.gather, True)


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Boolean `[length, length]` causal sliding-window mask of one bucket."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one bucket with all its scores in memory, for what no fused kernel does: `[S, H, L, E]`."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, dim=1) if repeats > 1 else x for x in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-1, -2)).float() * factor
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def padded_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over padded buckets.

    Args:
        query: `[T, H, D]`; key: `[T, KV, D]`; value: `[T, KV, E]`, with H a multiple of KV.
        packing: plan of the row's T tokens.
        scale: softmax scale; default 1/sqrt(D).
        window: keys that a query sees, itself included; None sees all before it.
        softcap: scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118).
        sinks: `[H]`, logits that take part in each softmax and have no value (gpt-oss, arXiv 2508.10925).

    Returns:
        `[T, H, E]`.
    """
    assert packing.buckets, "the row was planned without buckets (`pads`)"
    if query.is_cuda and (query.dtype == torch.float32 or window is not None or not fits_flash(query, value)):
        key, value = (repeat_heads(x, query.shape[1]) for x in (key, value))
    sizes = [b.num_sequences * b.length for b in packing.buckets]
    blocks = [_pad(x, packing).split(sizes) for x in (query, key, value)]
    outputs = []
    for bucket, q, k, v in zip(packing.buckets, *blocks, strict=True):
        shape = (bucket.num_sequences, bucket.length)
        q, k, v = (x.view(*shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        banded = window is not None and window < bucket.length
        if softcap is not None or sinks is not None:
            mask = _band(bucket.length, window if window is not None else bucket.length, q.device)
            out = _explicit(q, k, v, mask, scale, softcap, sinks)
        else:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=_band(bucket.length, int(window or 0), q.device) if banded else None,
                is_causal=not banded,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        outputs.append(out.transpose(1, 2).reshape(shape[0] * shape[1], out.shape[1], out.shape[3]))
    return _unpad(outputs[0] if len(outputs) == 1 else torch.cat(outputs), packing)


def repeat_heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Keys or values of as many heads as the queries have: `[T, KV, D] -> [T, H, D]`.

    In float32, through a mask and for wide heads CUDA has no kernel for grouped queries but the one that makes the
    `[L, L]` scores; with equal numbers of heads there is one that does not.
    """
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """`padded_attention`'s result through flash-attention's varlen kernel (CUDA, half precision)."""
    flash_attn_varlen_func = flash_attn_2()
    assert flash_attn_varlen_func is not None, "select_kernel has found it"
    cu, longest = packing.cu_seqlens, packing.max_length
    left = -1 if window is None else window - 1
    return flash_attn_varlen_func(
        query, key, value, cu, cu, longest, longest, softmax_scale=scale, causal=True, window_size=(left, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),  # torch's own kernel looks for itself
        softcap=softcap or 0.0,
    )  # fmt: skip


def torch_varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """`padded_attention`'s result through torch's varlen kernel (CUDA, half precision)."""
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = packing.cu_seqlens, packing.max_length
    left = -1 if window is None else window - 1
    out = varlen_attn(
        query, key, value, cu, cu, longest, longest, scale=scale, window_size=(left, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out


Kernel = Callable[..., torch.Tensor]


@functools.cache
def select_kernel(choice: str, device_type: str, dtype: torch.dtype) -> Kernel:
    """Return the varlen kernel for `model.attn`.

    Args:
        choice: `auto`, `flash` (the package flash-attn, 2 or 3) or `sdpa`.
        device_type: `cuda` or `cpu`.

    Raises:
        ValueError: `flash` was asked for and cannot run here.
    """
    half_on_cuda = device_type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    has_flash_3 = choice != "sdpa" and half_on_cuda and activate_flash_attn_3(device_type)
    has_flash = has_flash_3 or (choice != "sdpa" and flash_attn_2() is not None)
    if choice == "flash" and not (half_on_cuda and has_flash):
        raise ValueError(
            f"model.attn = flash needs CUDA, bfloat16 and the flash-attn package (here: {device_type}, {dtype}, "
            f"flash-attn {'installed' if has_flash else 'not installed'}); model.attn = auto takes torch's own kernel, "
            "which is FlashAttention 2 as well"
        )
    if choice == "sdpa" or not half_on_cuda:
        return padded_attention
    if has_flash and not has_flash_3:
        return flash_attention
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        return torch_varlen_attention
    return padded_attention


class _Active:
    """The packing of the micro-batch in work, the kernel choice and the ranks that split the row; one at a time in a
    process."""

    packing: Packing | None = None
    choice: str = "auto"
    ranks: DeviceMesh | None = None


@contextmanager
def packing(plan: Packing, choice: str = "auto", ranks: DeviceMesh | None = None) -> Iterator[None]:
    """Make `plan` the packing of every attention call inside (keep it open over the backward pass too:
    recomputed blocks attend again). `ranks`: the context-parallel ones, each with its share of the tokens."""
    before = _Active.packing, _Active.choice, _Active.ranks
    _Active.packing, _Active.choice, _Active.ranks = plan, choice, ranks
    try:
        yield
    finally:
        _Active.packing, _Active.choice, _Active.ranks = before


@dataclass(frozen=True)
class _NotPassed:
    """Default of an argument that a layer may pass as None."""


_NOT_PASSED = _NotPassed()


def _reach(module: torch.nn.Module, passed: int | _NotPassed | None) -> tuple[int | None, int | None]:
    """(sliding window, chunk size) of a layer: what it passes, else its config's, which other kernels see in a mask."""
    if not isinstance(passed, _NotPassed):
        return passed, None
    reach = layer_reach(getattr(module, "config", None), getattr(module, "layer_idx", None))
    return (None, None) if reach is None else (reach.window, reach.chunk)


def _special(module: torch.nn.Module, heads: int, ranks: DeviceMesh | None, wanted: dict[str, Any]) -> dict[str, Any]:
    """Return what a layer asks of a kernel besides scale and window: `softcap`, and `sinks` of this rank's heads.
    Raises ValueError: something that packed attention does not do."""
    name = type(module).__name__
    if wanted.get("position_bias") is not None:
        raise ValueError(f"{name} uses attention position_bias, which packed attention lacks")
    if wanted.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{name} attends to later tokens too: it is no causal language model's")
    special = {key: wanted[key] for key in ("softcap",) if wanted.get(key)}
    sinks = wanted.get("s_aux")
    if sinks is not None:
        if sinks.shape != (heads,):
            raise ValueError(
                f"{name} has {sinks.numel()} attention sinks for {heads} heads of a rank: set trainer.parallel.tp = 1"
            )
        special["sinks"] = sinks if ranks is None else sinks.chunk(ranks.size())[ranks.get_local_rank()]
    return special


@torch.compiler.disable  # shapes differ in every row: compiled blocks leave attention out of their graph
def packed_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | _NotPassed | None = _NOT_PASSED,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, with the signature of transformers' attention functions.

    Args:
        query: `[R, H, T, D]`; key: `[R, KV, T, D]`; value: `[R, KV, T, E]`; R = 1 for a packed row, which may be split
            (T / cp tokens), or one row a sequence.

    Returns:
        `[R, T, H, E]` and no attention weights.

    Raises:
        ValueError: the model wants something that packed attention does not do.
    """
    plan, ranks = _Active.packing, _Active.ranks
    assert plan is not None, "packed attention outside `with packing(...)`"
    rows, heads, length, width = query.shape
    tokens = rows * length * (1 if ranks is None else ranks.size())
    assert rows == plan.num_rows and tokens == plan.num_computed, (query.shape, plan.num_rows, plan.num_computed)
    if attention_mask is not None or key.shape[2] != length:
        raise ValueError(f"{type(module).__name__} attends through a mask of its own, which packed attention lacks")
    special, out_width = _special(module, heads, ranks, kwargs), value.shape[-1]
    kernel = select_kernel(_Active.choice, query.device.type, query.dtype)
    lacks = "sinks" in special or (special and kernel is torch_varlen_attention)
    if lacks or not fits_flash(query, value):
        kernel = padded_attention
    if out_width != width and (ranks is not None or kernel is not padded_attention):  # latent attention (MLA)
        widest = max(width, out_width)
        query, key, value = (F.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else 1 / math.sqrt(width)
    window, chunk = _reach(module, sliding_window)
    sequences = plan if chunk is None else plan.chunked(chunk)
    sequences = sequences.padded() if kernel is padded_attention else sequences

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if plan.spread is None:
            return kernel(q, k, v, sequences, scale, window, **special)
        q, k, v = (plan.spread.to_tokens(x) for x in (q, k, v))
        return plan.spread.to_rows(kernel(q, k, v, sequences, scale, window, **special))

    output = attend(q, k, v) if ranks is None else scatter_heads(attend, q, k, v, ranks)
    return output[..., :out_width].unflatten(0, (rows, length)), None


def register() -> str:
    """Make the implementation known to transformers (idempotent); returns its name for `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention_forward)
    return IMPLEMENTATION
