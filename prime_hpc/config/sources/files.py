"""Config files as plain mappings with the line of every key: YAML, TOML, and `base:` to build on another file.

`sources` reads them; `snapshot` writes YAML with the same scalar rules, so that what is written reads back equal.
Nothing here knows the schema.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_hpc.config.errors import ConfigError, Origin, Problem, missing_file_message

if TYPE_CHECKING:
    import yaml

BASE_KEY = "base"
"""Names the file(s), relative to this one, that a file builds on."""
SUFFIXES = (".yaml", ".yml", ".json", ".toml")
"""Names of files that can be read (JSON is YAML)."""

Path_ = tuple[str, ...]

# YAML 1.1 reads `1e-6` as text and `2024-01-01` as a date; OmegaConf, and everybody's expectation, does neither.
_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
        |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
    re.X,
)
# YAML 1.1 reads `12:00:00` as 43200 (base 60) and `010` as 8: the first is a time limit of Slurm, the second a trap.
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$")
_BREAKS = re.compile("[\x85\u2028\u2029]")
_DROPPED_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")


@dataclass(frozen=True)
class Document:
    """One config file as it was read."""

    name: str
    """The file's name as it was asked for."""
    data: dict[str, Any]
    """Its content, `base` taken out."""
    lines: dict[Path_, int]
    """Line of each key, by its path in the file; list items have their index as a name."""

    def origin(self, path: Path_) -> Origin:
        """Find where the key at `path` was stated: its own line, else that of the nearest key above it."""
        while path and path not in self.lines:
            path = path[:-1]
        return Origin("file", self.name, self.lines.get(path))


def read_documents(path: Path) -> list[Document]:
    """Read a config file and those it builds on, bases first (a later one wins).

    Raises ConfigError for a missing file, a syntax error (with its line), a duplicate key, a circle of bases.
    """
    return _read(path, ())


def _read(path: Path, ancestors: tuple[Path, ...], asked_by: Origin | None = None) -> list[Document]:
    if not path.is_file():
        raise ConfigError(Problem(f"{path}: {missing_file_message(path)}", origin=asked_by))
    if path.resolve() in ancestors:
        chain = " -> ".join(p.name for p in (*ancestors, path))
        raise ConfigError(Problem(f"files build on each other in a circle: {chain}", BASE_KEY, asked_by))
    document = _parse(path)
    documents: list[Document] = []
    bases = document.data.pop(BASE_KEY, None)
    origin = document.origin((BASE_KEY,))
    if bases is not None:
        names = [bases] if isinstance(bases, str) else bases
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ConfigError(Problem("expected a file name or a list of file names", BASE_KEY, origin))
        for name in names:
            base = Path(name).expanduser()
            base = base if base.is_absolute() else path.parent / base
            *below, named = _read(base, (*ancestors, path.resolve()), origin)
            known = {Path(other.name).resolve() for other in documents}
            # a base of two files lies below both, once; a file that the list itself names keeps its place
            documents += [*(other for other in below if Path(other.name).resolve() not in known), named]
    return [*documents, document]


