"""Text from a flag or a variable (or a hand-written file) into the value that a key of the tree can take."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from prime_hpc.config.schema import Node, admits, members, resolve, type_text
from prime_hpc.config.secret import Secret, masked

if TYPE_CHECKING:
    from pydantic import TypeAdapter

TRUE = frozenset({"true", "yes", "on", "1"})
FALSE = frozenset({"false", "no", "off", "0"})
NULL = frozenset({"none", "null"})

_SEPARATORS = {"slurm.setup": re.compile(r"(?!)"), "slurm.srun_args": re.compile(r",\s*(?=-)")}
"""Lists of texts in which a comma has a meaning of its own -> where a flag's text is cut: a shell line never is."""
_COMMA = re.compile(r",(?![^{]*\})")
"""All others: not within braces (`*.{gz,zst}`, `\\d{1,2}`)."""
_PATTERNS = ("model.lora.target_modules", "sft.data.path", "sft.eval.path", "synthesize.prompts")
"""Lists of patterns, which may begin with a class of characters (`[qk]_proj`)."""
_BRACKETED = re.compile(r"\[[^\[\]]*\]")
"""A list whose quotes the shell took."""
_RANGE = re.compile(r"\s*\d+\s*-\s*\d+\s*")
_WITH_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
_NAMING = ("name", "id", "model", "path", "base_url")
"""Keys that name something when they are stated, as every path does."""


class CoerceError(ValueError):
    """The value cannot be what the key takes; the text says why."""


def coerce(value: Any, node: Node, *, typed: bool) -> Any:
    """Return the value of a leaf, free or list key from what was stated.
    `typed`: True when the source has types (a file), False when all it has is text (a flag, a variable)."""
    annotation = node.annotation
    if is_reference(value) and not is_literal_of(value, node) and not _is_list_with_references(value, node):
        return value
    if isinstance(value, str):
        _check_text(value)
        value = _from_text(value, node, typed)
    if node.kind == "sections" and isinstance(value, dict):
        raise CoerceError(f"expected a list of mappings: `[[{node.dotted}]]` in TOML, `- key: ...` in YAML")
    if value is False and "off" in _words(annotation) and not admits(annotation, bool):
        return "off"  # YAML 1.1 reads the bare word as false
    if isinstance(value, bool) and not admits(annotation, bool):
        # pydantic would take true for 1.
        raise CoerceError(f"expected {type_text(annotation)}, got {str(value).lower()}")
    return value


def _check_text(text: str) -> None:
    """Refuse what is no text. Raises CoerceError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half a character of a JSON escape, bytes of another encoding in a flag
        raise CoerceError(f"{text!a} is no text: it cannot be written as UTF-8") from error


def find_empty(values: Any, path: tuple[str, ...] = ()) -> Iterator[Node]:
    """Find the keys of a merged tree that name something and are the empty text, and take it back where they may be
    null; of a path it is refused all the same: a run would begin anew where a checkpoint's was left out.
    `values`: the tree; changed.
    Yields those that cannot be empty."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for name, value in list(items):
        if isinstance(value, dict | list):
            yield from find_empty(value, (*path, str(name)))
        elif value == "":
            node, above = resolve((*path, str(name))), resolve(path)
            if node is None or above is None or above.kind != "section" or path[:2] == ("alarms", "rules"):
                continue  # a rule need have no name
            is_path = admits(node.annotation, Path)
            if node.path[-1] in _NAMING and node.optional and not is_path:
                values[name] = None
            elif node.path[-1] in _NAMING or is_path:
                yield node


def is_reference(value: Any) -> bool:
    """Return whether a value is, or holds, a `${...}` that is resolved once all sources are merged."""
    return isinstance(value, str) and "${" in value


def is_literal_of(text: str, node: Node) -> bool:
    """Return whether a text is a whole mapping or list for a key that takes one; references within are its values'."""
    takes_one = node.kind != "leaf" or node.annotation is Any or _takes_list(node.annotation)
    return takes_one and text.lstrip()[:1] in ("{", "[")


