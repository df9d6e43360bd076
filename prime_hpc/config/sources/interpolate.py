"""`${a.b}` in config values, through OmegaConf, on the merged tree: a flag that changes `a.b` changes them too."""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prime_hpc.config.errors import Origin, Problem, nearest_path
from prime_hpc.config.schema import all_paths, fill_defaults, resolve
from prime_hpc.config.secret import anchored, names_secret
from prime_hpc.config.sources.coerce import is_reference, typed_value
from prime_hpc.config.validate import origin_of
from prime_hpc.runtime.trees import with_leaves

Location = tuple[str | int, ...]

_WHOLE_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.\w+)*)\}")
_VARIABLE = re.compile(r"\$\{oc\.env:(\w+)")
_MAX_CHAIN = 20


def interpolate(values: dict[str, Any], provenance: dict[str, Origin], problems: list[Problem]) -> dict[str, Any]:
    """Values with every `${...}` resolved: full paths of the tree, relative ones, and OmegaConf's `oc.` resolvers.

    A reference to a key that nobody states sees its default. What cannot be resolved is added to `problems`.
    """
    references = [path for path, value in _leaves(values, ()) if is_reference(value)]
    if not references:
        return values
    tree = fill_defaults(values)
    # `${seq_len}` alone is by far the commonest form, and importing OmegaConf would double the time of a plan.
    results = {path: _follow(tree, _get(values, path)) for path in references}
    hard = [path for path, result in results.items() if result is _HARD]
    if hard:
        tree = fill_defaults(_typed(values, ()))
        results |= _through_omegaconf(tree, hard, values, provenance, problems)
    for path, result in results.items():
        parent = _get(values, path[:-1])
        if result is not _HARD:
            origin = origin_of(tuple(map(str, path)), provenance)
            folder = Path(origin.where).parent if origin is not None and origin.source == "file" else Path()
            text, parent[path[-1]] = parent[path[-1]], anchored(result, folder, str(path[-1]))
            if names_secret(str(path[-1])) and (variable := _VARIABLE.match(text)):  # it stands in no file
                provenance[".".join(map(str, path))] = Origin("environment", variable[1])
        elif isinstance(parent, dict):
            del parent[path[-1]]
    return values


def value_at(values: dict[str, Any], path: tuple[str, ...]) -> Any:
    """Return a key's value with its `${...}` resolved; None where it is not stated or cannot be resolved."""
    try:
        value = _get(values, path)
    except KeyError:
        return None
    if not is_reference(value):
        return value
    found = _follow(fill_defaults(values), value)
    if found is not _HARD:
        return found
    try:
        return _get(interpolate(copy.deepcopy(values), {}, []), path)
    except KeyError:
        return None


def settled(values: dict[str, Any], value: Any, path: tuple[str, ...]) -> Any:
    """Return what a key at `path` would come to if it were stated so: its `${...}` resolved, of the key's type."""
    if any(is_reference(leaf) for _, leaf in _leaves(value, ())):
        trial = copy.deepcopy(values)
        _get(trial, path[:-1])[path[-1]] = copy.deepcopy(value)
        try:
            value = _get(interpolate(trial, {}, []), path)
        except KeyError:  # what cannot be resolved is told elsewhere
            return value
    return _typed(value, path)


def _typed(value: Any, path: tuple[str, ...]) -> Any:
    """Return a copy with the texts of flags and variables turned into what their keys take: whoever refers to one gets
    the same, wherever it was stated."""
    node = resolve(path)
    if node is None:
        return value
    if node.kind in ("section", "sections") and isinstance(value, dict | list):
        if isinstance(value, dict):
            return {name: _typed(inner, (*node.path, name)) for name, inner in value.items()}
        return [_typed(inner, (*node.path, str(index))) for index, inner in enumerate(value)]
    if node.kind == "leaf" and isinstance(value, str | list) and not is_reference(value):
        return typed_value(value, node.annotation)
    return value


