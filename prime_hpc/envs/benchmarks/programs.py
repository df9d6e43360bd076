"""From a model's reply to a program with its checks: HumanEval's and LiveCodeBench's."""

import base64
import io
import json
import pickle
import re
import zlib
from dataclasses import dataclass
from typing import Any

_FENCE = re.compile(
    r"(?:^[ \t]*```[ \t]*(?P<language>[^\s`]*)[^\n`]*|```(?P<after_text>[^\s`]+)[ \t]*)\n(?P<block>.*?)(?:```|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""A block of any language, for else its closing fence would open one. Behind text, a fence opens only by a language."""
_PYTHON = re.compile(r"\{?\.?(?:python|py)[\d.]*\}?", re.IGNORECASE)

IMPORTS = (
    "import sys\nimport math\nimport json\nimport re\nimport heapq\nimport bisect\nimport random\nimport string\n"
    "import itertools\nimport functools\nimport collections\nfrom typing import *\nfrom math import *\n"
    "from heapq import *\nfrom bisect import *\nfrom itertools import *\nfrom functools import *\n"
    "from collections import *\nfrom builtins import *\nsys.setrecursionlimit(50000)\n"
)
"""Imports that solutions of contest problems take for granted; the built-in names last: `math` has a `pow` of two
arguments."""


@dataclass(frozen=True)
class Case:
    """One test of a contest problem."""

    given: str
    expected: str
    functional: bool
    """A call of the solution's method with one JSON value a line; else text on stdin, to be answered on stdout."""


def code_in(reply: str) -> str:
    """Return the last fenced block after the thoughts that is called Python, else the last one without a language, else
    the whole text."""
    said = reply.rpartition("</think>")[2]
    named, unnamed = "", ""
    for found in _FENCE.finditer(said):
        language = found["language"] or found["after_text"] or ""
        if _PYTHON.fullmatch(language):
            named = found["block"]
        elif not language:
            unnamed = found["block"]
    return named or unnamed or said


def humaneval_program(problem: dict[str, Any], reply: str) -> str:
    """Return a reply with the problem's own checks behind it.

    A reply that defines the function stands for itself, after the problem's text (whose imports it may use); another
    one goes on where that text ends.
    """
    code = code_in(reply)
    defines = re.search(rf"^(?:async )?def {re.escape(problem['entry_point'])}\b", code, re.MULTILINE)
    between = "\n    pass\n\n" if defines else ""
    return f"{problem['prompt']}{between}{code}\n{problem['test']}\ncheck({problem['entry_point']})"


def functional_program(code: str, method: str, cases: list[Case]) -> str:
    """Return a program that calls `Solution().<method>` for every case and compares as JSON values."""
    checks = [([json.loads(line) for line in case.given.split("\n") if line], case.expected) for case in cases]
    return "\n".join(
        (
            IMPORTS,
            code,
            f"for __given, __expected in json.loads({json.dumps(checks)!r}):",
            f"    __found = json.loads(json.dumps(Solution().{method}(*__given)))",
            "    assert __found == json.loads(__expected), f'{__given}: {__found} is not {__expected}'"[:200],
        )
    )


def same_output(found: str, expected: str) -> bool:
    """Compare outputs by their lines, white space at their ends aside; numbers as exact as they are written,
    or within 1e-6."""
    lines = [[line.split() for line in text.strip().splitlines()] for text in (found, expected)]
    if lines[0] == lines[1]:
        return True
    words = [[word for line in text for word in line] for text in lines]
    if [len(line) for line in lines[0]] != [len(line) for line in lines[1]]:
        return False
    return all(_same_word(a, b) for a, b in zip(*words, strict=True))


def _same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    try:
        return "." in expected + found and abs(float(found) - float(expected)) <= 1e-6 * max(1.0, abs(float(expected)))
    except ValueError:
        return False


def cases_of(row: dict[str, Any]) -> list[Case]:
    """Public and private tests of a LiveCodeBench row.

    Raises:
        ValueError: they cannot be read.
    """
    tests = [*_tests(row.get("public_test_cases")), *_tests(row.get("private_test_cases"))]
    return [Case(t["input"], t["output"], t.get("testtype") == "functional") for t in tests]


def _tests(field: Any) -> list[dict[str, Any]]:
    """JSON, or what the private ones are published as: base64 of a compressed pickle of JSON text."""
    if not field or not isinstance(field, str):
        return field or []
    try:
        return json.loads(field)
    except ValueError:
        compressed = zlib.decompress(base64.b64decode(field))
        text = _TextAlone(io.BytesIO(compressed)).load()
        return json.loads(text)


class _TextAlone(pickle.Unpickler):
    """Reads a pickled text and nothing that would have to be imported: data is never code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise ValueError(f"the tests hold {module_name}.{global_name} where a text belongs")


def method_of(row: dict[str, Any]) -> str:
    """Return the method that a functional problem asks for."""
    metadata = row.get("metadata") or "{}"
    return str((json.loads(metadata) if isinstance(metadata, str) else metadata).get("func_name", ""))