def _is_list_with_references(text: str, node: Node) -> bool:
    """Return whether a text is a list in which elements refer to keys (`0,${seed}`), no reference to a whole one."""
    if node.kind != "leaf" or node.annotation is Any or not _takes_list(node.annotation) or _is_one(text.strip()):
        return False
    return not admits(node.annotation, str) or len(_cut(text, node)) > 1


def _is_one(text: str) -> bool:
    """Return whether a text is one `${...}` from its begin to its end."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if letter == "}" and depth == 0:
            return text.startswith("${") and place == len(text) - 1
    return False


def _takes_list(annotation: Any) -> bool:
    return admits(annotation, list) or admits(annotation, tuple)


def _from_text(text: str, node: Node, typed: bool) -> Any:
    annotation = node.annotation
    if annotation is Any:
        return text if typed else literal(text)
    if text.lower() in NULL and node.optional:
        return None
    if text == "null" and not typed:  # as a file's null: no folder or variable's value is called so
        raise CoerceError(f"expected {type_text(annotation)}, got null")
    if node.kind == "free":
        return mapping(text)
    is_list = node.kind == "sections" or _takes_list(annotation)
    if text in _words(annotation):
        return text
    if is_list and (not admits(annotation, str) or "," in text or text.startswith("[")):
        return _list(text, node)
    if set(members(annotation)) <= {int, type(None)}:
        return _integer(text)
    return text


def _integer(text: str) -> Any:
    """Refuse a range, of which pydantic takes `0-3` for -3; read `1e3` as files do."""
    if _RANGE.fullmatch(text):
        raise CoerceError(f"{text!r} is no integer")
    return float(text) if _WITH_EXPONENT.fullmatch(text) else text


def _words(annotation: Any) -> tuple[Any, ...]:
    """Return the words that a value may be beside its other types: `all` or a list."""
    return tuple(word for member in members(annotation) if get_origin(member) is Literal for word in get_args(member))


def _list(text: str, node: Node) -> Any:
    stripped = text.strip()
    if stripped[:1] in ("[", "(", "{"):
        parsed = literal(stripped)
        is_pattern = stripped.count("[") == stripped.count("]") and not _BRACKETED.fullmatch(stripped)
        if isinstance(parsed, str) and (node.dotted in _SEPARATORS or (node.dotted in _PATTERNS and is_pattern)):
            return _cut(text, node)  # a test of the shell, a class of characters
        if isinstance(parsed, str):
            raise CoerceError(
                f"expected {type_text(node.annotation)}, but {masked(text)!r} is neither JSON nor Python: "
                "names and texts in it need quotes, and the whole single ones around them, for the shell"
            )
        if not isinstance(parsed, list | tuple | set | dict):  # `(0)` is 0 to Python
            raise CoerceError(f"expected {type_text(node.annotation)}, but {masked(text)!r} is none")
        return [parsed] if isinstance(parsed, dict) else list(parsed)
    if node.kind == "sections":
        raise CoerceError(f'expected a list of mappings such as \'[{{"id": "..."}}]\', got {masked(text)!r}')
    parts = _cut(text, node)
    if _is_list_of(int, node.annotation) and any(_RANGE.fullmatch(part) for part in parts):
        raise CoerceError(f"{text!r} is no list of integers: write 0,1,2,3")
    return parts


def _cut(text: str, node: Node) -> list[str]:
    parts = _SEPARATORS.get(node.dotted, _COMMA).split(text.strip())
    return [part.strip() for part in parts if part.strip()]


def _is_list_of(kind: type, annotation: Any) -> bool:
    return any(kind in get_args(member) for member in members(annotation) if get_origin(member) in (list, tuple))


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
    from pydantic import ValidationError

    adapter = _adapter(annotation)
    try:
        return adapter.dump_python(adapter.validate_python(value), mode="json")
    except ValidationError:
        return value


@cache
def _adapter(annotation: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(annotation)


def is_flag(node: Node) -> bool:
    """Return whether a bare `--key` means true."""
    return node.annotation is not Any and bool in members(node.annotation)
