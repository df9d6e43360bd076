"""The `model.lora` section: low-rank adapters instead of training the whole model. Which modules a target names is
decided here, so that `lint`, the trainer and the export agree."""

import math
import re
from collections.abc import Collection, Iterable

from pydantic import Field, field_validator

from prime_hpc.config.sections.base import Section

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Attention and feed-forward projections of Llama- and Qwen-like models."""
MAX_RANK = 512
"""vLLM serves no larger one."""
HEADS = ("lm_head", "embed_out", "embed_tokens", "wte")
"""Modules with a row per token, by their usual names."""


class LoraConfig(Section):
    """Train low-rank adapters and keep the model as it is (`--model.lora`): W + (scale) B A, arXiv 2106.09685."""

    rank: int = Field(16, ge=1, le=MAX_RANK)
    """Rank of every adapter."""
    alpha: float = Field(32.0, gt=0)
    """Scale of the adapters: alpha / rank, with `rslora` alpha / sqrt(rank)."""
    target_modules: list[str] = list(DEFAULT_TARGETS)
    """Linear modules that get an adapter: last part of the name (`q_proj`), or a regular expression that matches the
    whole name (`.*layers\\.[0-3]\\..*_proj`)."""
    rslora: bool = False
    """Rank-stabilised scale (arXiv 2312.03732)."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @field_validator("target_modules")
    @classmethod
    def _usable(cls, targets: list[str]) -> list[str]:
        if not targets:
            raise ValueError("name at least one module, or leave the key out for the usual projections")
        for target in targets:
            if target in HEADS:
                raise ValueError(
                    f"{target} cannot have an adapter: it may be tied to the other token table, and the loss works on "
                    "its weight directly; leave it out"
                )
            try:
                re.compile(target)
            except re.error as error:
                raise ValueError(f"{target!r} is neither a module's name nor a regular expression: {error}") from error
        return targets


def matches(target: str, module: str) -> bool:
    """Return whether `target` names the module of this full name."""
    return module.rsplit(".", 1)[-1] == target or re.fullmatch(target, module) is not None


def select_modules(config: LoraConfig, modules: Collection[str]) -> list[str]:
    """Return the modules that get adapters, in the given order. `modules`: full names of the model's linear modules.
    Raises ValueError: a target matches nothing, or the output head; says which modules there are."""
    unused = [t for t in config.target_modules if not any(matches(t, m) for m in modules)]
    default = config.target_modules == list(DEFAULT_TARGETS)
    if len(unused) == len(config.target_modules) or (unused and not default):
        raise ValueError(
            f"model.lora.target_modules: {', '.join(unused)} matches no linear module of the model; there are "
            f"{', '.join(last_names(modules)) or 'none'}"
        )
    chosen = [m for m in modules if any(matches(t, m) for t in config.target_modules)]
    if heads := [m for m in chosen if m.rsplit(".", 1)[-1] in HEADS]:
        raise ValueError(
            f"model.lora.target_modules: {heads[0]} cannot have an adapter: the loss works on its weight directly; "
            "leave it out, as .*layers.* does"
        )
    return chosen


def last_names(modules: Iterable[str]) -> list[str]:
    """Distinct last parts of the names, heads left out."""
    return [n for n in dict.fromkeys(m.rsplit(".", 1)[-1] for m in modules) if n not in HEADS]
