"""Patches of verifiers, renderers and pydantic: look up once what they look up for every episode. Same results."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel
from pydantic._internal import _fields
from renderers import base as renderers_base
from verifiers.v1 import harness, rollout, task
from verifiers.v1.graph import MessageNode
from verifiers.v1.utils import decorators

_discover = decorators.discover_decorated
_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()
_decorated: WeakKeyDictionary[type, dict[str, list[str] | None]] = WeakKeyDictionary()
_offset_tokenizer = renderers_base._get_offset_tokenizer
_with_offsets: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_takes_data = functools.lru_cache(maxsize=4096)(_fields.takes_validated_data_argument)


def patch_verifiers() -> None:
    """Idempotent; belongs to this process."""
    _use_plain_defaults(MessageNode)
    # All that `decorators` asks of `inspect`: the parameters of hooks, rewards and metrics, at every call of one.
    vars(decorators)["inspect"] = SimpleNamespace(signature=_signature)
    for module in (harness, rollout, task):
        vars(module)["discover_decorated"] = _discover_decorated
    # Whether a tokenizer knows offsets: else it is asked for every text, by encoding another one.
    vars(renderers_base)["_get_offset_tokenizer"] = _get_offset_tokenizer
    # Whether a default factory takes arguments: else `model_construct` asks `inspect.signature` for every object.
    vars(_fields)["takes_validated_data_argument"] = _takes_data


def _get_offset_tokenizer(tokenizer: Any) -> Any:
    """Cache renderers' `_get_offset_tokenizer`; the answer is a matter of the tokenizer."""
    try:
        known = _with_offsets.get(tokenizer)
    except TypeError:  # one that cannot be remembered
        return _offset_tokenizer(tokenizer)
    if known is None:
        known = _with_offsets[tokenizer] = _offset_tokenizer(tokenizer) is not None
    return tokenizer if known else None


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


def _discover_decorated(obj: object, attr: str) -> list[Callable[..., Any]]:
    """Cache verifiers' `discover_decorated`; what it finds is a matter of the object's class, which it searches each
    time."""
    known = _decorated.setdefault(type(obj), {})
    if attr not in known:
        found = _discover(obj, attr)
        own = [method.__name__ for method in found]
        # A method that is known by another name than its own is searched for again.
        known[attr] = own if [getattr(obj, name, None) for name in own] == found else None
    names = known[attr]
    return _discover(obj, attr) if names is None else [getattr(obj, name) for name in names]
