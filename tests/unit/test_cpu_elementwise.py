"""Norms and rotary embeddings in fewer passes: the same numbers and gradients, where a layer computes these alone."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from prime_hpc.trainer.ops.cpu_elementwise import gated_silu, rms_norm, rotate, use_elementwise

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def build(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.arange(40).view(2, 20) % 64
    logits = model(input_ids=ids).logits
    (logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])).mean().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return logits.detach(), found


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("qwen3", (9, 2, 2)),  # two norms a block, one each for queries and keys, one at the end
        ("llama", (5, 2, 2)),
        ("qwen2", (5, 2, 2)),
        ("mistral", (5, 2, 2)),
        ("olmo2", (9, 2, 2)),
        ("gemma2", (0, 2, 0)),  # its norm multiplies by 1 + weight, and it gates by another function
        ("cohere2", (0, 0, 2)),  # a layer norm; pairs that lie side by side turn together
        ("phi3", (5, 2, 0)),  # gate and up projection are one
    ],
)
def test_a_model_computes_the_same(family: str, layers: tuple[int, int, int]) -> None:
    model = build(family, **({"pad_token_id": 0} if family == "phi3" else {}))
    logits, wanted = gradients(model)
    assert use_elementwise(model) == layers
    again, found = gradients(model)
    torch.testing.assert_close(again, logits, rtol=1e-5, atol=1e-6)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-4, atol=2e-7, msg=name)
    assert use_elementwise(model) == (0, 0, 0), "once is enough"


def test_a_partly_rotated_head_is_left_to_the_model() -> None:
    model = build("glm4", partial_rotary_factor=0.5, pad_token_id=0, eos_token_id=[1])
    logits, _ = gradients(model)
    use_elementwise(model)
    torch.testing.assert_close(gradients(model)[0], logits, rtol=1e-5, atol=1e-6)


def test_a_layer_of_another_precision_goes_its_own_way() -> None:
    model = build("qwen3").to(torch.bfloat16)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        use_elementwise(model)
        assert torch.equal(model(input_ids=ids).logits, before)


def test_parameters_without_memory_are_enough() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    assert use_elementwise(model) == (5, 2, 2)


def test_somebodys_own_forward_stays() -> None:
    model = build("llama")
    norm = model.model.norm
    norm.forward = own = lambda x: x
    assert use_elementwise(model)[0] == 4
    assert norm.forward is own


class Strange(nn.Module):
    """Named like the others, with a second argument and another result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * gate


class StrangeRMSNorm(Strange):
    """Looks like one."""


def test_a_norm_of_another_signature_is_left() -> None:
    assert use_elementwise(nn.Sequential(StrangeRMSNorm())) == (0, 0, 0)


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 5, 8)])
def test_gradients_are_those_of_finite_differences(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(shape[-1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(gated_silu, (x, torch.randn_like(x, requires_grad=True)))
    if shape[-1] % 2 == 0:
        cos, sin = torch.randn(2, shape[-2], shape[-1], dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda a: rotate(a, cos, sin), (x,))
