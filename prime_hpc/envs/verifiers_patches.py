"""Patches of verifiers, renderers and pydantic: look up once what they look up for every episode. Same results."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel
from pydantic._internal import _fields
from renderers import base as renderers_base
from renderers import reasoning
from verifiers.v1 import graph, harness, rollout, task
from verifiers.v1.graph import MessageNode
from verifiers.v1.task import Task
from verifiers.v1.trace import Trace
from verifiers.v1.utils import decorators

_discover = decorators.discover_decorated
_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()
_decorated: WeakKeyDictionary[type, dict[str, list[str] | None]] = WeakKeyDictionary()
_invoke_all = decorators.invoke_all
_offset_tokenizer = renderers_base._get_offset_tokenizer
_with_offsets: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_marker_id = reasoning._single_marker_id
_markers: WeakKeyDictionary[Any, dict[str, int | None]] = WeakKeyDictionary()
_decode = reasoning._decode
_decoded: WeakKeyDictionary[Any, dict[tuple[int, ...], str]] = WeakKeyDictionary()
_tools_hash = graph._tools_hash
_task_hash = Task.hash
_NO_TOOLS = _tools_hash(None)
FEW_IDS = 4
"""So many tokens, or fewer, are remembered with their text: what surrounds a think section."""
MAX_DECODED = 4096
_takes_data = functools.lru_cache(maxsize=4096)(_fields.takes_validated_data_argument)


def patch_verifiers() -> None:
    """Idempotent; belongs to this process."""
    _use_plain_defaults(MessageNode)
    # All that `decorators` asks of `inspect`: the parameters of hooks, rewards and metrics, at every call of one.
    vars(decorators)["inspect"] = SimpleNamespace(signature=_signature)
    for module in (harness, rollout, task):
        vars(module)["discover_decorated"] = _discover_decorated
    for module in (decorators, harness, task):  # else a task of asyncio's for every list of hooks, of an empty one too
        vars(module)["invoke_all"] = _invoke_each
    # Whether a tokenizer knows offsets: else it is asked for every text, by encoding another one.
    vars(renderers_base)["_get_offset_tokenizer"] = _get_offset_tokenizer
    # The tokens of markers, and the text around them, in every reply.
    vars(reasoning)["_single_marker_id"], vars(reasoning)["_decode"] = _single_marker_id, _decode_few
    # The sum over no tools, three times a turn; that over a task's data, twice a rollout.
    vars(graph)["_tools_hash"] = _hash_tools
    Task.hash = property(_hash_task)
    # Private attributes: else pydantic asks each time whether they are descriptors. `Trace` has none that is.
    Trace.__getattr__ = _private_attribute
    # Whether a default factory takes arguments: else `model_construct` asks `inspect.signature` for every object.
    vars(_fields)["takes_validated_data_argument"] = _takes_data


def _get_offset_tokenizer(tokenizer: Any) -> Any:
    """Cache renderers' `_get_offset_tokenizer`: a matter of the tokenizer. A fast one's backend is asked."""
    try:
        if tokenizer in _with_offsets:
            known = _with_offsets[tokenizer]
            return tokenizer if known is True else known
    except TypeError:  # one that cannot be remembered
        return _offset_tokenizer(tokenizer)
    found = None if _offset_tokenizer(tokenizer) is None else _direct(tokenizer)
    # Not the tokenizer itself, which would keep itself alive.
    _with_offsets[tokenizer] = True if found is tokenizer else found
    return found


def _direct(tokenizer: Any) -> Any:
    """Return what encodes one text as a fast tokenizer of transformers does, without the way there and back.

    The tokenizer itself where it has no backend, or encodes a probe otherwise.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer

    def encode(text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Mapping[str, Any]:
        if backend.truncation is not None or backend.padding is not None:  # left behind by another caller
            backend.no_truncation()
            backend.no_padding()
        found = backend.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": found.ids, "offset_mapping": found.offsets}

    options = {"add_special_tokens": False, "return_offsets_mapping": True}
    for probe in ("user\nSay \u00e9 hi,  1+1.\n", "<|im_start|><think>\n\n</think> \U0001f600"):
        theirs, own = tokenizer(probe, **options), encode(probe, **options)
        if any(list(theirs[key]) != list(own[key]) for key in own):
            return tokenizer
    return encode


def _single_marker_id(tokenizer: Any, marker: str) -> int | None:
    """Cache renderers' `_single_marker_id`: a vocabulary does not change any more."""
    try:
        known = _markers.setdefault(tokenizer, {})
    except TypeError:
        return _marker_id(tokenizer, marker)
    if marker not in known:
        known[marker] = _marker_id(tokenizer, marker)
    return known[marker]


def _decode_few(tokenizer: Any, ids: list[int]) -> str:
    """Cache renderers' `_decode` of a few tokens."""
    if not 0 < len(ids) <= FEW_IDS:
        return _decode(tokenizer, ids)
    try:
        known = _decoded.setdefault(tokenizer, {})
    except TypeError:
        return _decode(tokenizer, ids)
    key = tuple(ids)
    found = known.get(key)
    if found is None:
        if len(known) >= MAX_DECODED:
            known.clear()
        found = known[key] = _decode(tokenizer, ids)
    return found


def _hash_tools(tools: Sequence[Any] | None) -> str:
    """`graph._tools_hash`, known for no tools."""
    return _tools_hash(tools) if tools else _NO_TOOLS


def _hash_task(self: Any) -> str:
    """`Task.hash`, remembered for as long as the task has this data, which is frozen."""
    known = vars(self).get("_prime_hpc_hash")
    if known is None or known[0] is not self.data:
        assert _task_hash.fget is not None
        known = vars(self)["_prime_hpc_hash"] = self.data, _task_hash.fget(self)
    return known[1]


def _private_attribute(self: Any, name: str) -> Any:
    """`BaseModel.__getattr__` of a trace: its private attributes first."""
    private = self.__pydantic_private__
    if private is not None and name in private:
        return private[name]
    return BaseModel.__getattr__(self, name)  # type: ignore[attr-defined]


async def _invoke_each(functions: list[Callable[..., Any]], available: dict[str, Any]) -> list[Any]:
    """`invoke_all`: none or one needs no task beside this one."""
    if len(functions) > 1:
        return await _invoke_all(functions, available)
    return [await decorators.invoke(function, available) for function in functions]


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
