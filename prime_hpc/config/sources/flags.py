"""The command line's flags as entries and files. Knows the forms a flag can have; `sources` decides what wins.

Forms: `--a.b-c v`, `--a.b_c v`, `--a.b=v`, `--no-a.b`, a bare `--section` (switches it on) or `--flag` (true),
`--a "{'b': 1}"`, `--a 0,1,2`, `@ file`, `@file`, `--section @ file [@ file ...]`.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prime_hpc.config.errors import Origin, Problem
from prime_hpc.config.experiment import COMPONENTS
from prime_hpc.config.schema import Node, locate, spelled
from prime_hpc.config.sources.coerce import FALSE, NULL, TRUE, is_flag
from prime_hpc.config.sources.files import SUFFIXES, Document

Segments = tuple[str, ...]

ALIASES: dict[str, tuple[Segments, ...]] = {
    "exp_id": (("name",),),
    "trainer_gpus": (("trainer", "num_ranks"),),
    "inference_gpus": (("inference", "data_parallel_size"),),
    "teacher_gpus": (("teacher_inference", "data_parallel_size"),),
    "judge_gpus": (("judge_inference", "data_parallel_size"),),
    "dp": (("inference", "data_parallel_size"),),
    "tp": (("inference", "tensor_parallel_size"),),
    "pp": (("inference", "pipeline_parallel_size"),),
    "pp.world_size": (("inference", "pipeline_parallel_size"),),
    "model.cp": (("trainer", "parallel", "cp"),),
    "benchmarks": (("eval", "environment_ids"),),
    "model_name": (("model", "name"),),
    "monitor.wandb.id": (("wandb", "trainer_id"),),
    "monitor.wandb.project": (("wandb", "project"),),
    "monitor.wandb.name": (("wandb", "name"),),
    "orchestrator.monitor.wandb.id": (("wandb", "orchestrator_id"),),
    "orchestrator.wandb.log_extras.interval": (("wandb", "samples_interval"),),
    "orchestrator.wandb.log_extras.samples": (("wandb", "samples"),),
    "orchestrator.wandb.log_extras.distributions": (("wandb", "distributions"),),
    "trainer.model.cp": (("trainer", "parallel", "cp"),),
}
"""Flags with another name, as at the root -> the keys that they set."""

_OFF_ALREADY = ("trainer.wandb.log_extras.samples", "trainer.wandb.log_extras.distributions")
"""Flags whose negation asks for what is so anyway."""

BARE = {"trainer.parallel.cp": "2"}
"""Keys that are no switches, and what they mean when they stand alone on the command line."""

RL_ALIASES: dict[str, tuple[Segments, ...]] = {"bench": (("trainer", "bench"), ("orchestrator", "bench"))}
"""Likewise, where the whole tree is the scope."""

SCOPES: dict[str, str | None] = {name: name for name in COMPONENTS}
"""Entrypoint -> the component in whose scope its keys are looked up; all others: the root."""


@dataclass(frozen=True)
class Entry:
    """One statement of one source, before it is known what it means."""

    segments: Segments
    """The key as it was typed."""
    value: Any
    origin: Origin
    scope: str | None = None
    """The component in whose scope the key is looked up."""
    component: str | None = None
    """The component whose file states it; two components that disagree are an error."""
    document: Document | None = None
    """The file that states it; its values have types, those of flags and variables are text."""
    path: Segments = ()
    """The key's path in that file."""
    literal: bool = False
    """Part of a JSON or Python literal in a flag or variable: it has types, as a file has."""
    decides: bool = False
    """Laid over all files on purpose (a shape's, a sweep's): what they say of the key counts no more."""

    @property
    def typed(self) -> bool:
        """True if the source has types."""
        return self.literal or self.document is not None

    def child(self, name: str, value: Any) -> "Entry":
        """Return the statement of one key of this statement's mapping, or of one item of its list."""
        origin, path = self.origin, (*self.path, name)
        if self.document is not None:
            origin = self.document.origin(path)
        return replace(self, segments=(*self.segments, name), value=value, origin=origin, path=path, literal=True)


@dataclass(frozen=True)
class FileRef:
    """A file that the command line names."""

    path: Path
    prefix: Segments = ()
    """Section into which it is loaded; empty: the entrypoint's scope."""
    scope: str | None = None
    component: str | None = None


@dataclass
class Parsed:
    """A command line, parsed."""

    files: list[FileRef] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    switched_on: list[Entry] = field(default_factory=list)
    """Sections named with a file (`--inference @ f`): on, with the precedence of files."""
    problems: list[Problem] = field(default_factory=list)


def parse_flags(argv: list[str], scope: str | None, *, positional_files: bool = False) -> Parsed:
    """Read a command line (without the program's name) in a scope.

    Args:
        scope: component in whose scope keys are looked up, None for the root.
        positional_files: whether a bare argument names a config file (`submit exp.yaml`).
    """
    parser = _Parser(argv, scope, positional_files)
    while parser.position < len(argv):
        parser.step()
    return parser.parsed


