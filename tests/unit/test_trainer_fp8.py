"""Products in float8: near the exact ones, with gradients near the exact ones."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from prime_hpc.trainer.ops.fp8 import fp8_linear, quantize_rows, use_fp8  # noqa: E402


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def test_a_row_s_scale_is_its_own():
    rows = torch.randn(4, 32) * torch.tensor([1e-6, 1.0, 1e3, 0.0])[:, None]
    values, scale = quantize_rows(rows)
    restored = values.float() * scale
    for found, expected in zip(restored[:3], rows[:3], strict=True):
        assert relative(found, expected) < 0.04  # e4m3 rounds by up to 1/16, by 1/32 or less on average
    assert not restored[3].any()


@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_near_the_exact_ones(bias):
    torch.manual_seed(0)
    exact = nn.Linear(64, 48, bias=bias)
    x, grad = torch.randn(2, 40, 64), torch.randn(2, 40, 48)
    results = []
    for product in (nn.functional.linear, fp8_linear):
        exact.zero_grad()
        inputs = x.to(torch.bfloat16).requires_grad_()
        weight = exact.weight.detach().to(torch.bfloat16).requires_grad_()
        shift = exact.bias.detach().to(torch.bfloat16).requires_grad_() if bias else None
        out = product(inputs, weight, shift)
        out.backward(grad.to(torch.bfloat16))
        found = [out.detach(), inputs.grad, weight.grad, *([shift.grad] if shift is not None else [])]
        results.append([t.float() for t in found])
    (out, dx, dw, *db), (out8, dx8, dw8, *db8) = results
    assert 0.001 < relative(out8, out) < 0.05  # not the same product, but near
    assert 0.001 < relative(dx8, dx) < 0.05
    assert torch.equal(dw8, dw)  # the weight's gradient is exact
    assert all(torch.equal(a, b) for a, b in zip(db, db8, strict=True))


def test_which_layers_are_converted():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.odd, self.gate = nn.Linear(32, 64), nn.Linear(32, 10), nn.Linear(32, 16)

        def forward(self, x):
            return self.up(x), self.odd(x), self.gate(x)

    block = Block().bfloat16()
    names = list(block.state_dict())
    x = torch.randn(5, 32, dtype=torch.bfloat16)
    before = block(x)
    assert use_fp8(block) == 1
    after = block(x)
    assert not torch.equal(before[0], after[0]) and relative(after[0].float(), before[0].float()) < 0.05
    assert torch.equal(before[1], after[1]) and torch.equal(before[2], after[2])
    assert list(block.state_dict()) == names
