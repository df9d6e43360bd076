"""The side of a policy that a publisher sees, of any tensors."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def stand_in(named_weights: Callable[..., list[Any]], weights: Any) -> Any:
    """A language model's policy without adapters."""
    return SimpleNamespace(
        named_weights=named_weights, weights=weights, adapters=None, reward_config=None, scores=False
    )
