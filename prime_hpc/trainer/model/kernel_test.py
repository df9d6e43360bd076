"""Return whether the attention kernel computes what each kind of layer asks of it: tried once at the start, on random
numbers, against the padded reference in float32.

flash-attention can be built without caps of the scores, windows or some widths of heads (`FLASHATTENTION_DISABLE_...`,
by which its hours of compilation become minutes), and such a build leaves them out in silence: each sample alone comes
out as wrong as among others, and in bfloat16 a model's own rounding hides what a layer gets wrong.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.ops import attention
from prime_hpc.trainer.ops.transfer import to_device

LENGTHS = (9, 33)
"""Tokens of two sequences; a window is tried as `WINDOW`, which is shorter."""
WINDOW = 7
BOUND = 0.1
"""Of outputs that are means of normal numbers: bfloat16 rounds by some hundredths, what is left out moves by more."""


@dataclass
class Calls:
    """The kinds of attention that layers ask for: one module and what it passes for each."""

    kinds: dict[tuple[Any, ...], tuple[nn.Module, dict[str, Any]]] = field(default_factory=dict)

    def see(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **passed: Any
    ) -> None:
        """Keep a call unless one like it is known."""
        wanted: dict[str, Any] = {
            name: passed[name] for name in ("scaling", "sliding_window", "softcap", "s_aux") if name in passed
        }
        if isinstance(wanted.get("sliding_window"), int):
            wanted["sliding_window"] = WINDOW
        if isinstance(wanted.get("s_aux"), torch.Tensor):  # FSDP takes a gathered parameter's memory away
            wanted["s_aux"] = wanted["s_aux"].detach().clone()
        sizes = (query.shape[1], key.shape[1], query.shape[-1], value.shape[-1])
        rest = tuple((name, value) for name, value in wanted.items() if not isinstance(value, torch.Tensor))
        self.kinds.setdefault((*sizes, query.dtype, *rest), (module, wanted))


@contextmanager
def recorded_calls() -> Iterator[Calls]:
    """Note what layers ask of attention in the forward passes inside, which run as ever."""
    from transformers import AttentionInterface

    calls = Calls()

    def record(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **passed: Any
    ) -> Any:
        calls.see(module, query, key, value, **passed)
        return attention.packed_attention_forward(module, query, key, value, *rest, **passed)

    AttentionInterface.register(attention.IMPLEMENTATION, record)
    try:
        yield calls
    finally:
        attention.register()


def check_kernels(policy: Policy, calls: Calls, device: torch.device) -> list[str]:
    """Return what the kernel gets wrong, a sentence for each kind of layer; none where the kernel is the reference."""
    problems = []
    for (heads, kv_heads, width, out_width, dtype, *rest), (module, wanted) in calls.kinds.items():
        if attention.select_kernel(policy.attn, device.type, dtype) is attention.padded_attention:
            continue
        draw = torch.Generator().manual_seed(0)
        shapes = ((heads, width), (kv_heads, width), (kv_heads, out_width))
        q, k, v = (torch.randn(1, n, sum(LENGTHS), d, generator=draw).to(device, dtype) for n, d in shapes)
        if wanted.get("scaling") is not None:  # scores of one deviation, whatever the layer's scale is
            q = q / (wanted["scaling"] * width**0.5)
        if wanted.get("softcap"):
            q = q * wanted["softcap"]
        gap = (_attend(policy.attn, module, q, k, v, wanted) - _attend("sdpa", module, q, k, v, wanted)).abs().max()
        if not gap <= BOUND:
            shown = {name: value for name, value in rest if value is not None}
            problems.append(f"heads of {width} with {shown} come out {float(gap):.2g} off")
    return problems


def _attend(
    choice: str, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, wanted: dict[str, Any]
) -> torch.Tensor:
    """Return a layer's attention by the chosen kernel, the reference's in float32."""
    if choice == "sdpa":
        q, k, v = (x.float() for x in (q, k, v))
    plan = to_device(attention.plan_packing(np.array(LENGTHS), q.device), q.device)
    with attention.packing(plan, choice):
        out, _ = attention.packed_attention_forward(module, q, k, v, None, **wanted)
    return out.float()
