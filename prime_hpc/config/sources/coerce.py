"""Text from a flag or a variable (or a hand-written file) into the value that a key of the tree can take."""

import ast
import json
from typing import Any, Literal, get_args, get_origin

from prime_hpc.config.schema import Node, admits, members, type_text
from prime_hpc.config.secret import Secret, masked

TRUE = frozenset({"true", "yes", "on", "1"})
FALSE = frozenset({"false", "no", "off", "0"})
NULL = frozenset({"none", "null"})


class CoerceError(ValueError):
    """The value cannot be what the key takes; the text says why."""


def coerce(value: Any, node: Node, *, typed: bool) -> Any:
    """Return the value of a leaf, free or list key from what was stated.

    Args:
        value: what the source holds.
        node: the key.
        typed: True when the source has types (a file), False when all it has is text (a flag, a variable).
    """
    annotation = node.annotation
    if is_reference(value) and not is_literal_of(value, node):
        return value
    if isinstance(value, str):
        value = _from_text(value, node, typed)
    if node.kind == "sections" and isinstance(value, dict):
        raise CoerceError(f"expected a list of mappings: `[[{node.dotted}]]` in TOML, `- key: ...` in YAML")
    if isinstance(value, bool) and not admits(annotation, bool):
        # pydantic would take true for 1.
        raise CoerceError(f"expected {type_text(annotation)}, got {str(value).lower()}")
    return value


def is_reference(value: Any) -> bool:
    """Return whether a value is, or holds, a `${...}` that is resolved once all sources are merged."""
    return isinstance(value, str) and "${" in value


def is_literal_of(text: str, node: Node) -> bool:
    """Return whether a text is a whole mapping or list for a key that takes one; references within are its values'."""
    takes_one = node.kind != "leaf" or node.annotation is Any or _takes_list(node.annotation)
    return takes_one and text.lstrip()[:1] in ("{", "[")


def _takes_list(annotation: Any) -> bool:
    return admits(annotation, list) or admits(annotation, tuple)


def _from_text(text: str, node: Node, typed: bool) -> Any:
    annotation = node.annotation
    if annotation is Any:
        return text if typed else literal(text)
    if text.lower() in NULL and node.optional:
        return None
    if node.kind == "free":
        return mapping(text)
    is_list = node.kind == "sections" or _takes_list(annotation)
    if text in _words(annotation):
        return text
    if is_list and (not admits(annotation, str) or "," in text or text.startswith("[")):
        return _list(text, node)
    return text


def _words(annotation: Any) -> tuple[Any, ...]:
    """Return the words that a value may be beside its other types: `all` or a list."""
    return tuple(word for member in members(annotation) if get_origin(member) is Literal for word in get_args(member))


def _list(text: str, node: Node) -> Any:
    stripped = text.strip()
    if stripped[:1] in ("[", "(", "{"):
        parsed = literal(stripped)
        if isinstance(parsed, str):
            raise CoerceError(f"expected {type_text(node.annotation)}, but {masked(text)!r} is neither JSON nor Python")
        return [parsed] if isinstance(parsed, dict) else list(parsed)
    if node.kind == "sections":
        raise CoerceError(f'expected a list of mappings such as \'[{{"id": "..."}}]\', got {masked(text)!r}')
    return [part.strip() for part in stripped.split(",") if part.strip()]


def mapping(text: str) -> dict[str, Any]:
    """Return a JSON object or Python dict literal. Raises CoerceError."""
    parsed = literal(text.strip())
    if not isinstance(parsed, dict) or not all(isinstance(key, str) for key in parsed):
        raise CoerceError(f"expected a mapping such as '{{\"key\": 1}}', got {masked(text)!r}")
    return parsed


def literal(text: str) -> Any:
    """JSON or Python literal where the text is one, else the text itself (`true`, `none` in any case are values)."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in NULL:
        return None
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return text


def switch(value: Any) -> bool | None:
    """Read what a value says about a whole section: True on, False off, None: it is no switch."""
    if value is None or value is False:
        return False
    if value is True:
        return True
    if isinstance(value, str):
        text = value.strip().lower()
        return True if text in TRUE else False if text in FALSE | NULL else None
    return None


def typed_value(value: Any, annotation: Any) -> Any:
    """Return what a key of this type makes of a text or a list of texts, as plain values; as it is where it cannot be.

    A text that is one of the key's own types stays a text.
    """
    if annotation in (Any, str) or admits(annotation, Secret) or (isinstance(value, str) and admits(annotation, str)):
        return value
    from pydantic import TypeAdapter, ValidationError

    try:
        adapter = TypeAdapter(annotation)
        return adapter.dump_python(adapter.validate_python(value), mode="json")
    except ValidationError:
        return value


def is_flag(node: Node) -> bool:
    """Return whether a bare `--key` means true."""
    return node.annotation is not Any and bool in members(node.annotation)