def escape(value: Any) -> Any:
    r"""Return a resolved tree in which `${` is no reference: `\${`, as every source has it."""
    return _each_text(value, lambda found: found[1] * 2 + "\\${")


def unescape(value: Any) -> Any:
    """Take back what `escape` did. References of a tree that was never escaped stay as they are."""
    return _each_text(value, lambda found: found[1][: len(found[1]) // 2] + "${" if len(found[1]) % 2 else found[0])


_OPENED = re.compile(r"(\\*)\$\{")


def _each_text(value: Any, change: Callable[[re.Match[str]], str]) -> Any:
    return with_leaves(value, lambda leaf, _: _OPENED.sub(change, leaf) if isinstance(leaf, str) else leaf)


_HARD: Any = object()
"""Not resolved."""


def _follow(tree: Any, text: str) -> Any:
    """Return the value of a whole-text reference such as `${a.b}`, or `_HARD` where it is anything else."""
    value: Any = text
    names: tuple[str, ...] = ()
    for _ in range(_MAX_CHAIN):
        if not is_reference(value):
            is_nested = any(is_reference(leaf) for _, leaf in _leaves(value, ()))
            return _HARD if is_nested else copy.deepcopy(_typed(value, names))
        reference = _WHOLE_REFERENCE.fullmatch(value)
        if reference is None:
            return _HARD
        value, names = tree, tuple(reference[1].split("."))
        for name in names:
            if not isinstance(value, dict) or name not in value:
                return _HARD
            value = value[name]
    return _HARD


def _through_omegaconf(
    tree: dict[str, Any],
    paths: list[Location],
    values: dict[str, Any],
    provenance: dict[str, Origin],
    problems: list[Problem],
) -> dict[Location, Any]:
    """Results of the references that OmegaConf can resolve; the others become problems."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def refuse(path: Location, error: Exception) -> None:
        names = tuple(map(str, path))
        problems.append(Problem(_explain(_get(values, path), error), ".".join(names), origin_of(names, provenance)))

    tree = copy.deepcopy(tree)
    sound = []
    for path in paths:
        try:
            OmegaConf.create([_get(values, path)])
            sound.append(path)
        except OmegaConfBaseException as error:  # a malformed text anywhere would keep OmegaConf from taking the tree
            refuse(path, error)
            _get(tree, path[:-1])[path[-1]] = None
    conf = OmegaConf.create(tree)
    results = {}
    for path in sound:
        try:
            value = _get(conf, path)
            results[path] = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except (OmegaConfBaseException, RecursionError) as error:
            refuse(path, error)
    return results


def _leaves(value: Any, path: Location) -> Iterator[tuple[Location, Any]]:
    if isinstance(value, dict | list):
        items: Any = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from _leaves(inner, (*path, name))
    else:
        yield path, value


def _get(container: Any, path: Location) -> Any:
    for name in path:
        container = container[name]
    return container


def _explain(text: str, error: Exception) -> str:
    reason = "it refers to itself" if isinstance(error, RecursionError) else str(error).splitlines()[0]
    hints = []
    if unset := re.search(r"Environment variable '(\w+)' not found", reason):
        reason = f"the variable {unset[1]} is not set in this shell"
        hints.append(f"; export it, or ${{oc.env:{unset[1]},DEFAULT}}")
    for name in re.findall(r"\$\{([A-Za-z_][\w.]*)\}", text):
        near = name if name in all_paths() else nearest_path(name, all_paths())
        if near and near != name and not name.isupper():
            hints.append(f"; did you mean ${{{near}}}?")
        elif name.isupper():
            hints.append(f"; ${{oc.env:{name}}} is its value in this shell")
            hints.append(f"; a line for the job's own shell has ${name} or \\${{{name}}}")
    return f"cannot resolve {text!r}: {reason}{''.join(hints)}"
