"""`slurm.shapes`: allowed shapes of one experiment, each a few keys over it, of which at most one is in force.

The shape that `slurm.shape` names is laid over files and environment and below the command line. What was resolved with
it states the shape's name and its values, and no other shape: a run that goes on keeps the one that it began with.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from prime_hpc.config.errors import ConfigError, Origin, Problem
from prime_hpc.config.experiment import Experiment
from prime_hpc.config.schema import locate
from prime_hpc.config.secret import taken_out
from prime_hpc.config.sources.coerce import is_reference
from prime_hpc.config.sources.counts import derive_counts
from prime_hpc.config.sources.flags import Entry
from prime_hpc.config.sources.tree import Tree
from prime_hpc.config.validate import check_complete

CHOSEN, STATED = "slurm.shape", "slurm.shapes"
_NOT_OF_A_SHAPE = ("name", "output_dir", "kind", "clean", "launch", "ckpt.resume_step", CHOSEN, STATED)
"""Keys that are of the run, whatever its shape."""


@dataclass(frozen=True)
class _Shape:
    name: str
    entries: tuple[Entry, ...]


def lay_shape(tree: Tree, last: Sequence[Entry]) -> dict[str, Tree]:
    """Lay the shape in force over a tree; where none is chosen, each over a copy of it.

    Args:
        tree: all sources; changed where a shape is in force, with what is wrong about it.
        last: statements of the command line, which win over a shape's.

    Returns:
        the copies by the shapes' names, for `check_shapes`; empty where a shape is in force, or none is stated.
    """
    slurm = tree.values.get("slurm")
    stated, chosen = (slurm.get("shapes"), slurm.get("shape")) if isinstance(slurm, dict) else (None, None)
    shapes = _shapes(tree, stated) if isinstance(stated, list) else {}
    origin = tree.provenance.get(CHOSEN, Origin("default"))
    if chosen is None:
        copies = {name: tree.copy() for name in shapes} if not tree.problems else {}
        for name, copied in copies.items():
            _lay(copied, shapes[name], last)
        return copies
    if isinstance(chosen, str) and chosen in shapes:
        _lay(tree, shapes[chosen], last)
    elif shapes:
        near = get_close_matches(str(chosen), shapes, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        tree.problems.append(Problem(f"no shape {chosen!r}; {hint}there are {', '.join(shapes)}", CHOSEN, origin))
    elif origin.source != "file":  # in a run's own file it is what the run was started with
        words = "slurm.shapes states none here; a run keeps the shape that it was started with"
        tree.problems.append(Problem(f"no shape {chosen!r}: {words}", CHOSEN, origin))
    return {}


def check_shapes(trees: Mapping[str, Tree], entrypoint: str, *, is_begun: bool) -> None:
    """Check each shape like a whole experiment. `is_begun`: see `check_complete`.
    Raises ConfigError: a shape is wrong, or two are the same; names them."""
    problems: list[Problem] = []
    found: dict[str, dict[str, Any]] = {}
    for name, tree in trees.items():
        try:
            tree.problems += derive_counts(tree.values, tree.provenance)
            experiment = tree.experiment()
            check_complete(experiment, entrypoint, tree.provenance, is_begun=is_begun)
        except ConfigError as error:
            problems += [_of_shape(name, problem) for problem in error.problems]
            continue
        computed = _without_name(experiment)
        twin = next((other for other, theirs in found.items() if theirs == computed), None)
        found[name] = computed
        if twin is not None:
            words = f"shapes {twin!r} and {name!r} are the same experiment; leave one of them out"
            problems.append(Problem(words, STATED, tree.provenance.get(CHOSEN)))
    if problems:
        raise ConfigError(problems)


def _without_name(experiment: Experiment) -> dict[str, Any]:
    tree = experiment.model_dump(mode="json")
    del tree["slurm"]["shape"]
    return tree


def _shapes(tree: Tree, stated: list[Any]) -> dict[str, _Shape]:
    """Return the shapes by name; those that are no mappings are refused with the whole tree."""
    found: dict[str, _Shape] = {}
    for index, shape in enumerate(stated):
        if not isinstance(shape, dict) or not isinstance(shape.get("name"), str):
            continue
        name, overrides, at = shape["name"], shape.get("overrides") or {}, f"{STATED}.{index}"
        origin = tree.provenance.get(f"{at}.name", tree.provenance.get(STATED, Origin("default")))
        if name in found:
            tree.problems.append(Problem(f"two shapes are named {name!r}", f"{at}.name", origin))
        if is_reference(overrides):
            words = f"shape {name!r}: its keys are stated, not referred to as a whole"
            tree.problems.append(Problem(words, f"{at}.overrides", origin))
        if not isinstance(overrides, dict):
            continue
        entries = []
        for segments, stated_at, value in _leaves(overrides, (), f"{at}.overrides"):
            entry = Entry(segments, value, tree.provenance.get(stated_at, origin), literal=True, decides=True)
            problem = _refusal(entry)
            if problem is None:
                entries.append(entry)
            else:
                tree.problems.append(_of_shape(name, problem))
        found[name] = _Shape(name, tuple(entries))
    return found


def _leaves(mapping: Mapping[str, Any], above: tuple[str, ...], at: str) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """(key's segments, place in the tree, value) of a mapping of dotted or nested keys."""
    for name, value in mapping.items():
        segments, here = (*above, *str(name).split(".")), f"{at}.{name}"
        node = locate(segments)
        if isinstance(value, dict) and node is not None and node.kind == "section":
            yield from _leaves(value, segments, here)
        else:
            yield segments, here, value


def _refusal(entry: Entry) -> Problem | None:
    """Return why a shape cannot state a key; None: it can, or there is no such key."""
    node = locate(entry.segments)
    key = node.dotted if node is not None else ""
    if key in _NOT_OF_A_SHAPE:
        return Problem("is the run's, whatever its shape: state it outside of the shapes", key, entry.origin)
    if node is not None and taken_out({node.path[-1]: entry.value})[1]:
        return Problem("a secret cannot be a shape's: state it outside of the shapes", key, entry.origin)
    return None


def _lay(tree: Tree, shape: _Shape, last: Sequence[Entry]) -> None:
    known = len(tree.problems)
    tree.place(shape.entries)
    tree.problems[known:] = [_of_shape(shape.name, problem) for problem in tree.problems[known:]]
    tree.place(last)
    for key in [key for key in tree.provenance if key == STATED or key.startswith(f"{STATED}.")]:
        tree.provenance.setdefault(CHOSEN, tree.provenance[key])
        del tree.provenance[key]
    tree.values["slurm"]["shapes"] = []
    tree.values["slurm"]["shape"] = shape.name


def _of_shape(name: str, problem: Problem) -> Problem:
    prefix = f"shape {name!r}: "
    return problem if problem.message.startswith(prefix) else replace(problem, message=f"{prefix}{problem.message}")
