"""Rotary frequencies that depend on the context are fixed once, as the engines fix them.

transformers chooses the frequencies of `longrope` (Phi-3.5, Phi-4-mini; arXiv 2402.13753) and `dynamic` (NTK-aware)
embeddings in every forward pass, from the largest position in it: a sample's would depend on its neighbours in the row.
vLLM chooses once, from `max_model_len` and the config, for short and long samples alike. So does the trainer:

- `longrope`: the long factors where the context exceeds `original_max_position_embeddings`, else the short ones; the
  scale of cosines and sines is `long_mscale` or `short_mscale`, where stated, else sqrt(1 + ln(s) / ln(original)) with
  s = `max_position_embeddings` / original;
- `dynamic`: base * (factor * m / t - (factor - 1)) ^ (d / (d - 2)) with m = `max_position_embeddings` and t =
  `max_trained_positions` of the rotary parameters (default m, which leaves the base as it is).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from prime_hpc.config.families import longrope_scale, rotary_problem

DEPENDENT = ("dynamic", "longrope")
"""Rotary types whose frequencies depend on the longest position of a forward pass in transformers."""


def pin_rotary(hf: Any, context: int | None) -> list[str]:
    """Fix the frequencies of every rotary embedding of a model.

    Args:
        hf: the model; rotary buffers are real, whatever its parameters are.
        context: longest sample that the engines are made for, in tokens; None: the model's own limit.

    Returns:
        what was fixed, one line a kind of layer.

    Raises:
        ValueError: a context for which the engines have no positions, or embeddings that cannot be fixed.
    """
    said: dict[str, None] = {}
    for module in hf.modules():
        for layer_type, rope_type in _types(module):
            if rope_type in DEPENDENT:
                said[_pin(module, layer_type, rope_type, context)] = None
    return list(said)


def _types(module: nn.Module) -> Iterator[tuple[str | None, str]]:
    """(layer type or None, rotary type) of a rotary embedding; nothing of other modules."""
    found = getattr(module, "rope_type", None)
    if isinstance(found, dict):
        yield from found.items()
    elif isinstance(found, str):
        yield None, found


class _WithoutType:
    """A config of which only the rotary type is asked, and that asks for nothing special."""

    rope_parameters = {"rope_type": "default"}


def _pin(module: Any, layer_type: str | None, rope_type: str, context: int | None) -> str:
    prefix, config = "" if layer_type is None else f"{layer_type}_", module.config
    rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    name = f"{prefix}inv_freq"
    if not hasattr(module, name):
        raise ValueError(f"{type(module).__name__} has {rope_type} frequencies that cannot be fixed: no {name}")
    limit = int(config.max_position_embeddings)
    context = limit if context is None else context
    if problem := rotary_problem({**config.to_dict(), "rope_parameters": rope}, context):
        raise ValueError(f"{type(module).__name__}: {problem}")
    frequencies = getattr(module, f"{prefix}original_inv_freq", getattr(module, name))
    if rope_type == "longrope":
        original = int(rope["original_max_position_embeddings"])
        chosen = "long" if context > original else "short"
        frequencies = longrope_frequencies(rope, chosen, 2 * len(frequencies)).to(frequencies.device)
        scale = rope.get(f"{chosen}_mscale") or longrope_scale(limit / original, original)
        setattr(module, f"{prefix}attention_scaling", float(scale))
        if type(module).__name__ == "PhimoeRotaryEmbedding":  # computes both anew in every forward pass
            fixed = (frequencies, float(scale))
            module.rope_init_fn = lambda _: fixed
            module.config = _WithoutType()
        said = f"rotary longrope: {chosen} factors for every sample (context {context}, original {original})"
    else:
        if "alpha" not in rope:  # with alpha the model has put it into the base already
            trained = int(rope.get("max_trained_positions") or limit)
            frequencies = dynamic_frequencies(rope, limit / trained, 2 * len(frequencies)).to(frequencies.device)
        said = "rotary dynamic: the same frequencies for every sample"
    module.register_buffer(name, frequencies, persistent=False)
    if layer_type is None:
        module.rope_type = "pinned"  # transformers changes `dynamic` and `longrope` in the forward pass
    else:
        module.rope_type = {**module.rope_type, layer_type: "pinned"}
    return said


def longrope_frequencies(rope: dict[str, Any], chosen: str, width: int) -> torch.Tensor:
    """float32[width / 2], 1 / (factor_i * theta^(2 i / width)) with the `long` or the `short` factors.
    Raises ValueError: another number of factors."""
    factors = torch.tensor(rope[f"{chosen}_factor"], dtype=torch.float32)
    if len(factors) != width // 2:
        raise ValueError(f"rope_parameters.{chosen}_factor has {len(factors)} values for {width // 2} frequencies")
    exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    return 1.0 / (factors * rope["rope_theta"] ** exponents)


def dynamic_frequencies(rope: dict[str, Any], stretch: float, width: int) -> torch.Tensor:
    """float32[width / 2], of the base that the context's `stretch` over the trained length asks for."""
    factor = float(rope["factor"])
    base = rope["rope_theta"] * (factor * stretch - (factor - 1)) ** (width / (width - 2))
    return 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
