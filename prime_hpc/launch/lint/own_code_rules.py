"""Lint of code that a config names by its import path (`module:function`): found and read, never imported."""

import ast
import importlib.util
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from prime_hpc.config.sections.names import is_import_path
from prime_hpc.launch.lint.lint_finding import Finding, Severity, Subject, rule


def _named(subject: Subject) -> Iterator[tuple[str, str]]:
    """Yield key and import path of a user's own code."""
    orchestrator, curriculum = subject.experiment.orchestrator, subject.experiment.orchestrator.curriculum
    advantage = orchestrator.advantage
    names = [
        ("trainer.loss.type", subject.experiment.trainer.loss.type),
        ("orchestrator.advantage.type", advantage.type),
        ("orchestrator.advantage.echo.filter", advantage.echo.filter if advantage.echo is not None else None),
        *((f"orchestrator.env.{index}.algorithm", env.algorithm) for index, env in enumerate(orchestrator.env)),
        ("orchestrator.curriculum.sampler.type", curriculum.sampler.type),
        *((f"orchestrator.curriculum.gates.{index}.type", gate.type) for index, gate in enumerate(curriculum.gates)),
    ]
    yield from ((key, name) for key, name in names if name is not None and is_import_path(name))


def _find(module: str) -> ModuleSpec | None:
    """Return where a module is, looked up without importing the packages above it."""
    parts = module.split(".")
    spec = importlib.util.find_spec(parts[0])  # also by the finders of editable installs
    for number in range(1, len(parts)):
        if spec is None or not spec.submodule_search_locations:
            return None
        spec = PathFinder.find_spec(".".join(parts[: number + 1]), list(spec.submodule_search_locations))
    return spec


def _defines(tree: ast.Module, name: str) -> bool:
    """Return whether a module may have an attribute: anything in it that is not plain counts as yes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if node.name in (name, "__getattr__"):
                return True
            case ast.Name() if node.id in (name, "globals", "setattr", "exec"):
                return True
            case ast.alias() if "*" in node.name or (node.asname or node.name) == name:
                return True
    return False


def _lack(path: str) -> str | None:
    """Say why code cannot be imported; None: it can, as far as its source tells."""
    module, _, attribute = path.partition(":")
    try:
        spec = _find(module)
    except (ImportError, ValueError):  # a module that is loaded and says nothing of where it is from
        return None
    if spec is None:
        here = Path(*module.split(".")).with_suffix(".py")
        aside = (
            f"; {here} is below this directory, where the roles do not look (they start with python -P)"
            if here.is_file()
            else ""
        )
        return f"there is no module {module!r}{aside}"
    if not (spec.origin or "").endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(str(spec.origin)).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        return f"{spec.origin} cannot be read as Python: {error}"
    return None if _defines(tree, attribute) else f"{spec.origin} defines no {attribute!r}"


@rule("rl")
def found(subject: Subject) -> Iterator[Finding]:
    """Code that is not there: an error where the roles run on this machine. A job's script may set a path of its own
    (`setup`, `env`), or start from another Python environment."""
    severity: Severity = "warning" if subject.is_slurm else "error"
    for key, path in _named(subject):
        if (lack := _lack(path)) is not None:
            remedy = "install the module where the roles run, set PYTHONPATH, or mend the name"
            yield Finding("PH233", severity, key, f"{path!r} cannot be imported: {lack}", remedy)
