"""The arrows: cli -> launch -> supervisor -> roles -> {envs, client, slurm} -> store -> config -> observe -> runtime.

Read from the source as syntax trees, imports inside functions included, so that no room can reach up late either.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "prime_hpc"
HEAVY = {"torch", "transformers", "vllm", "verifiers"}
LEVELS = {
    "cli": 8,
    "launch": 6,
    "supervisor": 5,
    "orchestrator": 4,
    "trainer": 4,
    "inference": 4,
    "evals": 4,
    "starter": 4,
    "envs": 3,  # asks the servers through the client
    "slurm": 2,
    "client": 2,
    "store": 1,
    "config": 0,
    "observe": -1,
    "runtime": -2,
}
"""A room imports rooms of a lower number only."""
LIGHT_ROOMS = ("cli", "launch", "slurm", "config", "store", "observe", "runtime")


def imports_of(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names that a file imports (`from prime_hpc import launch` counts as prime_hpc.launch)."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    if top_level_only:
        nodes = [node for statement in tree.body for node in _without_functions(statement)]
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            base = ".".join(package[: -node.level]) + "." if node.level else ""
            found |= {f"{base}{node.module or ''}".rstrip(".") + f".{alias.name}" for alias in node.names}
    return found


def _without_functions(statement: ast.stmt | ast.ExceptHandler) -> list[ast.AST]:
    """The nodes that run when the module is imported, `if TYPE_CHECKING` aside."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test):
        return []
    below = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt | ast.ExceptHandler)]
    return [statement, *(node for child in below for node in _without_functions(child))]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def files() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE]


def is_forbidden(importer: str, imported: str) -> bool:
    """Whether one room may not import another."""
    return importer != imported and LEVELS[imported] >= LEVELS[importer]


def test_every_room_has_a_level() -> None:
    rooms = {room_of(path) for path in files()}
    assert rooms <= set(LEVELS), "a new room: give it a level here and a place in the design"


def test_arrows_point_one_way() -> None:
    wrong = []
    for path in files():
        for name in imports_of(path):
            parts = name.split(".")
            is_room = parts[0] == "prime_hpc" and len(parts) > 1 and parts[1] in LEVELS
            if is_room and is_forbidden(room_of(path), parts[1]):
                wrong.append(f"{path.relative_to(PACKAGE.parent)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_rule_itself() -> None:
    assert is_forbidden("trainer", "orchestrator")
    assert is_forbidden("config", "store")
    assert is_forbidden("store", "launch")
    assert is_forbidden("observe", "config")
    assert not is_forbidden("launch", "supervisor")
    assert not is_forbidden("config", "observe")


def test_login_node_rooms_import_nothing_heavy() -> None:
    wrong = []
    for path in files():
        if room_of(path) in LIGHT_ROOMS:
            wrong += [f"{path.name}: {n}" for n in imports_of(path, top_level_only=True) if n.split(".")[0] in HEAVY]
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
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr.strip() == "[]"


def test_help_needs_no_pydantic() -> None:
    code = "import prime_hpc.cli, sys; prime_hpc.cli.main(['plan', '--help']); assert 'pydantic' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
