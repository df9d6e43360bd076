"""Help text of an entrypoint, straight from the source of the schema: flag, type, default, docstring.

It reads the section modules as syntax trees instead of importing them: a help page then costs none of pydantic's
start-up (0.15 s), and fields need no second copy of their docstrings. A test holds its list of flags against the
pydantic models.
"""

import ast
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from prime_hpc.config.named_code import NAMES

ROOT = "Experiment"
_HERE = Path(__file__).parent
_MODULES = ("sections/*.py", "experiment.py")
_FLAG_WIDTH = 46
_TYPE_NAMES = {"str": "TEXT", "int": "INT", "float": "NUMBER", "bool": "", "Path": "PATH", "Any": "VALUE"}
_TYPE_NAMES |= {"Secret": "TEXT", "Arguments": "{...}", "Variables": "{...}"}
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}

OWN_SECTIONS = {
    "trainer": ("trainer",),
    "orchestrator": ("orchestrator",),
    "inference": ("inference",),
    "sft": ("sft", "trainer"),
    "eval": ("eval",),
    "synthesize": ("synthesize",),
}
"""Entrypoint -> sections whose keys need no prefix there."""

COMPONENT_KEYS = ("trainer", "orchestrator", "inference", "sft", "eval", "synthesize")


@dataclass(frozen=True)
class FieldDoc:
    """One key of a section as its source states it."""

    name: str
    annotation: str
    default: str | None
    """Source text of the default; None: required."""
    bounds: str
    """`>= 1, <= 5` where the field has bounds."""
    doc: str


@dataclass(frozen=True)
class SectionDoc:
    """One section class."""

    doc: str
    fields: tuple[FieldDoc, ...]


@cache
def read_sections() -> tuple[dict[str, SectionDoc], dict[str, str]]:
    """Every section class of the schema by name, and the type aliases (`Dtype`) by name."""
    sections: dict[str, SectionDoc] = {}
    aliases: dict[str, str] = {}
    for pattern in _MODULES:
        for path in sorted(_HERE.glob(pattern)):
            own: dict[str, str] = {}
            for statement in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(statement, ast.ClassDef):
                    fields = _class_fields(statement, own)
                    for base in statement.bases:  # a section that builds on another one of its module
                        if inherited := sections.get(ast.unparse(base)):
                            names = {field.name for field in fields}
                            fields = [f for f in inherited.fields if f.name not in names] + fields
                    sections[statement.name] = SectionDoc(ast.get_docstring(statement) or "", tuple(fields))
                elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                    own[statement.targets[0].id] = ast.unparse(statement.value)
            aliases |= own
    return sections, aliases


def _class_fields(node: ast.ClassDef, numbers: Mapping[str, str]) -> list[FieldDoc]:
    """Return the fields of a section; `numbers`: what stands above it in its module, by name."""
    fields = []
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if statement.target.id.startswith("_"):
            continue  # no key
        default, bounds = _default(statement.value, numbers)
        doc = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            doc = " ".join(str(following.value.value).split())
        fields.append(FieldDoc(statement.target.id, ast.unparse(statement.annotation), default, bounds, doc))
    return fields


def _default(value: ast.expr | None, numbers: Mapping[str, str]) -> tuple[str | None, str]:
    if value is None:
        return None, ""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "Field"):
        return ast.unparse(value), ""
    stated = [(k.arg, ast.unparse(k.value)) for k in value.keywords if k.arg in _BOUNDS]
    bounds = [f"{_BOUNDS[name or '']} {numbers.get(text, text)}" for name, text in stated]
    default = value.args[0] if value.args else next((k.value for k in value.keywords if k.arg == "default"), None)
    is_required = default is None or ast.unparse(default) in ("...", "Ellipsis")
    return None if is_required or default is None else ast.unparse(default), ", ".join(bounds)


def walk(section: str = ROOT, prefix: str = "") -> Iterator[tuple[str, FieldDoc, list[str]]]:
    """Every key below a section as (dotted path, field, names of the section classes that it holds)."""
    sections, _ = read_sections()
    for item in sections[section].fields:
        path = f"{prefix}{item.name}"
        inner = section_names(item)
        yield path, item, inner
        index = ".0" if "list[" in item.annotation else ""
        for name in inner:
            yield from walk(name, f"{path}{index}.")


def _names(annotation: str) -> list[str]:
    return [node.id for node in ast.walk(ast.parse(annotation, mode="eval")) if isinstance(node, ast.Name)]


def value_form(annotation: str) -> str:
    """Return the form of a key's value, as help pages show it: `INT|auto`; empty for a switch."""
    parts = []
    for part in annotation.split(" | "):
        if names := choices(part):
            parts += [*names, "TEXT"] if part in NAMES else names
        elif part.startswith(("list[", "tuple[")):
            parts.append("A,B,...")
        elif part.startswith("dict["):
            parts.append("{...}")
        elif part != "None":
            parts.append(_TYPE_NAMES.get(part, part))
    return "|".join(dict.fromkeys(parts))


