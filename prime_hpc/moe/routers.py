"""Finding the routers of a transformers model, and their logits in float32 (`model.router_dtype`).

A router multiplies a token's hidden state with one row an expert and takes the k largest. Two rows that are nearly
alike are told apart by the last bits of the logits, so rounding these to bfloat16 decides which experts a token meets.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class MoeLayer(NamedTuple):
    """A layer of the model with experts."""

    number: int
    """Of the transformer block that it is in, over all of the model."""
    block: nn.Module
    """Holds router and experts, and weighs what the experts compute."""
    experts: nn.Module


def expert_modules(hf: Any) -> list[nn.Module]:
    """Return the modules that hold fused experts; none in a dense model."""
    return [m for m in hf.modules() if hasattr(m, "_is_expert_parallel") and hasattr(m, "num_experts")]


def moe_layers(hf: Any) -> list[MoeLayer]:
    """Return the layers of a causal LM that have fused experts; none in a dense model."""
    experts = expert_modules(hf)
    layers = []
    for name, module in hf.named_modules():
        if any(module is one for one in experts):
            found = _LAYER.search(name)
            layers.append(MoeLayer(int(found[1]) if found else 0, hf.get_submodule(name.rpartition(".")[0]), module))
    return layers


def use_float32_routers(hf: Any) -> None:
    """Make every router multiply in float32 and keep its logits so, whatever the model computes in.
    Raises ValueError: there is none, or none that can be found."""
    layers = moe_layers(hf)
    gates = [_gate(layer) for layer in layers]
    if not layers or None in gates:
        what = "has no experts" if not layers else "has routers of a kind that is not known here"
        raise ValueError(f"model.router_dtype = float32: {type(hf).__name__} {what}; leave it out")
    for gate in gates:
        assert gate is not None
        gate.forward = functools.partial(_in_float32, gate.forward, gate)


def _gate(layer: MoeLayer) -> nn.Module | None:
    """Find the module of a layer whose weight has a row an expert."""
    num_experts: Any = layer.experts.num_experts
    for name, module in layer.block.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or "expert" in name:
            continue
        if weight.ndim == 2 and weight.shape[0] == num_experts:
            return module
    return None


@torch.compiler.disable
def _in_float32(forward: Callable[..., Any], gate: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if type(gate) is nn.Linear:  # whatever its forward has become
        return _product(args[0], gate.weight, gate.bias)
    with _Float32Products():
        return forward(*args, **kwargs)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


class _Float32Products(TorchFunctionMode):
    """Linear layers inside multiply in float32."""

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute one call of torch's."""
        if func is F.linear:
            return _product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
