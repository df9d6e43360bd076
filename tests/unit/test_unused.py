"""No function of the product is left that nothing calls, say because a move of code forgot its call."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CALLERS = ("prime_hpc", "slurm", "tools", "configs", "sweeps", "pyproject.toml")
FOR_OTHERS = ("prime_hpc/envs/legacy/",)
"""Interfaces that packages of other people call by name."""


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() and "__pycache__" not in path.parts else ""


def test_every_function_is_used() -> None:
    found = [path for name in CALLERS for path in [ROOT / name, *(ROOT / name).rglob("*")]]
    words = Counter(word for path in found for word in re.findall(r"\w+", _text(path)))
    unused = []
    for path in sorted((ROOT / "prime_hpc").rglob("*.py")):
        where, text = path.relative_to(ROOT).as_posix(), path.read_text()
        # a file is parsed, which takes most of the time, where some function may be one
        named = re.findall(r"^(?:async )?def (\w+)", text, re.MULTILINE)
        if where.startswith(FOR_OTHERS) or all(words[name] > 1 for name in named):
            continue
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.decorator_list:
                continue
            if words[node.name] == 1:
                unused.append(f"{where}:{node.lineno} {node.name}")
    assert not unused