def choices(annotation: str) -> list[str]:
    """Return the values of a Literal, also behind an alias, and the names of a table that a key takes."""
    aliases, found = read_sections()[1], []
    for part in annotation.split(" | "):
        literal = aliases.get(part, part)
        if part in NAMES:
            found += list(NAMES[part])
        elif literal.startswith("Literal["):
            found += [str(value) for value in ast.literal_eval(f"[{literal[8:-1]}]")]
    return found


def field_notes(item: FieldDoc) -> list[str]:
    """Return a key's bounds, and its default where it has one that says something."""
    notes = [item.bounds] if item.bounds else []
    if item.default is None:
        notes.append("required")
    elif not section_names(item) and item.default not in ("None", "{}", "[]", "False"):
        path = re.fullmatch(r"Path\((.*)\)", item.default)
        notes.append("default " + re.sub(r"^(['\"])(.*)\1$", r"\2", path[1] if path else item.default))
    return notes


def _entry(flag: str, item: FieldDoc, inner: list[str], width: int) -> str:
    shown = flag.replace("_", "-").replace(".0", ".N")
    is_list = "list[" in item.annotation
    metavar = "" if inner and not is_list else "[{...},...]" if inner else value_form(item.annotation)
    left = f"  --{shown} {metavar}".rstrip()
    notes = field_notes(item)
    text = item.doc + (f" [{'; '.join(notes)}]" if notes else "")
    indent = " " * (_FLAG_WIDTH + 2)
    body = textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if len(left) < _FLAG_WIDTH + 1:
        return left + body[len(left) :]
    return left + "\n" + body


def _group(title: str, fields: list[FieldDoc], prefix: str, width: int) -> list[str]:
    """Lines of some keys under a title, then a group for each section that they hold."""
    sections, _ = read_sections()
    lines: list[str] = []
    below: list[str] = []
    for item in fields:
        flag = f"{prefix}{item.name}"
        inner = section_names(item)
        is_list, is_optional = "list[" in item.annotation, item.annotation.endswith("| None")
        if not inner or is_list or is_optional:
            lines.append(_entry(flag, item, inner, width))
        for name in inner:
            shown = flag.replace("_", "-").replace(".0", ".N") + (".N" if is_list else "")
            heading = f"{shown}: {_gist(sections[name])}{' (off until named)' if is_optional else ''}"
            below += _group(heading, list(sections[name].fields), f"{flag}{'.0' if is_list else ''}.", width)
    return (["", textwrap.fill(title, width), *lines] if lines else []) + below


def section_names(item: FieldDoc) -> list[str]:
    """Names of the section classes that a key holds."""
    return [name for name in _names(item.annotation) if name in read_sections()[0]]


def _gist(section: SectionDoc) -> str:
    """Return the first paragraph of a section's docstring, on one line."""
    return " ".join(section.doc.partition("\n\n")[0].split())


def page_width() -> int:
    """Return the width of a help page: the terminal's, within bounds."""
    return max(80, min(shutil.get_terminal_size((120, 24)).columns, 130))


def flag_row(spelling: str, text: str) -> str:
    """Return a flag and its help, wrapped beside it."""
    first = f"  {spelling:<30}"
    return textwrap.fill(first + text, page_width(), subsequent_indent=" " * 32, break_on_hyphens=False)


def help_text(entrypoint: str, usage: str, summary: str, extra: str = "") -> str:
    """Return the whole help page of an entrypoint. `entrypoint`: its name (decides which keys need no prefix)."""
    width = page_width()
    sections, _ = read_sections()
    root = {item.name: item for item in sections[ROOT].fields}
    lines = [f"usage: {usage}", "", textwrap.fill(summary, width), "", FORMS.rstrip()]
    lines += ["", extra.rstrip()] if extra else []
    own = OWN_SECTIONS.get(entrypoint, ())
    for name in own:
        section = sections[section_names(root[name])[0]]
        lines += _group(f"{name}: {_gist(section)}", list(section.fields), "", width)
    shown = [item for name, item in root.items() if not own or name not in COMPONENT_KEYS]
    lines += _group("experiment: shared by all roles", shown, "", width)
    if own:
        others = ", ".join(f"--{name}.*" for name in COMPONENT_KEYS if name not in own)
        lines += ["", textwrap.fill(f"Keys of the other roles work too ({others}); `rl --help` lists them.", width)]
    return "\n".join(lines) + "\n"


FORMS = """\
Values come from the command line, over config files, over PRIME_ variables,
over defaults.
  @ FILE                        a YAML or TOML file; several: a later one wins
  --SECTION @ FILE              a file for one section (--trainer, --sft, ...)
  --a.b-c V  --a.b_c V  --a.b=V a key
  --no-a.b                      switches off; a bare --section or --switch, on
  --a "{'b': 1}"  --a 0,1,2     a mapping as JSON or Python; a list
  PRIME_A__B=V                  the same from the environment
Keys of mappings of your own are as typed: --slurm.env.NCCL_DEBUG V,
PRIME_SLURM__ENV__NCCL_DEBUG=V.
"""