class _Parser:
    def __init__(self, argv: list[str], scope: str | None, positional_files: bool) -> None:
        self.argv = argv
        self.scope = scope
        self.positional_files = positional_files
        self.position = 0
        self.parsed = Parsed()
        self.target = FileRef(Path(), (), scope)
        """Where the next `@ file` is loaded: the section of the flag before it, if any."""

    def step(self) -> None:
        """Read one flag with its value, or one file."""
        token = self.argv[self.position]
        if token.startswith("@"):
            self._file()
            return
        self.target = FileRef(Path(), (), self.scope)
        if token.startswith("--") and len(token) > 2:
            self._flag()
            return
        self.position += 1
        is_file = Path(token).suffix in SUFFIXES
        if self.positional_files and not token.startswith("-") and (is_file or "=" not in token):
            self.parsed.files.append(FileRef(Path(token).expanduser(), (), self.scope))
            return
        hint = f"to load a config file write `@ {token}`" if is_file else "flags are `--key value` or `--key=value`"
        before = self.argv[self.position - 2] if self.position > 1 else ""
        if (
            not is_file
            and before.startswith("--")
            and locate((*self._segments(before[2:]), "name"), self.scope) is not None
        ):
            hint = f"{before} is a section of keys; did you mean `{before}.name {token}`?"  # `--model M`, as vLLM's
        self._problem(f"unexpected argument {token!r}: {hint}", token)

    def _file(self) -> None:
        token = self.argv[self.position]
        self.position += 1
        name = token[1:]
        if not name:
            if self.position == len(self.argv) or self.argv[self.position].startswith("--"):
                self._problem("`@` must be followed by a file name", "@")
                return
            name = self.argv[self.position]
            self.position += 1
        target = self.target
        self.parsed.files.append(FileRef(Path(name).expanduser(), target.prefix, target.scope, target.component))

    def _flag(self) -> None:
        name, equals, inline = self.argv[self.position][2:].partition("=")
        self.position += 1
        origin = Origin("command line", f"--{name}")
        targets, negated = self._targets(name)
        if negated and not equals and ".".join(targets[0]) in _OFF_ALREADY:
            return
        node = locate(targets[0], self.scope)
        value: Any
        if negated:
            value = _MISSING if equals else self._negation(node, origin)
            if equals:
                self._problem("takes no value", f"--{name}")
        elif equals:
            value = inline
        elif node is not None and node.kind == "section" and self._at_file():
            self._aim(node, targets[0], origin)
            return
        else:
            value = self._take_value(node)
            if value is _MISSING:
                self._problem(f"needs a value (`--{name}=VALUE` where the value begins with @ or --)", f"--{name}")
        if value is not _MISSING:
            self.parsed.entries += [Entry(target, value, origin, self.scope) for target in targets]

    def _targets(self, name: str) -> tuple[tuple[Segments, ...], bool]:
        """Return the keys that a flag sets, and whether it negates them."""
        snake = name.replace("-", "_")
        segments = self._segments(name)
        if locate(segments, self.scope) is not None:
            return (segments,), False
        if (alias := self._alias(snake)) is not None:
            return alias, False
        if snake.startswith("no_"):
            return self._alias(snake[3:]) or (self._segments(name[3:]),), True
        return (segments,), False

    def _alias(self, snake: str) -> tuple[Segments, ...] | None:
        """Return the keys that a flag sets under another name: its component's own first."""
        aliases = ALIASES | (RL_ALIASES if self.scope is None else {})
        return aliases.get(f"{self.scope}.{snake}") or aliases.get(snake)

    def _segments(self, name: str) -> Segments:
        return spelled(tuple(name.split(".")), self.scope, lambda segment: segment.replace("-", "_"))

    def _negation(self, node: Node | None, origin: Origin) -> Any:
        if node is None:
            return None  # an unknown key: reported, with a suggestion, when the entry is placed
        if is_flag(node):
            return "false"
        if node.optional:
            return None
        message = "cannot be switched off: it is neither a switch nor optional"
        self.parsed.problems.append(Problem(message, node.dotted, origin))
        return _MISSING

    def _at_file(self) -> bool:
        return self.position < len(self.argv) and self.argv[self.position].startswith("@")

    def _aim(self, node: Node, segments: Segments, origin: Origin) -> None:
        """Load the `@ file`s that follow into this section."""
        if len(node.path) == 1 and node.path[0] in COMPONENTS:
            self.target = FileRef(Path(), (), node.path[0], node.path[0])
        else:
            self.target = FileRef(Path(), segments, self.scope)
        self.parsed.switched_on.append(Entry(segments, True, origin, self.scope))

    def _take_value(self, node: Node | None) -> Any:
        """Consume the argument after a flag if it is the flag's value; a bare switch or section is true."""
        upcoming = self.argv[self.position] if self.position < len(self.argv) else "--"
        if node is not None and node.dotted in BARE and not upcoming.isdigit():
            return BARE[node.dotted]
        if not upcoming.startswith(("--", "@")) and (node is None or _takes(node, upcoming)):
            self.position += 1
            return upcoming
        can_be_bare = node is None or node.kind == "section" or node.annotation is Any or is_flag(node)
        return "true" if can_be_bare else _MISSING

    def _problem(self, message: str, where: str) -> None:
        self.parsed.problems.append(Problem(message, origin=Origin("command line", where)))


class _Missing:
    """No value: the flag was wrong, and the problem is noted."""


_MISSING = _Missing()


def _takes(node: Node, text: str) -> bool:
    """Return whether a key takes the next argument as its value, or is bare before it."""
    words = TRUE | FALSE | NULL
    if node.kind == "section":
        return text.lstrip().startswith("{") or text.lower() in words
    return not is_flag(node) or text.lower() in words
