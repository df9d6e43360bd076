"""The installed vLLM has every name that the product imports from it.

Many of these imports run on GPUs, or with one option of the engines, alone; and mypy does not read vLLM.
"""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "prime_hpc"
IMPORTS = re.compile(r"^\s*from vllm\b", re.MULTILINE)


def missing_names(text: str, library: Path) -> Iterator[str]:
    """`MODULE.NAME` of what a file's `from vllm... import` would not find; no module is imported."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != library.name:
            continue
        base = library.parent.joinpath(*str(node.module).split("."))
        source = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        words = set(re.findall(r"\w+", source.read_text())) if source.is_file() else set()
        below = {path.stem for path in base.iterdir()} if base.is_dir() else set()
        yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in words | below)


@pytest.fixture
def library() -> Path:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    return Path(spec.origin).parent


def test_the_installed_vllm_has_what_is_imported_from_it(library: Path) -> None:
    texts = {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    users = {path: text for path, text in texts.items() if IMPORTS.search(text)}
    assert users
    missing = [f"{path.name}: {name}" for path, text in users.items() for name in missing_names(text, library)]
    assert not missing, "\n".join(missing)


def test_a_name_or_a_module_that_is_not_there_is_found(library: Path) -> None:
    late = "from vllm.config import VllmConfig, Absent\n    from vllm.absent import x\n    from vllm import v1\n"
    assert list(missing_names(f"def f():\n    {late}", library)) == ["vllm.config.Absent", "vllm.absent.x"]
