"""Patches of verifiers, renderers and pydantic: look up once what they look up for every episode. Same results, but of
a tool call whose arguments are nested too deep for `json`: its episode goes on."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self
from weakref import WeakKeyDictionary

from pydantic import BaseModel
from pydantic._internal import _fields
from renderers import base as renderers_base
from renderers import parsing, reasoning
from verifiers.v1 import graph, harness, rollout, task
from verifiers.v1.errors import RolloutError
from verifiers.v1.graph import MessageNode
from verifiers.v1.task import Task
from verifiers.v1.trace import Trace
from verifiers.v1.types import Request, TurnTokens
from verifiers.v1.utils import decorators

from prime_hpc.config.named_code import signature_of

_discover = decorators.discover_decorated
_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()
_decorated: WeakKeyDictionary[type, dict[str, list[str] | None]] = WeakKeyDictionary()
_invoke_all = decorators.invoke_all
_offset_tokenizer = renderers_base._get_offset_tokenizer
_with_offsets: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_marker_id = reasoning._single_marker_id
_markers: WeakKeyDictionary[Any, dict[str, int | None]] = WeakKeyDictionary()
_decode = reasoning._decode
_decode_reply = parsing._decode
_decoders: WeakKeyDictionary[Any, Callable[[list[int]], str] | None] = WeakKeyDictionary()
_decoded: WeakKeyDictionary[Any, dict[tuple[int, ...], str]] = WeakKeyDictionary()
_tools_hash = graph._tools_hash
_canonical_arguments = graph._canonical_tool_arguments
_task_hash = Task.hash
_task_hooks = Task.hooks
_plugged_judges = Task.plugged_judges
_state_cls = functools.lru_cache(maxsize=4096)(rollout.state_cls)
_serve_interception = rollout.serve_interception
_serve_tools = rollout.serve_tools
_NO_TOOLS = _tools_hash(None)
FEW_IDS = 4
"""So many tokens, or fewer, are remembered with their text: what surrounds a think section."""
MAX_DECODED = 4096
FEW_CHARS = 20_000
"""A longer text is encoded by what lets other threads run meanwhile."""
_takes_data = functools.lru_cache(maxsize=4096)(_fields.takes_validated_data_argument)


def patch_verifiers() -> None:
    """Idempotent; belongs to this process."""
    _use_plain_defaults(MessageNode)
    for model in (MessageNode, TurnTokens, Request):
        _construct_plainly(model)
    # All that `decorators` asks of `inspect`: the parameters of hooks, rewards and metrics, at every call of one.
    vars(decorators)["inspect"] = SimpleNamespace(signature=_signature)
    for module in (harness, rollout, task):
        vars(module)["discover_decorated"] = _discover_decorated
    for module in (decorators, harness, task):  # else a task of asyncio's for every list of hooks, of an empty one too
        vars(module)["invoke_all"] = _invoke_each
    # Scopes that are generators: asyncio registers each one with its loop, a dozen an episode.
    for module in (harness, rollout, task):
        vars(module)["boundary"] = _Boundary
    vars(rollout)["serve_interception"], vars(rollout)["serve_tools"] = _reach_interception, _reach_tools
    vars(rollout)["asyncio"] = SimpleNamespace(
        get_running_loop=asyncio.get_running_loop, gather=_in_turn, timeout=_timeout, timeout_at=_timeout_at
    )
    # Whether a tokenizer knows offsets: else it is asked for every text, by encoding another one.
    vars(renderers_base)["_get_offset_tokenizer"] = _get_offset_tokenizer
    # The tokens of markers, and the text around them, in every reply.
    vars(reasoning)["_single_marker_id"], vars(reasoning)["_decode"] = _single_marker_id, _decode_few
    # A reply's text, without transformers' way to the tokenizer.
    vars(parsing)["_decode"] = _decode_directly
    # The sum over no tools, three times a turn; that over a task's data, twice a rollout.
    vars(graph)["_tools_hash"] = _hash_tools
    vars(graph)["_canonical_tool_arguments"] = _canonical_or_as_they_are
    Task.hash = property(_hash_task)
    # What a config plugs in beside a task's own hooks: mostly nothing. The class of its state, from all its bases.
    Task.hooks, Task.plugged_judges = _hooks, _judges
    vars(rollout)["state_cls"] = _state_cls
    # Private attributes: else pydantic asks each time whether they are descriptors. `Trace` has none that is.
    Trace.__getattr__ = _private_attribute
    # Whether a default factory takes arguments: else `model_construct` asks `inspect.signature` for every object.
    vars(_fields)["takes_validated_data_argument"] = _takes_data


class _Boundary:
    """`errors.boundary`: whose failure an error is that leaves it."""

    __slots__ = ("_kind", "_what")

    def __init__(self, error_cls: type[RolloutError], what: str) -> None:
        self._kind, self._what = error_cls, what

    async def __aenter__(self) -> None:
        """Nothing."""

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, Exception) or isinstance(error, RolloutError):
            return False
        if isinstance(error, TimeoutError):
            raise self._kind(f"{self._what} timed out") from error
        raise self._kind(f"{self._what}: {type(error).__name__}: {error}") from error


class _NoDeadline:
    """`asyncio.timeout(None)`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        """Nothing."""

    def expired(self) -> bool:
        """Return False: there is no deadline."""
        return False


_NO_DEADLINE = _NoDeadline()


def _timeout(delay: float | None) -> Any:
    return _NO_DEADLINE if delay is None else asyncio.timeout(delay)


def _timeout_at(when: float | None) -> Any:
    return _NO_DEADLINE if when is None else asyncio.timeout_at(when)


