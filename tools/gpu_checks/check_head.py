"""Log-probabilities through the LM head: Triton's kernels against torch's own operators, values, memory and time."""

import time
from typing import Any

from _setting import Outcome, Setting, passed, skipped

TOKENS, WIDTH, VOCAB, CHUNK = 8192, 2048, 151_936, 1024
ROUNDS = 3


def head(setting: Setting) -> Outcome:
    """Forward and backward pass of a trained head of Qwen3's size, both ways in turn."""
    if not setting.on_gpu:
        return skipped("Triton's kernels are a GPU's; tests/unit/test_fused_head.py has them by its interpreter")
    import torch

    from prime_hpc.trainer.ops import fused_head

    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(VOCAB, WIDTH, generator=generator, device="cuda") / WIDTH**0.5).bfloat16()
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator, device="cuda")
    if not fused_head.is_served(hidden, weight):
        return passed(False, "the kernels do not run here, or compute something else: see the warning above")
    rows: dict[bool, dict[str, Any]] = {True: {"seconds": []}, False: {"seconds": []}}
    found: dict[bool, list[Any]] = {}
    for _ in range(ROUNDS):
        for fused in (True, False):
            found[fused], seconds, peak = _run(hidden, weight, targets, fused)
            rows[fused]["seconds"].append(seconds)
            rows[fused]["gib"] = peak / 2**30
    values, entropies, *gradients = (
        float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for a, b in zip(found[True], found[False], strict=True)
    )
    faster = min(rows[False]["seconds"]) / min(rows[True]["seconds"])
    holds = max(values, entropies) < 1e-4 and max(gradients) < 2e-2
    summary = (
        f"values off by {values:.1e}, entropies {entropies:.1e}, gradients {max(gradients):.1e} of the largest; "
        f"{faster:.2f} times as fast, {rows[True]['gib']:.2f} GiB beside {rows[False]['gib']:.2f}"
    )
    return passed(
        holds, summary, {"fused": rows[True], "torch": rows[False], "errors": [values, entropies, *gradients]}
    )


def _run(hidden: Any, weight: Any, targets: Any, fused: bool) -> tuple[list[Any], float, int]:
    """Values, entropies and both gradients; seconds; bytes at the peak beside the inputs."""
    import torch

    from prime_hpc.trainer.ops.logprobs import token_logprobs

    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    ones = torch.ones(len(targets), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    values, entropies = token_logprobs(
        hidden, weight, targets, ones, chunk_tokens=CHUNK, with_entropy=True, fused=fused
    )
    (values * torch.linspace(-1, 1, len(targets), device="cuda")).sum().backward()
    torch.cuda.synchronize()
    seconds, peak = time.perf_counter() - began, torch.cuda.max_memory_allocated() - before
    return [values.detach(), entropies.detach(), hidden.grad, weight.grad], seconds, peak
