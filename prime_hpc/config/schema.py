"""The experiment tree as a map of dotted paths: what each key is, where a key of a component's scope lives.

`sources`, `flags` and `snapshot` ask it; it reads the pydantic models and knows nothing about files or flags.
"""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from prime_hpc.config.experiment import COMPONENTS, Experiment
from prime_hpc.config.renamed_keys import renamed
from prime_hpc.config.secret import Secret
from prime_hpc.config.sections.base import Section

Kind = Literal["section", "sections", "free", "leaf"]
"""section: a mapping of known keys; sections: a list of such; free: a mapping of any keys; leaf: a value."""

_TYPE_TEXTS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    Secret: "text",
    type(None): "null",
}

_CHAINS: dict[str | None, tuple[tuple[str, ...], ...]] = {
    None: ((),),
    # SFT runs on the trainer: what its own section lacks is the trainer's before it is the root's.
    "sft": (("sft",), ("trainer",), ()),
    **{name: ((name,), ()) for name in COMPONENTS if name != "sft"},
}
"""Scope -> sections in which a key is looked up, in order."""

_OF_NAMES = frozenset({"args", "columns", "env_args", "extra", "vllm"})
"""Mappings of any keys that take names of arguments, columns or options: snake case, as the schema's own keys."""
_OF_KEYS = "overrides"
"""A mapping of any keys whose keys are those of the schema again."""


@dataclass(frozen=True)
class Node:
    """One key of the tree."""

    path: tuple[str, ...]
    """The value's place, from the root."""
    kind: Kind
    annotation: Any
    """Its type; below a free mapping that of the mapping's values."""
    component: str | None = None
    """The component through whose scope the key was reached, if any."""
    is_old_name: bool = False
    """True if the key was named as an earlier version called it, see `renamed_keys`."""

    @property
    def dotted(self) -> str:
        """`a.b.c`."""
        return ".".join(self.path)

    @property
    def optional(self) -> bool:
        """True if the key may be null."""
        return admits(self.annotation, type(None))


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def admits(annotation: Any, kind: Any) -> bool:
    """Return whether a union has `kind` (a plain or generic type such as `list`) among its members."""
    return annotation is Any or any(m is kind or get_origin(m) is kind for m in members(annotation))


def type_text(annotation: Any) -> str:
    """Return a type in words for an error message: `an integer or null`, `one of grpo, none`."""
    texts = []
    for member in members(annotation):
        origin = get_origin(member)
        if origin is Literal:
            values = [str(value) for value in get_args(member)]
            texts.append(values[0] if len(values) == 1 else "one of " + ", ".join(values))
        elif origin in (list, tuple):
            inner = ", ".join(dict.fromkeys(type_text(a) for a in get_args(member) if a is not Ellipsis))
            fixed = origin is tuple and Ellipsis not in get_args(member)
            texts.append(f"a list of {len(get_args(member))} ({inner})" if fixed else f"a list ({inner})")
        elif _is_section(member) or origin is dict or member is dict:
            texts.append("a mapping")
        else:
            texts.append(_TYPE_TEXTS.get(member, getattr(member, "__name__", str(member))))
    return " or ".join(texts)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _section_types(annotation: Any) -> tuple[type[Section], ...]:
    return tuple(m for m in members(annotation) if _is_section(m))


def _element_types(annotation: Any) -> tuple[type[Section], ...]:
    lists = [m for m in members(annotation) if get_origin(m) is list]
    return tuple(t for m in lists for t in _section_types(get_args(m)[0]))


def _kind(annotation: Any) -> Kind:
    if _section_types(annotation):
        return "section"
    if _element_types(annotation):
        return "sections"
    if annotation is not Any and admits(annotation, dict):
        return "free"
    return "leaf"


def _child(annotation: Any, name: str) -> tuple[str, Any] | None:
    """Return the key `name` of a value of this type, as (stored name, type); kebab and snake case are one in
    sections."""
    if annotation is Any:
        return name, Any
    snake = name.replace("-", "_")
    for section in _section_types(annotation):
        if snake in section.model_fields:
            return snake, section.model_fields[snake].annotation
    elements = _element_types(annotation)
    if elements and name.isdecimal():
        return name, Union[elements]  # noqa: UP007 (built from a tuple)
    if _kind(annotation) == "free":
        return name, _value_type(annotation)
    return None


def _value_type(annotation: Any) -> Any:
    """Return the type of the values of a mapping of any keys: variables, requests and columns are texts."""
    values = [get_args(m)[1] for m in members(annotation) if get_origin(m) is dict]
    return values[0] if values else Any


def _descend(base: tuple[str, ...], segments: tuple[str, ...], component: str | None) -> Node | None:
    path, annotation = base, _annotation(base)
    for segment in segments:
        child = _child(annotation, segment)
        if child is None:
            return None
        path, annotation = (*path, child[0]), child[1]
    return Node(path, "leaf" if annotation is Any else _kind(annotation), annotation, component)


