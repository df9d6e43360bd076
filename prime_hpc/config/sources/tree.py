"""The tree while the sources are laid over each other: statements placed by the schema, the last one of a key wins."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from prime_hpc.config.errors import ConfigError, Origin, Problem, nearest_path
from prime_hpc.config.experiment import ALONE, COMPONENTS, Experiment
from prime_hpc.config.renamed_keys import notice, stated_twice
from prime_hpc.config.schema import Node, all_paths, locate, resolve, type_text
from prime_hpc.config.secret import MASK, anchored, masked, names_secret
from prime_hpc.config.sections.inference import ENGINE_GPU_IDS
from prime_hpc.config.sources.coerce import (
    CoerceError,
    coerce,
    find_empty,
    is_literal_of,
    is_reference,
    mapping,
    switch,
)
from prime_hpc.config.sources.flags import ALIASES, Entry
from prime_hpc.config.sources.interpolate import interpolate, settled
from prime_hpc.config.sources.other_names import instead_of
from prime_hpc.config.validate import origin_of, validate

UNKNOWN = "unknown key"
_OF_ENGINES = "an argument of vLLM would be"


class _Claim(NamedTuple):
    """One statement of one key."""

    component: str | None
    """Through whose scope it is stated; None: the root's."""
    value: Any
    origin: Origin
    layer: tuple[int, int]
    """Of one file as it is laid once."""


