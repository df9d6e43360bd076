"""The arrows: cli -> launch -> supervisor -> roles -> {envs, client, slurm, weight_transport} -> store -> config ->
observe -> runtime.

Read from the source as syntax trees, imports inside functions included, so that no room can reach up late either.
"""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "prime_hpc"
HEAVY = {"torch", "transformers", "vllm", "verifiers"}
LEVELS = {
    "cli": 9,
    "simulate": 8,  # reads what the report knows of a run
    "report": 7,  # reads what launch knows of runs
    "launch": 6,
    "supervisor": 5,
    "orchestrator": 4,
    "trainer": 4,
    "inference": 4,
    "evals": 4,
    "starter": 4,
    "kubernetes": 3,  # places pods as slurm places nodes
    "envs": 3,  # asks the servers through the client
    "slurm": 2,
    "client": 2,
    "weight_transport": 2,  # between trainer and engines
    "moe": 2,  # what trainer and engines know alike of a model
    "store": 1,
    "config": 0,
    "observe": -1,
    "runtime": -2,
}
"""A room imports rooms of a lower number only."""
MOST_FILES = 20
"""In one folder."""
LIGHT_ROOMS = ("cli", "simulate", "report", "launch", "kubernetes", "slurm", "config", "store", "observe", "runtime")


@dataclass(frozen=True)
class Source:
    """A file of the package and what it imports."""

    module: str
    path: Path
    imports: frozenset[str]
    """Modules of the package, wherever in the file the import stands."""
    at_run_time: frozenset[str]
    """Those that are not for type hints alone."""
    at_first: frozenset[str]
    """Dotted names, other packages' too, whose import runs when the file is imported (`from prime_hpc import launch`
    counts as prime_hpc.launch)."""