@cache
def _annotation(path: tuple[str, ...]) -> Any:
    annotation: Any = Experiment
    for segment in path:
        child = _child(annotation, segment)
        assert child is not None, path
        annotation = child[1]
    return annotation


@cache
def locate(segments: tuple[str, ...], scope: str | None = None) -> Node | None:
    """Find the key that `segments` names in a scope (None: the root), or None when there is no such key.

    In a component's scope, a key of its own section goes there, any other to the root. A shared key under a
    component's name (`trainer.model.ac`) is lifted to its one home (`model.ac`). A key's old name finds it too.
    """
    node = _locate(segments, scope)
    if node is not None:
        return node
    lifted = segments[:1] if segments[0].replace("-", "_") in COMPONENTS else ()
    for above in dict.fromkeys(((), lifted)):
        below = segments[len(above) :]
        now = renamed(below)
        if now != below and (node := _locate((*above, *now), scope)) is not None:
            return replace(node, is_old_name=True)
    return None


def _locate(segments: tuple[str, ...], scope: str | None) -> Node | None:
    first = segments[0].replace("-", "_")
    if first in COMPONENTS and len(segments) > 1 and not any(_has(base, first) for base in _CHAINS[scope][:-1]):
        second = segments[1].replace("-", "_")
        for base in _CHAINS[first]:
            if _has(base, second) and not (base == () and second in COMPONENTS):
                return _descend(base, segments[1:], first)
        return None
    for base in _CHAINS[scope]:
        if _has(base, first):
            return _descend(base, segments, None)
    return None


def _has(base: tuple[str, ...], name: str) -> bool:
    return _child(_annotation(base), name) is not None


def spelled(segments: tuple[str, ...], scope: str | None, spell: Callable[[str], str]) -> tuple[str, ...]:
    """Return the key of a flag or a variable with `spell` applied to each segment that names a key of the schema.

    The keys of a mapping of any keys are the user's, whose case and dashes have a meaning: `NCCL_DEBUG` of `slurm.env`,
    `ephemeral-storage` of `kubernetes.requests`. Names of arguments and the like, one level deep, are spelled too.
    """
    done: tuple[str, ...] = ()
    for segment in segments:
        above = locate(done, scope) if done else None
        is_plain = segment in (segment.lower(), segment.upper())
        done = (*done, spell(segment) if _is_spelled(above, is_plain) else segment)
    return done


def _is_spelled(above: Node | None, is_plain: bool) -> bool:
    """Return whether a key below `above` has one spelling for all; `is_plain`: it is not of mixed case."""
    if above is None or _OF_KEYS in above.path:
        return True
    if above.kind == "free":
        return is_plain and above.path[-1] in _OF_NAMES
    return above.annotation is not Any


@cache
def resolve(path: tuple[str, ...]) -> Node | None:
    """Return the key at a full path from the root, without any lifting."""
    return _descend((), path, None)


def schema_path(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return the longest prefix of a pydantic error location that is a path of the tree (union branch names
    dropped)."""
    path: tuple[str, ...] = ()
    annotation: Any = Experiment
    for part in location:
        child = _child(annotation, str(part))
        if child is None and "[" in str(part):  # `list[ShapeConfig]`: what is wrong lies within that branch
            continue
        if child is None:
            break
        path, annotation = (*path, child[0]), child[1]
    return path


@cache
def all_paths() -> tuple[str, ...]:
    """Every dotted path of the schema, through optional sections and (as index 0) through lists of sections."""
    return tuple(".".join(path) for path in _walk((), Experiment))


def _walk(path: tuple[str, ...], annotation: Any) -> Iterator[tuple[str, ...]]:
    for section in _section_types(annotation):
        for name, field in section.model_fields.items():
            yield (*path, name)
            yield from _walk((*path, name), field.annotation)
            for element in _element_types(field.annotation):
                yield from _walk((*path, name, "0"), element)


def fill_defaults(values: dict[str, Any], annotation: Any = Experiment) -> dict[str, Any]:
    """Return a copy of a (partial) tree with the defaults of every key that it does not state, as plain values."""
    filled = dict(values)
    for section in _section_types(annotation):
        for name, field in section.model_fields.items():
            stated = values.get(name)
            if isinstance(stated, dict) and _section_types(field.annotation):
                filled[name] = fill_defaults(stated, field.annotation)
            elif isinstance(stated, list) and _element_types(field.annotation):
                inner: Any = Union[_element_types(field.annotation)]  # noqa: UP007
                filled[name] = [fill_defaults(e, inner) if isinstance(e, dict) else e for e in stated]
            elif name not in values and not field.is_required():
                filled[name] = _plain(field.get_default(call_default_factory=True))
    return filled


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value