class Tree:
    """The tree while the sources are laid over each other, lowest precedence first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.values: dict[str, Any] = {}
        self.provenance: dict[str, Origin] = {}
        self.problems = list(problems)
        self.warnings: list[str] = []
        self.claims: dict[str, list[_Claim]] = {}
        """Dotted path -> every statement that counts, in order."""
        self._num_layers = 0
        self.names: dict[str, dict[bool, Origin]] = {}
        """Dotted path -> where it was stated last under its old name (True), and under its own."""
        self.noticed: set[tuple[str, str, str]] = set()
        """Old name, source and its name of every warning about one."""

    def copy(self) -> "Tree":
        """Return another tree with the same statements, for one more layer; news of the base are not repeated."""
        tree = Tree(self.problems)
        tree.values = copy.deepcopy(self.values)
        tree.provenance = dict(self.provenance)
        tree.claims = {key: list(rows) for key, rows in self.claims.items()}
        tree.names = {key: dict(names) for key, names in self.names.items()}
        tree.noticed, tree._num_layers = self.noticed, self._num_layers
        return tree

    def place(self, entries: Iterable[Entry]) -> None:
        """Lay statements over what is there."""
        self._num_layers += 1
        self._place(entries)

    def _place(self, entries: Iterable[Entry]) -> None:
        for stated in entries:
            entry = _in_its_scope(stated)
            node = locate(entry.segments, entry.scope)
            if node is None:
                is_alone = entry.scope is None and self.values.get("kind") in ALONE
                self.problems += _unknown(replace(entry, scope=self.values["kind"]) if is_alone else entry)
                continue
            if not self._note_name(node, entry):
                continue
            try:
                self._state(node, entry)
            except CoerceError as error:
                self.problems.append(Problem(str(error), node.dotted, entry.origin))

    def _note_name(self, node: Node, entry: Entry) -> bool:
        """Warn of a key's old name, once a source; return False where one source states the key under both names.

        Of two sources the later one wins, whatever each calls it: a config of the user's on top of a newer recipe.
        """
        if entry.origin.source == "default":
            return True
        names, origin = self.names.setdefault(node.dotted, {}), entry.origin
        source = _source(origin)
        other = names.get(not node.is_old_name)
        if other is not None and _source(other) == source:
            pair = (origin, other) if node.is_old_name else (other, origin)
            self.problems.append(stated_twice(node.dotted, *pair))
            return False
        names[node.is_old_name] = origin
        if node.is_old_name:
            segments = [segment.replace("-", "_") for segment in entry.segments]
            old, above = ".".join(segments), ".".join(segments[:-1])
            is_said = (above, *source) in self.noticed and segments[-1] == node.path[-1]  # with its section
            if not is_said and (old, *source) not in self.noticed:
                self.warnings.append(notice(old, node.dotted, origin))
                self.noticed.add((old, *source))
        return True

    def _state(self, node: Node, entry: Entry) -> None:
        value = entry.value
        if node.kind == "section":
            self._state_section(node, entry)
            return
        if node.kind in ("free", "sections") and value is None and not node.optional:
            return  # an empty `key:` of a YAML file states nothing
        value = coerce(value, node, typed=entry.typed)
        if node.kind == "leaf" and isinstance(value, str):  # a file in a file's own folder, else in this one
            folder = Path(entry.document.name).parent if entry.document is not None else Path()
            value = anchored(value, folder, node.path[-1])
        if isinstance(value, dict) and (node.kind == "free" or (node.annotation is Any and value)):
            self._descend(node, entry, value)
        elif node.kind == "sections" and isinstance(value, list):
            self._set(node, [], entry)
            self._place(entry.child(str(index), element) for index, element in enumerate(value))
        else:
            self._set(node, value, entry)

    def _state_section(self, node: Node, entry: Entry) -> None:
        value = entry.value
        if is_reference(value) and not is_literal_of(value, node):
            self._set(node, value, entry)
            return
        if isinstance(value, str) and value.lstrip().startswith("{"):
            value = mapping(value)
        if isinstance(value, dict):
            self._descend(node, entry, value)
            return
        on = switch(value)
        if on is None:
            raise CoerceError(f"expected a section of keys, got {masked(repr(value))}")
        if on:
            self._open(node, entry)
        elif node.optional:
            self._set(node, None, entry)
        elif value is not None:  # an empty section of a YAML file is null: nothing is stated
            raise CoerceError(f"cannot be switched off: it must be {type_text(node.annotation)}")

    def _descend(self, node: Node, entry: Entry, value: dict[str, Any]) -> None:
        self._open(node, entry)
        self._place(entry.child(str(name), inner) for name, inner in value.items())

    def _open(self, node: Node, entry: Entry) -> None:
        """Make sure that a mapping is there, keeping what it has."""
        parent = self._parent(node, entry)
        if parent is None:
            return
        present = _get(parent, node.path[-1])
        if not isinstance(present, dict) and not is_reference(present):
            self._set(node, {}, entry)

    def _set(self, node: Node, value: Any, entry: Entry) -> None:
        parent = self._parent(node, entry)
        if parent is None:
            return
        if isinstance(parent, list):
            index = int(node.path[-1])
            parent[index : index + 1] = [value]
        else:
            parent[node.path[-1]] = value
        for record in (self.provenance, self.claims):
            for key in [key for key in record if key.startswith(node.dotted + ".")]:
                del record[key]
        self.provenance[node.dotted] = entry.origin
        layer = (id(entry.document), self._num_layers)
        below = self.claims.get(node.dotted, [])
        below = [claim for claim in below if claim.layer == layer] if entry.decides else below
        claim = _Claim(entry.component or node.component, value, entry.origin, layer)
        self.claims[node.dotted] = [*below, claim]

    def _parent(self, node: Node, entry: Entry) -> dict[str, Any] | list[Any] | None:
        """Return the mapping or list that holds a key; sections above it that are off are switched on."""
        here: Any = self.values
        for depth, name in enumerate(node.path[:-1], 1):
            below = _get(here, name)
            if is_reference(below):
                message = f"{'.'.join(node.path[:depth])} is {below!r} as a whole: a key below it cannot be stated"
                self.problems.append(Problem(message, node.dotted, entry.origin))
                return None
            if not isinstance(below, dict | list):
                above = resolve(node.path[:depth])
                below = [] if above is not None and above.kind == "sections" else {}
                if isinstance(here, list):
                    here.append(below)
                else:
                    here[name] = below
                    if (section := ".".join(node.path[:depth])) in self.provenance:  # it was off: no more from there
                        self.provenance[section] = entry.origin
            here = below
            if isinstance(here, list) and not (node.path[depth].isdecimal() and int(node.path[depth]) <= len(here)):
                message = f"no element {node.path[depth]!r}: the list has {len(here)}"
                self.problems.append(Problem(message, node.dotted, entry.origin))
                return None
        return here

    def experiment(self) -> Experiment:
        """Check the tree. Raises ConfigError with everything that is wrong."""
        values = interpolate(self.values, self.provenance, self.problems)
        self._find_conflicts(values)
        for node in find_empty(values):
            message = "is empty (of a variable that is not set?): state it, or leave the key out"
            self.problems.append(Problem(message, node.dotted, origin_of(node.path, self.provenance)))
        experiment = validate(values, self.provenance, self.problems)
        if experiment is None:
            raise ConfigError(self.problems)
        return experiment

    def _find_conflicts(self, values: dict[str, Any]) -> None:
        """Two components may not state different values of a key they share, unless something above decides.

        Of each component its last statement counts; the root of a file is one more where it and a component state a
        key in the same file. Whether they differ is seen once `values` are resolved: 512 is `${seq_len}`.
        """
        for dotted, claims in self.claims.items():
            component, value, origin, layer = claims[-1]
            for other, other_value, other_origin, other_layer in {claim.component: claim for claim in claims}.values():
                if other == component or other_value == value or other_origin.source != origin.source:
                    continue
                is_section = isinstance(value, dict) or isinstance(other_value, dict)
                if None in (other, component) and (origin.source != "file" or other_layer != layer or is_section):
                    continue  # what is stated later wins: a base's root and the file on it, two flags, a bare `wandb:`
                path = tuple(dotted.split("."))
                if settled(values, other_value, path) == settled(values, value, path):
                    continue
                theirs, ours = (MASK if names_secret(dotted) else repr(v) for v in (other_value, value))
                message = (
                    f"{other or 'the root'} states {theirs} ({other_origin}), {component or 'the root'} states {ours} "
                    f"({origin}): one experiment has one {dotted}; state it once"
                )
                self.problems.append(Problem(message, dotted, origin))
                break


def _get(container: Any, name: str) -> Any:
    if isinstance(container, list):
        return container[int(name)] if int(name) < len(container) else None
    return container.get(name)


def _in_its_scope(entry: Entry) -> Entry:
    """Return a section of a whole experiment as one of the root where its keys are the root's: `eval`, which `sft`
    reads as its own (`sft.eval`) in a file of its own."""
    if entry.document is None or entry.scope is None or len(entry.segments) > 1 or not isinstance(entry.value, dict):
        return entry
    if entry.scope == "orchestrator" and not {"kind", entry.scope} & entry.document.data.keys():
        return entry
    below = [(*entry.segments, str(name)) for name in entry.value]
    own, of_root = (sum(locate(key, scope) is not None for key in below) for scope in (entry.scope, None))
    return replace(entry, scope=None) if of_root > own else entry


def _unknown(entry: Entry) -> Iterator[Problem]:
    """Yield the problem of an unknown key; of a section of another suite's config, those of its keys."""
    leaves = list(_leaves(entry))
    if leaves == [entry] or not any(instead_of(leaf.segments, is_flag=False) for leaf in leaves):
        yield unknown_key(entry)
        return
    yield Problem("there is no such section; what its keys are here:", ".".join(entry.segments), entry.origin)
    yield from (problem for problem in map(unknown_key, leaves) if not _is_bare(problem))


