"""Varlen attention kernels against sequences one by one in float64, forward and backward."""

from typing import Any

from _setting import Outcome, Setting, passed

LENGTHS = (700, 3, 128, 1, 257, 64, 1000)
SHARED = ((5, 40), (5, 40), (9, 17), (5, 40))
"""Group and length of samples whose first tokens are their group's prompt."""
LIMIT = 3.0
"""A kernel may be off by so many times what the padded reference in the same dtype is."""


def kernels(setting: Setting) -> Outcome:
    """Every kernel that is installed: grouped heads, a sliding window, shared prefixes."""
    import torch

    from prime_hpc.trainer.ops import attention

    dtype = torch.bfloat16
    available: dict[str, Any] = {"padded": attention.padded_attention}
    if setting.on_gpu:
        available |= _cuda_kernels()
    rows: list[dict[str, Any]] = []
    for heads, kv_heads in ((8, 8), (16, 4)):
        for window in (None, 64):
            for share in (False, True):
                exact = _run(attention.padded_attention, "cpu", torch.float64, heads, kv_heads, window, share)
                errors = {}
                for name, kernel in available.items():
                    found = _run(kernel, setting.device, dtype, heads, kv_heads, window, share)
                    pairs = zip(found, exact, strict=True)
                    errors[name] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
                rows.append({"heads": f"{heads}/{kv_heads}", "window": window, "shared": share, "errors": errors})
    worst = {name: max(row["errors"][name] for row in rows) for name in available}
    far = [n for n in available if any(r["errors"][n] > LIMIT * r["errors"]["padded"] + 1e-3 for r in rows)]
    holds = not far and worst["padded"] < 2e-2
    words = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    return passed(
        holds, f"largest relative error in bfloat16: {words}" + (f"; too far: {far}" if far else ""), {"rows": rows}
    )


def _cuda_kernels() -> dict[str, Any]:
    """Those that the trainer could choose here, by name."""
    from torch.nn.attention import restore_flash_attention_impl

    from prime_hpc.trainer.ops import attention
    from prime_hpc.trainer.ops.flash import activate_flash_attn_3, flash_attn_2

    def version_2(*arguments: Any) -> Any:
        restore_flash_attention_impl(_raise_warn=False)
        return attention.torch_varlen_attention(*arguments)

    def version_3(*arguments: Any) -> Any:
        assert activate_flash_attn_3("cuda")
        return attention.torch_varlen_attention(*arguments)

    found: dict[str, Any] = {"torch varlen": version_2}
    if flash_attn_2() is not None:
        found["flash-attn"] = attention.flash_attention
    if activate_flash_attn_3("cuda"):
        found["torch varlen with FlashAttention 3"] = version_3
    return found


def _run(kernel: Any, device: str, dtype: Any, heads: int, kv_heads: int, window: int | None, share: bool) -> list[Any]:
    """Output and the three gradients, float64 on the CPU, from the same bfloat16 inputs."""
    import numpy as np
    import torch

    from prime_hpc.trainer.ops import attention
    from prime_hpc.trainer.ops.prefix_attention import shared_rows
    from prime_hpc.trainer.ops.transfer import to_device

    rows = None
    lengths = np.array(LENGTHS)
    if share:
        rng = np.random.default_rng(0)
        prompts = {group: rng.integers(0, 99, 30) for group, _ in SHARED}
        ids = [np.concatenate([prompts[g], 100 + rng.integers(0, 9, n) + 10 * i]) for i, (g, n) in enumerate(SHARED)]
        lengths = np.array([len(row) for row in ids])
        rows = shared_rows(np.concatenate(ids), lengths, np.array([group for group, _ in SHARED]))
    plan = to_device(attention.plan_packing(lengths, device, rows), torch.device(device))
    generator = torch.Generator().manual_seed(1)
    num_tokens = plan.num_computed

    def draw(num_heads: int) -> Any:
        x = torch.randn(num_tokens, num_heads, 64, generator=generator).bfloat16()
        return x.to(device, dtype).requires_grad_()

    q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
    weight = torch.randn(num_tokens, heads, 64, generator=generator).bfloat16().to(device, dtype)
    if plan.spread is None:
        out = kernel(q, k, v, plan, None, window)
    else:
        out = plan.spread.to_rows(kernel(*(plan.spread.to_tokens(x) for x in (q, k, v)), plan, None, window))
    gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))
    return [x.detach().double().cpu() for x in (out, *gradients)]
