"""A linear map with a place for an adapter, and how a model gets them."""

from typing import Any

import torch
from torch import nn

from prime_hpc.config.sections.lora import LoraConfig, select_modules
from prime_hpc.trainer.ops import cpu_matmul

_SAME = ("FalconLinear",)
"""Subclasses of `nn.Linear` whose forward pass is another, and computes the same."""


class LoraLinear(nn.Linear):
    """W x + b, and + scale B (A x) while an adapter is in use.

    A `[rank, in]` and B `[out, rank]` are whole tensors that `slots.Adapters.use` lends for the time of a step: no
    parameters of this module, so FSDP neither gathers nor reduces them with the frozen weights.
    """

    lora_a: torch.Tensor | None = None
    lora_b: torch.Tensor | None = None
    lora_scale: float = 1.0

    @classmethod
    def adopt(cls, linear: nn.Linear) -> "LoraLinear":
        """Return the same map with the same parameters, under the same names."""
        new = cls(linear.in_features, linear.out_features, bias=False, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., in]` -> `[..., out]`, in the input's dtype; A x is scaled, which is the smallest of the products."""
        output = cpu_matmul.linear(input, self.weight, self.bias)
        if self.lora_a is None or self.lora_b is None:
            return output
        low = cpu_matmul.linear(input, self.lora_a.to(input.dtype)) * self.lora_scale
        return output + cpu_matmul.linear(low, self.lora_b.to(input.dtype))


def add_lora(hf: Any, config: LoraConfig, dtype: torch.dtype) -> list[str]:
    """Freeze a model and give its target modules a place for an adapter, and a reward model's head. Works on empty
    (meta) models.

    Args:
        hf: the unsharded model; changed in place, parameter names stay.
        dtype: of the frozen parameters: that of the computation, since no optimizer needs more.

    Returns:
        names of the adapted modules, in the model's order.

    Raises:
        ValueError: a target matches nothing, or the rank exceeds a target's dimensions.
    """
    linears = {
        name: m
        for name, m in hf.named_modules()
        if isinstance(m, nn.Linear) and _is_plain(type(m)) and ".visual." not in name  # engines adapt text alone
    }
    head = hf.get_output_embeddings()
    scores = [name for name, m in linears.items() if m is head and m.out_features == 1]  # a reward model's
    chosen = list(dict.fromkeys([*select_modules(config, list(linears)), *scores]))
    tables = {id(hf.get_input_embeddings().weight), id(head.weight)}
    for name in chosen:
        linear = linears[name]
        if id(linear.weight) in tables and name not in scores:
            raise ValueError(
                f"model.lora.target_modules: {name} is a token table, whose weight the loss uses directly; leave it out"
            )
        if config.rank > min(linear.in_features, linear.out_features) and name not in scores:
            raise ValueError(
                f"model.lora.rank ({config.rank}) exceeds {name}, which is {linear.out_features} x "
                f"{linear.in_features}: lower the rank or leave the module out"
            )
        parent, _, child = name.rpartition(".")
        adapted = LoraLinear.adopt(linear)
        adapted.lora_scale = config.scale
        setattr(hf.get_submodule(parent), child, adapted)
    hf.requires_grad_(False)
    if dtype != torch.float32:
        for parameter in hf.parameters():
            parameter.data = parameter.data.to(dtype)
    return chosen


def _is_plain(kind: type[nn.Linear]) -> bool:
    """Return whether W x + b is what a class computes: some routers are linear modules that return more, and DeepSeek
    V4's output projection multiplies group by group."""
    return kind.forward is nn.Linear.forward or kind.__name__ in _SAME