def _is_bare(problem: Problem) -> bool:
    """Return whether all that can be said of a key is that nobody knows it."""
    return problem.message == UNKNOWN or problem.message.startswith(f"{UNKNOWN}; {_OF_ENGINES}")


def _leaves(entry: Entry) -> Iterator[Entry]:
    """Yield what is below an unknown section, a section that others have as a whole (`fsdp_config`)."""
    if not isinstance(entry.value, dict) or instead_of(entry.segments, is_flag=False) is not None:
        yield entry
        return
    for name, value in entry.value.items():
        yield from _leaves(entry.child(str(name), value))


def unknown_key(entry: Entry) -> Problem:
    """Return the problem of a key that does not exist, with the key that was probably meant."""
    typed = ".".join(entry.segments)
    wanted = tuple(segment.replace("-", "_") for segment in entry.segments)
    is_flag = entry.origin.source == "command line"
    scoped = (entry.scope, *wanted) if entry.scope else wanted
    if (instead := instead_of(wanted, is_flag=is_flag) or instead_of(scoped, is_flag=is_flag)) is not None:
        return Problem(f"there is no such key: {instead}", typed, entry.origin)
    if (home := _home(entry)) is not None:
        return Problem(f"{UNKNOWN}; did you mean {_shown(home, is_flag)}?", typed, entry.origin)
    index = next((segment for segment in wanted if segment.isdecimal()), "0")
    candidates = [path.replace(".0.", f".{index}.") for path in (*all_paths(), *ALIASES)]
    near = nearest_path(".".join(scoped), candidates) if entry.scope else None
    near = near or nearest_path(".".join(wanted), candidates)
    if near is None:
        is_engines = scoped[0] in ENGINE_GPU_IDS.values()
        below = _shown(f"{scoped[0]}.vllm.{wanted[-1]}", is_flag)
        words = f"{UNKNOWN}; {_OF_ENGINES} {below}" if is_engines else UNKNOWN
        return Problem(words, typed, entry.origin)
    near = ".".join(ALIASES[near][0]) if near in ALIASES else near
    return Problem(f"{UNKNOWN}; did you mean {_shown(near, is_flag)}?", typed, entry.origin)


def _shown(dotted: str, is_flag: bool) -> str:
    return f"--{dotted.replace('_', '-')}" if is_flag else dotted


def _home(entry: Entry) -> str | None:
    """Return a component's own key that was stated at the root; of several components' the one of which the file states
    most keys, as one that was written for it alone does."""
    if entry.scope is not None:
        return None
    stated = entry.document.data if entry.document is not None else {}
    of_root = [str(name) for name in stated if locate((str(name),)) is None]
    homes = {name: node for name in COMPONENTS if (node := locate(entry.segments, name)) is not None}
    best = max(
        homes,
        key=lambda name: (name == stated.get("kind"), sum(locate((key,), name) is not None for key in of_root)),
        default=None,
    )
    return None if best is None else homes[best].dotted


def _source(origin: Origin) -> tuple[str, str]:
    """Return the source of a statement: each file is one, the command line and the environment are one each."""
    return origin.source, origin.where if origin.source == "file" else ""
