"""Data sets of the hub that an environment's source names: the first argument of its calls of `load_dataset`.

Read as a syntax tree. A name that is handed on (`load_dataset(dataset_name)`, `load_dataset(self.config.dataset)`) is
the argument that the experiment gives, else the default that the source states for it.
"""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MAX_BYTES = 2**20
"""A larger file is data, not an environment."""


@dataclass(frozen=True)
class NamedDataset:
    """One call's arguments; None: not stated, or only known when it runs."""

    name: str
    subset: str | None
    split: str | None


def datasets_named_in(sources: Iterable[Path], arguments: Mapping[str, Any]) -> list[NamedDataset]:
    """Return the data sets that these files load from the hub, each once.

    Args:
        sources: Python files; those that cannot be read are left out.
        arguments: of the environment, over the defaults of its source.
    """
    found: dict[NamedDataset, None] = {}
    for path in sources:
        try:
            if path.stat().st_size > _MAX_BYTES:
                continue
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        known = _defaults(tree) | {name: value for name, value in arguments.items() if isinstance(value, str)}
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            if (named := _loaded(call, known)) is not None:
                found[named] = None
    return list(found)


def _defaults(tree: ast.Module) -> dict[str, str]:
    """Name -> text, of constants, of fields of classes and of parameters."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            pairs = [(target.id, node.value) for target in targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args.posonlyargs + node.args.args
            last = given[len(given) - len(node.args.defaults) :]
            pairs = [(arg.arg, value) for arg, value in zip(last, node.args.defaults, strict=True)]
            pairs += [(arg.arg, value) for arg, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
        else:
            continue
        for name, value in pairs:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.setdefault(name, value.value)
    return found


def _loaded(call: ast.Call, known: Mapping[str, str]) -> NamedDataset | None:
    """Return the hub's data set that a call loads; None where it loads none, or files."""
    function = call.func
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if called != "load_dataset":
        return None
    keywords = {word.arg: word.value for word in call.keywords if word.arg}
    if "data_files" in keywords or "data_dir" in keywords:
        return None
    first = call.args[0] if call.args else keywords.get("path")
    second = call.args[1] if len(call.args) > 1 else keywords.get("name")
    name = _text(first, known)
    if name is None or name.count("/") != 1 or name.startswith((".", "/", "~")):
        return None
    return NamedDataset(name, _text(second, known), _text(keywords.get("split"), known))


def _text(value: ast.expr | None, known: Mapping[str, str]) -> str | None:
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    if isinstance(value, ast.Name):
        return known.get(value.id)
    return known.get(value.attr) if isinstance(value, ast.Attribute) else None
