"""Sending tokens to named experts: to those that a record names, in place of those that a router would choose now.

A model's own code routes; only what its `topk` over all experts returns is replaced. The weights of the named experts
are those of the live scores, so that gradients reach the router through them as ever (R3, arXiv 2510.11370).
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from prime_hpc.moe.routers import MoeLayer, moe_layers


class _Active:
    """The recorded choices of the micro-batch that is under way, in the forward pass and in what is computed again."""

    routed: torch.Tensor | None = None


@contextmanager
def replaying(routed: torch.Tensor | None) -> Iterator[None]:
    """Send the tokens of the passes inside to these experts (keep it open over the backward pass, too).
    `routed`: int16 [tokens, layers, k], see `MicroBatch.routed`; None: every choice is live."""
    before, _Active.routed = _Active.routed, routed
    try:
        yield
    finally:
        _Active.routed = before


def install(hf: Any) -> int:
    """Let the routers of a causal LM follow `replaying`; before FSDP and recomputation wrap its blocks.
    Returns the number of its layers with experts.
    Raises ValueError: it has none."""
    layers = moe_layers(hf)
    if not layers:
        raise ValueError(f"trainer.router_replay: {type(hf).__name__} has no experts; leave it out")
    for layer in layers:
        layer.block.forward = functools.partial(_forward, layer.block.forward, layer)
    return len(layers)


@torch.compiler.disable  # experts are outside of compiled graphs, and their router with them
def _forward(forward: Callable[..., Any], layer: MoeLayer, *args: Any, **kwargs: Any) -> Any:
    if _Active.routed is None:
        return forward(*args, **kwargs)
    if layer.number >= _Active.routed.shape[1]:
        raise ValueError(f"experts are recorded for {_Active.routed.shape[1]} layers, the model has {layer.number + 1}")
    num_experts: Any = layer.experts.num_experts
    with _Choices(_Active.routed[:, layer.number], num_experts) as choices:
        output = forward(*args, **kwargs)
    if choices.num_replaced != 1:
        kind = type(layer.block).__name__
        raise ValueError(f"trainer.router_replay: {kind} does not choose experts by one `topk` over all; leave it out")
    return output


class _Choices(TorchFunctionMode):
    """Replaces the experts that a router chooses."""

    def __init__(self, routed: torch.Tensor, num_experts: int) -> None:
        """Take recorded experts, int16 [tokens, k], -1 where none are; there are so many."""
        super().__init__()
        self._routed, self._num_experts = routed.long(), num_experts
        self.num_replaced = 0

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute one call of torch's."""
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk) and self._is_choice(args[0], result):
            return self._replace(args[0], result.indices)
        return result

    def _is_choice(self, scores: torch.Tensor, result: Any) -> bool:
        """Return whether a `topk` is over all experts of every token: others are over groups of them, or in groups."""
        return scores.shape[-1] == self._num_experts and result.indices.shape == self._routed.shape

    def _replace(self, scores: torch.Tensor, live: torch.Tensor) -> Any:
        self.num_replaced += 1
        chosen = torch.where(self._routed < 0, live, self._routed)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