async def _in_turn(first: Coroutine[Any, Any, Any], *rest: Coroutine[Any, Any, Any]) -> list[Any]:
    """`asyncio.gather` of the task's and the harness's scoring, without a task for each: few harnesses score at all."""
    left = [first, *rest]
    try:
        return [await left.pop(0) for _ in range(len(left))]
    finally:
        for coroutine in left:
            coroutine.close()


class _NoTools:
    """`serve_tools` of none."""

    async def __aenter__(self) -> dict[str, str]:
        return {}

    async def __aexit__(self, *error: object) -> None:
        """Nothing."""


_NONE_SERVED = _NoTools()


def _reach_interception(interception: Any, runtime: Any, session: Any, servers: list[Any], shared: Any) -> Any:
    """`serve_interception`: one that is shared is itself the scope."""
    if interception is not None:
        return interception.acquire(session)
    return _serve_interception(interception, runtime, session, servers, shared)


def _reach_tools(toolsets: list[Any], runtime: Any, shared: Any = None, **state: Any) -> Any:
    """`serve_tools`, of which nothing is left where there are none."""
    return _serve_tools(toolsets, runtime, shared, **state) if toolsets or shared else _NONE_SERVED


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
        if len(text) > FEW_CHARS:  # `encode` keeps all other threads waiting, a text of a megabyte for seconds
            (found,) = backend.encode_batch([text], add_special_tokens=add_special_tokens)
        else:
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


def _decode_directly(tokenizer: Any, ids: list[int]) -> str:
    """`parsing._decode`, by a fast tokenizer's backend where that gives the same."""
    if not ids:
        return ""
    try:
        if tokenizer not in _decoders:
            _decoders[tokenizer] = _decoder(tokenizer)
        decode = _decoders[tokenizer]
    except TypeError:  # one that cannot be remembered
        decode = None
    return _decode_reply(tokenizer, ids) if decode is None else decode(ids)


def _decoder(tokenizer: Any) -> Callable[[list[int]], str] | None:
    """Return what decodes as a fast tokenizer of transformers does; None where nothing does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", True):
        return None
    decode = functools.partial(backend.decode, skip_special_tokens=False)
    probe = backend.encode("Say \u00e9 , hi \U0001f600 .\n<think> 1+1 !", add_special_tokens=True).ids
    probes = (probe, probe[1:], probe[::-1], [probe[0], probe[0]])
    return decode if all(decode(ids) == _decode_reply(tokenizer, list(ids)) for ids in probes) else None


def _hash_tools(tools: Sequence[Any] | None) -> str:
    """`graph._tools_hash`, known for no tools."""
    return _tools_hash(tools) if tools else _NO_TOOLS


def _canonical_or_as_they_are(arguments: str) -> str:
    """`graph._canonical_tool_arguments`, which lets through what is no JSON, and not what nests too deep for it."""
    try:
        return _canonical_arguments(arguments)
    except RecursionError:
        return arguments


def _hash_task(self: Any) -> str:
    """`Task.hash`, remembered for as long as the task has this data, which is frozen."""
    known = vars(self).get("_prime_hpc_hash")
    if known is None or known[0] is not self.data:
        assert _task_hash.fget is not None
        known = vars(self)["_prime_hpc_hash"] = self.data, _task_hash.fget(self)
    return known[1]


def _hooks(self: Any, attr: str) -> list[Callable[..., Any]]:
    """`Task.hooks`, where the config plugs nothing in: those of its class, in their order."""
    if getattr(self.config, f"{attr}s"):
        return _task_hooks(self, attr)
    found = _discover_decorated(self, attr)
    return found if len(found) < 2 or len({hook.__name__ for hook in found}) == len(found) else _task_hooks(self, attr)


def _judges(self: Any) -> list[Any]:
    """`Task.plugged_judges`, of which there are mostly none."""
    return _plugged_judges(self) if self.config.judges else []


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


def _construct_plainly(model: type[BaseModel]) -> None:
    """Give a model whose fields have plain names and defaults a `model_construct` that does not look at each of them.

    Left as it is where pydantic has more to do: aliases, private attributes, extra fields, hooks.
    """
    fields = model.model_fields
    special = model.__private_attributes__ or model.__pydantic_post_init__ or model.model_config.get("extra") == "allow"
    if special or any(info.alias or info.validation_alias for info in fields.values()):
        return
    given = {name: info.default for name, info in fields.items() if not info.is_required() and not info.default_factory}
    constants = {name: value for name, value in given.items() if not isinstance(value, list | dict | set)}
    made = {name: info.get_default for name, info in fields.items() if name not in constants and not info.is_required()}
    assign = object.__setattr__

    def construct(cls: type[BaseModel], _fields_set: set[str] | None = None, **values: Any) -> Any:
        if cls is not model or not values.keys() <= fields.keys():
            return BaseModel.model_construct.__func__(cls, _fields_set, **values)  # type: ignore[attr-defined]
        content = dict(constants)
        for name, default in made.items():
            if name not in values:
                content[name] = default(call_default_factory=True, validated_data=content)
        content.update(values)
        new = cls.__new__(cls)
        assign(new, "__dict__", content)
        assign(new, "__pydantic_fields_set__", set(values) if _fields_set is None else _fields_set)
        assign(new, "__pydantic_extra__", None)
        assign(new, "__pydantic_private__", None)
        return new

    model.model_construct = classmethod(construct)  # type: ignore[assignment]


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """`inspect.signature`, remembered for functions and for methods (of whatever object)."""
    plain = getattr(function, "__func__", None)
    if plain is None or not inspect.isfunction(plain) or hasattr(plain, "__wrapped__"):
        return signature_of(function)
    found = _signatures.get(plain)
    if found is None:
        found = _signatures[plain] = signature_of(function)
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