def _parse(path: Path) -> Document:
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{path}: not a config file: its name must end in one of {', '.join(SUFFIXES)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    parse = {".toml": parse_toml, ".json": parse_json}.get(path.suffix, parse_yaml)
    data, lines = parse(text, str(path))
    return Document(str(path), data, lines)


def parse_json(text: str, name: str) -> tuple[dict[str, Any], dict[Path_, int]]:
    """Parse JSON text into (mapping, line of each key); YAML reads nearly all of it, and knows the lines."""
    try:
        return parse_yaml(text, name)
    except ConfigError:  # tabs, escapes of characters beyond 16 bits, keys of more than 1024 characters
        try:
            data = json.loads(text, object_pairs_hook=_without_doubles)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise
        return data, {}


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is stated twice")
    return dict(pairs)


def parse_yaml(text: str, name: str) -> tuple[dict[str, Any], dict[Path_, int]]:
    """Parse YAML text into (mapping, line of each key). Raises ConfigError with the line."""
    import yaml

    loader = _yaml_loader()(text)
    try:
        node = loader.get_single_node()
        lines: dict[Path_, int] = {}
        if node is None:
            return {}, {}
        _yaml_lines(node, (), lines, name, ())
        data = loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(explain_yaml(error, name, text)) from error
    except RecursionError as error:
        raise ConfigError(Problem("YAML: nested too deeply", origin=Origin("file", name))) from error
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(Problem("expected `key: value` lines at the top of the file", origin=Origin("file", name, 1)))
    return data, lines


def explain_yaml(error: "yaml.YAMLError", name: str, text: str = "") -> Problem:
    """Return what YAML found wrong with a file in one line, with the place, which it says in several.
    `text`: of the file, where it is at hand."""
    import yaml

    if not isinstance(error, yaml.MarkedYAMLError):
        return Problem(f"YAML syntax: {' '.join(str(error).split())}", origin=Origin("file", name))
    mark = error.problem_mark or error.context_mark
    message = f"YAML syntax: {error.problem or error.context}"
    if error.context == "expected a single document in the stream":
        message = "a second document begins (`---`): one file is one experiment"
    if mark and text[mark.index : mark.index + 1] == "\t":
        message = "a tab, where YAML is indented with spaces"
    return Problem(message, origin=Origin("file", name, mark.line + 1 if mark else None))


def _yaml_lines(node: Any, path: Path_, lines: dict[Path_, int], name: str, above: tuple[int, ...]) -> None:
    """Note the line of every key below a YAML node; refuse duplicate keys and nodes that contain themselves."""
    if id(node) in above:
        origin = Origin("file", name, lines.get(path))
        raise ConfigError(Problem("YAML: an alias inside its own anchor", ".".join(path), origin))
    above = (*above, id(node))
    if node.id == "sequence":
        for index, item in enumerate(node.value):
            lines[(*path, str(index))] = item.start_mark.line + 1
            _yaml_lines(item, (*path, str(index)), lines, name, above)
    elif node.id == "mapping":
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.id != "scalar":  # `{{name}}` without quotes, or `? [a, b]`
                message = "YAML: a key must be text, not a list or a mapping; text that begins with { or [ needs quotes"
                raise ConfigError(Problem(message, ".".join(path), Origin("file", name, line)))
            key_path = (*path, str(key.value))
            if key.value in seen:
                message = f"stated twice in one mapping, first on line {seen[key.value]}"
                raise ConfigError(Problem(message, ".".join(key_path), Origin("file", name, line)))
            if key.tag != "tag:yaml.org,2002:merge":
                seen[key.value] = line
            lines[key_path] = line
            _yaml_lines(value, key_path, lines, name, above)


_loader: Any = None


def _yaml_loader() -> Any:
    """PyYAML's safe loader (the C one where it is built in) with the scalar rules above and text keys."""
    global _loader
    if _loader is None:
        import yaml

        base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

        class Loader(base):
            """Safe loader with YAML 1.2 numbers."""

            def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
                """Return a mapping whose keys are the text that was written (`on`, `1`), never a bool or a number."""
                if node.id != "mapping":  # `!!map [a]`
                    raise yaml.constructor.ConstructorError(None, None, "expected a mapping", node.start_mark)
                self.flatten_mapping(node)
                return {str(key.value): self.construct_object(value, deep=True) for key, value in node.value}

            def construct_object(self, node: Any, deep: bool = False) -> Any:
                """Return a node's value; one that its tag or its form promises and that it has not is an error."""
                try:
                    return super().construct_object(node, deep=deep)
                except (ValueError, TypeError, LookupError, AttributeError) as error:  # `0x_`, `!!float x`, `!!bool x`
                    message = f"{node.value!r:.80} is no value of its kind"
                    raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from error

        _loader = _with_resolvers(Loader)
    return _loader


def _with_resolvers(cls: Any, dropped: tuple[str, ...] = _DROPPED_TAGS) -> Any:
    """Give a YAML loader or dumper class our scalar rules in place of those that are dropped."""
    cls.yaml_implicit_resolvers = {
        first: [(tag, regexp) for tag, regexp in resolvers if tag not in dropped]
        for first, resolvers in cls.yaml_implicit_resolvers.items()
    }
    cls.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    cls.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    return cls


def dump_yaml(data: dict[str, Any]) -> str:
    """YAML text that `parse_yaml` reads back as `data`."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Safe dumper with the loader's scalar rules."""

    def text(dumper: Any, value: str) -> Any:
        style = '"' if _BREAKS.search(value) else None  # within other quotes they are read back as spaces
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    # text that a YAML 1.1 reader would take for a number of base 60 is still quoted, for whoever reads it
    resolved = _with_resolvers(Dumper, _DROPPED_TAGS[1:])
    return yaml.dump(data, Dumper=resolved, sort_keys=False, allow_unicode=True, width=120)


def parse_toml(text: str, name: str) -> tuple[dict[str, Any], dict[Path_, int]]:
    """Parse TOML text into (mapping, line of each key). Raises ConfigError with the line."""
    import tomlkit
    from tomlkit.exceptions import ParseError, TOMLKitError

    try:
        data = tomlkit.parse(text).unwrap()
    except ParseError as error:
        message = f"TOML syntax: {str(error).rsplit(' at line', 1)[0]}"
        raise ConfigError(Problem(message, origin=Origin("file", name, error.line))) from error
    except TOMLKitError as error:
        raise ConfigError(Problem(f"TOML: {error}", origin=Origin("file", name, _toml_line_of(text, error)))) from error
    return data, toml_lines(text)


def _toml_line_of(text: str, error: Exception) -> int | None:
    """Line of the second statement of the key that tomlkit names as a duplicate, where it can be found."""
    quoted = re.search(r'"([^"]+)"', str(error))
    if quoted is None:
        return None
    hits = [n for n, line in enumerate(text.splitlines(), 1) if re.match(rf"\s*\[*\s*{re.escape(quoted[1])}\b", line)]
    return hits[-1] if hits else None


_TOML_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
_TOML_DOTTED = rf"{_TOML_KEY}(?:\s*\.\s*{_TOML_KEY})*"
_TOML_TABLE = re.compile(rf"^\s*(\[\[?)\s*({_TOML_DOTTED})\s*\]\]?")
_TOML_ASSIGN = re.compile(rf"^\s*({_TOML_DOTTED})\s*=(.*)$")


def toml_lines(text: str) -> dict[Path_, int]:
    """Line of each table and key of a valid TOML text, by a light scan (keys of inline tables have no line)."""
    lines: dict[Path_, int] = {}
    table: Path_ = ()
    counts: dict[Path_, int] = {}
    fence: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if fence:
            fence = None if line.count(fence) % 2 else fence
            continue
        if header := _TOML_TABLE.match(line):
            table = _toml_table(_toml_segments(header[2]), header[1] == "[[", counts)
            lines[table] = number
        elif assign := _TOML_ASSIGN.match(line):
            path = (*table, *_toml_segments(assign[1]))
            for depth in range(len(table) + 1, len(path) + 1):
                lines.setdefault(path[:depth], number)
            fence = next((mark for mark in ('"""', "'''") if assign[2].count(mark) % 2), None)
    return lines


def _toml_segments(dotted: str) -> Path_:
    return tuple(part.strip("\"'") for part in re.findall(_TOML_KEY, dotted))


def _toml_table(segments: Path_, is_array: bool, counts: dict[Path_, int]) -> Path_:
    """Path of a table header, with the index of each array of tables that it passes through."""
    path: Path_ = ()
    for depth, segment in enumerate(segments, 1):
        path = (*path, segment)
        if is_array and depth == len(segments):
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, str(counts[path]))
    return path
