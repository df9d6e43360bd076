"""What verifiers and pydantic look up anew for every episode, looked up once. Same results.

Called by `prime_hpc.envs.engine` before the first episode.
"""

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel
from verifiers.v1.graph import MessageNode
from verifiers.v1.utils import decorators

_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()


def take_shortcuts() -> None:
    """Idempotent; belongs to this process."""
    _use_plain_defaults(MessageNode)
    # All that `decorators` asks of `inspect`: the parameters of hooks, rewards and metrics, at every call of one.
    decorators.inspect = SimpleNamespace(signature=_signature)


def _use_plain_defaults(model: type[BaseModel]) -> None:
    """Give a model's fields the default `[]` for the default factory `list`; pydantic copies it for every instance.

    `model_construct` asks `inspect.signature` about every default factory, each time: with message nodes, half of an
    episode's whole cost.
    """
    for info in model.model_fields.values():
        if info.default_factory is list:
            info.default_factory, info.default = None, []


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """`inspect.signature`, remembered for functions and for methods (of whatever object)."""
    plain = getattr(function, "__func__", None)
    if plain is None or not inspect.isfunction(plain) or hasattr(plain, "__wrapped__"):
        return inspect.signature(function)
    found = _signatures.get(plain)
    if found is None:
        found = _signatures[plain] = inspect.signature(function)
    return found