def _names(nodes: Iterable[ast.AST], path: Path) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            base = ".".join(package[: -node.level]) + "." if node.level else ""
            found |= {f"{base}{node.module or ''}".rstrip(".") + f".{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and _last_name(node.func) in ("import_module", "__import__"):
            found.add(_beginning(node.args[0]))
    return found


def _last_name(node: ast.expr) -> str:
    """`a.b.c` -> `c`; empty where no name is called."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _beginning(argument: ast.expr) -> str:
    """The constant beginning of a module's name given as a string; empty where there is none."""
    if isinstance(argument, ast.JoinedStr):
        argument = argument.values[0]
    return str(argument.value).rstrip(".") if isinstance(argument, ast.Constant) else ""


def _statements(
    node: ast.AST, *, leave_out: Callable[[ast.AST], bool] = lambda _: False, also: type[ast.AST] = ast.stmt
) -> Iterator[ast.AST]:
    """The statements in and below a node, but for those left out and what is in them; `also`: other nodes as well."""
    kinds = ast.stmt, ast.ExceptHandler, ast.match_case, also
    rest = [node]
    while rest:
        yield (one := rest.pop())
        rest += [child for child in ast.iter_child_nodes(one) if isinstance(child, kinds) and not leave_out(child)]


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_late(node: ast.AST) -> bool:
    """Whether it does not run when the module is imported."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_types(node)


@cache
def sources() -> dict[str, Source]:
    """Every file of the package by module name."""
    paths = {_module_of(path): path for path in PACKAGE.rglob("*.py")}
    return {module: _read(module, path, paths) for module, path in paths.items()}


def _read(module: str, path: Path, paths: Mapping[str, Path]) -> Source:
    text = path.read_text()
    tree = ast.parse(text)
    # only calls hide below statements, and few files have those that import
    also = ast.AST if "import_module" in text or "__import__" in text else ast.stmt
    every = _names(_statements(tree, also=also), path)
    running = _names(_statements(tree, leave_out=_is_for_types, also=also), path)
    first = frozenset(_names(_statements(tree, leave_out=_is_late), path))
    return Source(module, path, _modules(every, paths), _modules(running, paths), first)


def _module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def _modules(names: set[str], known: Mapping[str, Path]) -> frozenset[str]:
    """The modules behind imported names: `prime_hpc.store.run_paths.RunPaths` is of `prime_hpc.store.run_paths`."""
    modules = {name if name in known else name.rpartition(".")[0] for name in names if name.startswith("prime_hpc.")}
    return frozenset(modules & set(known))


def room_of(module: str) -> str:
    """`prime_hpc.launch.lint.finding` -> `launch`; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def inner_room_of(source: Source) -> str:
    """`prime_hpc/launch/lint/finding.py` -> `launch/lint`; a room's own files -> `launch`."""
    return source.path.parent.relative_to(PACKAGE).as_posix()


def is_forbidden(importer: str, imported: str) -> bool:
    """Whether one room may not import another."""
    return importer != imported and LEVELS[imported] >= LEVELS[importer]


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    sorter = TopologicalSorter(arrows)
    try:
        sorter.prepare()
    except CycleError as error:
        first = error.args[1]
        rest = {node: [to for to in targets if {node, to} - set(first)] for node, targets in arrows.items()}
        return [first, *circles(rest)]
    return []


def test_every_room_has_a_level() -> None:
    rooms = {room_of(module) for module in sources()} - {""}
    assert rooms == set(LEVELS), "a room came or went: change LEVELS, and the README's tree"
    modules = [path.name for path in PACKAGE.glob("*.py")]
    assert modules == ["__init__.py"], "a module in no room"


def test_arrows_point_one_way() -> None:
    wrong = []
    for source in sources().values():
        for name in source.imports:
            rooms = room_of(source.module), room_of(name)
            if all(rooms) and is_forbidden(*rooms):
                wrong.append(f"{source.module} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_inner_rooms_import_each_other_one_way() -> None:
    arrows: dict[str, set[str]] = {}
    for source in sources().values():
        here = inner_room_of(source)
        for name in source.at_run_time:
            there = inner_room_of(sources()[name])
            is_inner = "/" in here and "/" in there and here.split("/")[0] == there.split("/")[0]
            if is_inner and here != there:
                arrows.setdefault(here, set()).add(there)
    assert arrows and not circles(arrows)


def test_no_files_import_each_other_in_a_circle() -> None:
    # imports inside functions and for type hints count: a circle that is opened late is one all the same
    found = circles({source.module: source.imports - {source.module} for source in sources().values()})
    assert not found, found


def test_no_folder_is_full() -> None:
    folders = Counter(inner_room_of(source) for source in sources().values())
    assert not {folder: count for folder, count in folders.items() if count > MOST_FILES}


def test_the_rules_themselves(tmp_path: Path) -> None:
    assert is_forbidden("trainer", "orchestrator")
    assert is_forbidden("config", "store")
    assert is_forbidden("store", "launch")
    assert is_forbidden("slurm", "supervisor")
    assert is_forbidden("observe", "config")
    assert is_forbidden("runtime", "observe")
    assert not is_forbidden("launch", "supervisor")
    assert not is_forbidden("config", "observe")
    assert circles({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]}) and not circles({"a": ["b", "c"], "b": ["c"]})
    late = "def f():\n    from importlib import import_module\n    return import_module(f'prime_hpc.cli.{1}')\n"
    typed = "if TYPE_CHECKING:\n    import prime_hpc.launch.job\n"
    tree = ast.parse(late + typed)
    everything = {"importlib.import_module", "prime_hpc.cli", "prime_hpc.launch.job"}
    assert _names(_statements(tree, also=ast.AST), PACKAGE / "x.py") == everything
    running = everything - {"prime_hpc.launch.job"}
    assert _names(_statements(tree, leave_out=_is_for_types, also=ast.AST), PACKAGE / "x.py") == running
    assert _names(_statements(tree), PACKAGE / "x.py") == everything - {"prime_hpc.cli"}
    nested = "try:\n    import a\nexcept E:\n    import b\nmatch x:\n    case 1:\n        import c\n" + typed
    assert _names(_statements(ast.parse(nested + late), leave_out=_is_late), PACKAGE / "x.py") == {"a", "b", "c"}


def test_login_node_rooms_import_nothing_heavy() -> None:
    wrong = []
    for module, source in sources().items():
        if room_of(module) in LIGHT_ROOMS:
            wrong += [f"{module}: {name}" for name in source.at_first if name.split(".")[0] in HEAVY]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "statement",
    [
        "import prime_hpc.cli, prime_hpc.config.sources.load, prime_hpc.config.snapshot",
        "import prime_hpc.launch",
        "import sys; sys.argv = ['rl', '--help']; import prime_hpc.cli; prime_hpc.cli.rl()",
        "import prime_hpc.cli; prime_hpc.cli.main(['--help'])",
    ],
)
def test_a_fresh_process_loads_nothing_heavy(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip() == "[]"


def test_who_looks_at_runs_builds_no_config() -> None:
    verbs = [f"prime_hpc.cli.verbs.run.{name}" for name in ("status", "logs", "why")]
    code = f"import {', '.join(verbs)}, sys; assert 'prime_hpc.config.experiment' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr


def test_help_needs_no_pydantic() -> None:
    code = "import prime_hpc.cli, sys; prime_hpc.cli.main(['plan', '--help']); assert 'pydantic' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
