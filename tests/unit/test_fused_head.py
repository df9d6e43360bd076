"""The LM head's Triton kernels, by Triton's interpreter on a CPU: against torch's operators and float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from prime_hpc.trainer.ops import fused_head
from prime_hpc.trainer.ops.logprobs import token_logprobs

pytest.importorskip("triton")

TOP = Path(__file__).resolve().parents[2]
PROGRAM = """
import faulthandler
import json
faulthandler.dump_traceback_later(200, exit=True)  # five seconds of work: where it hangs
import torch
from prime_hpc.trainer.ops import fused_head, logprobs

BREAK = {broken!r}
if BREAK == "target":
    kernel = fused_head._row_kernel
    class Shifted:
        def __getitem__(self, grid):
            return lambda x, column, *rest, **named: kernel[grid](x, (column + 1) % x.shape[1], *rest, **named)
    fused_head._row_kernel = Shifted()
found = {{str(d): fused_head.first_try(torch.device("cpu"), d) for d in fused_head.HALF}}
fused_head.is_served = lambda hidden, weight: True
rows = []
for chunk, with_entropy, listed in () if BREAK else ((7, 0, 0), (64, 1, 0), (7, 1, 5), (64, 0, 5)):
    for trains in (True, False):
        torch.manual_seed(0)
        hidden, weight = torch.randn(40, 16).bfloat16(), torch.randn(9001, 16).bfloat16()
        targets, temperatures = torch.randint(0, 9001, (40,)), torch.rand(40) + 0.5
        temperatures[3], outer, results = 0.0, torch.randn(40), []
        if listed:  # a row names its target again, one has the target in the place of what is not known
            others = torch.rand(40, 9001).argsort(1)[:, :listed]
            others[5, 2], others[7, 3:] = targets[5], targets[7]
            targets, outer = torch.cat([targets[:, None], others], 1), torch.randn(40, 1 + listed)
            outer[7, 4:] = 0.0
        for how in (True, False, None):
            type_ = torch.float64 if how is None else torch.bfloat16
            h, w = (x.clone().to(type_).requires_grad_(g) for x, g in ((hidden, True), (weight, trains)))
            if how is None:
                scale = torch.where(temperatures > 0, temperatures, 1.0).double()[:, None]
                logits = (h @ w.T + ((hidden @ weight.T).double() - h @ w.T).detach()) / scale  # rounded as the head's
                every = logits.log_softmax(1)
                values = every.gather(1, targets if listed else targets[:, None])
                values, entropy = values if listed else values[:, 0], -(every.exp() * every).sum(1)
            else:
                values, entropy = logprobs.token_logprobs(
                    h, w, targets, temperatures, chunk_tokens=chunk, with_entropy=True, fused=how
                )
                assert values._base is None, "a view: FSDP warns of it at every start"
            spread = (outer[:, 0] if listed else outer).flip(0)
            ((values * outer).sum() + with_entropy * (spread * entropy).sum()).backward()
            results.append([values.detach(), entropy.detach(), h.grad, *([w.grad] if trains else [])])
        exact = results.pop()
        rows.append([[float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(r, exact)] for r in results])
print(json.dumps([found, rows]))
"""


def run(broken: str = "") -> tuple[dict[str, float], list[list[list[float]]]]:
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TOP)}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(broken=broken)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found, rows = json.loads(done.stdout)
    return found, rows


def test_values_entropies_and_gradients_are_those_of_the_rounded_logits() -> None:
    found, rows = run()
    assert max(found.values()) < fused_head.TOLERANCE
    rounding = torch.finfo(torch.bfloat16).eps
    for fused, eager in rows:
        assert max(fused[:2]) < 1e-6  # values and entropies, of the largest
        assert max(fused[2:]) < 2 * rounding and max(eager[2:]) < 2 * rounding  # products of a CPU in half precision


def test_the_first_try_sees_a_kernel_that_is_wrong() -> None:
    found, _ = run("target")
    assert min(found.values()) > fused_head.TOLERANCE


def test_a_device_without_the_kernels_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> float:
        raise RuntimeError("no such target")

    monkeypatch.setattr(fused_head, "first_try", breaks)
    fused_head._works.cache_clear()
    try:
        assert not fused_head._works(torch.device("cpu"), torch.bfloat16)
    finally:
        fused_head._works.cache_clear()
    hidden, weight = torch.randn(3, 4).bfloat16(), torch.randn(9, 4).bfloat16()
    assert not fused_head.is_served(hidden, weight)  # a CPU's
    values, entropy = token_logprobs(hidden, weight, torch.tensor([1, 2, 3]), torch.ones(3))
    assert values.shape == (3,) and entropy.shape == (0,)
