"""From a model's reply to a program with its checks: HumanEval's and LiveCodeBench's."""

import ast
import base64
import io
import json
import pickle
import re
import warnings
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any, NamedTuple

_OPENS = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,})[ \t]*+(?P<language>[^\s`]*+)[^`]*+")
_OPENS_BEHIND_TEXT = re.compile(r"(?P<indent>).*?(?<!`)(?P<fence>`{3,}+)(?P<language>[^\s`]++)[ \t]*")
"""Behind text, a fence opens only by a language."""
_BEGINS = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,})")
MOST_INDENT = 3
"""Of a closing fence beyond the opening one's; one that stands deeper is text, of a docstring perhaps."""
MOST_TRIED, MOST_COMPILED = 20, 200_000
"""Fences that may end a block, and characters of all programs before one in a reply, beyond which the plain rule
stands."""
_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,9})?")
_PYTHON = re.compile(r"\{?\.?(?:python|py)[\d.]*\}?", re.IGNORECASE)

IMPORTS = (
    "import sys\nimport math\nimport json\nimport re\nimport heapq\nimport bisect\nimport random\nimport string\n"
    "import itertools\nimport functools\nimport collections\nfrom typing import *\nfrom math import *\n"
    "from heapq import *\nfrom bisect import *\nfrom itertools import *\nfrom functools import *\n"
    "from collections import *\nfrom builtins import *\nsys.setrecursionlimit(50000)\n"
)
"""Imports that solutions of contest problems take for granted; the built-in names last: `math` has a `pow` of two
arguments."""


_LEADING = re.compile(
    r"(?:\s|#[^\n]*(?:\n|\Z)|[rR]?\"\"\".*?\"\"\"|[rR]?\'\'\'.*?\'\'\'|from __future__ import[^\n]*(?:\n|\Z))*",
    re.DOTALL,
)
_FUTURE = re.compile(r"^from __future__ import[^\n]*", re.MULTILINE)


def placed_behind(text: str, code: str) -> str:
    """Return a program of `text` with `code` behind it, whose `from __future__` lines stay the first ones."""
    leading = _LEADING.match(code)
    head = leading[0] if leading else ""
    lifted = "".join(f"{line}\n" for line in _FUTURE.findall(head))
    return f"{lifted}{text}{_FUTURE.sub('', head)}{code[len(head) :]}"


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
    for language, block in _blocks(said):
        if _PYTHON.fullmatch(language):
            named = block
        elif not language:
            unnamed = block
    return named or unnamed or said


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of all fenced blocks, without an indented fence's own indentation.

    Of every language, for else a closing fence would open a block.
    """
    lines, at = text.split("\n"), 0
    ends = _Ends(lines)
    while at < len(lines):
        opens = _OPENS.fullmatch(lines[at]) or _OPENS_BEHIND_TEXT.fullmatch(lines[at])
        at += 1
        if opens is None or at == len(lines):
            continue
        is_python = not opens["language"] or bool(_PYTHON.fullmatch(opens["language"]))
        block, at = ends.block(at, len(opens["indent"]), len(opens["fence"]), is_python=is_python)
        yield opens["language"], block


class _Ends:
    """Finds the ends of the blocks of one text, in the order of the text.

    In time that grows with the text alone: some replies are the same block thousands of times.
    """

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._fences = [fence for fence in map(_fence, range(len(lines)), lines) if fence.leading or fence.trailing]
        self._next: dict[tuple[int, int], int] = {}
        """Indentation and length of a fence -> the next line that begins with such a one."""
        self._left = MOST_COMPILED

    def block(self, start: int, indent: int, length: int, *, is_python: bool) -> tuple[str, int]:
        """Return a block's content without its indentation, and the number of the line behind it.

        A line that begins with a fence ends it, whatever follows; where none does, one that ends with a fence; else the
        end of the text. But a fence may be a part of a program's text: of Python it is the first one before which a
        program stands, if there is such a one.
        """
        after = range(bisect_left(self._fences, start, key=lambda fence: fence.line), len(self._fences))
        fences = (self._fences[index] for index in after)
        ends = [*islice((one for one in fences if one.begins(indent, length) or one.trailing >= length), MOST_TRIED)]
        closes = {one.line for one in ends if not one.begins(indent, length)}
        if self._next.get((indent, length), -1) < start:
            begins = (self._fences[index].line for index in after if self._fences[index].begins(indent, length))
            self._next[indent, length] = next(begins, len(self._lines))
        plain = self._next[indent, length]
        if plain == len(self._lines) and ends:
            plain = ends[0].line

        def until(end: int) -> str:
            last = [""] if start < end < len(self._lines) else []
            last = [self._lines[end].rstrip()[:-length]] if end in closes else last
            return "\n".join(_without(line, indent) for line in [*self._lines[start:end], *last])

        def is_one(end: int) -> bool:
            return self._is_program(until(end)) and not (end in closes and self._is_program(until(end) + "?"))

        tried = (one.line for one in ends if is_python and len(ends) > 1 and self._left > 0)
        end = next((line for line in tried if is_one(line)), plain)
        behind = self._lines[end].strip().lstrip("`").strip() if end < len(self._lines) and end not in closes else ""
        return until(end), end if _PYTHON.fullmatch(behind) else end + 1

    def _is_program(self, code: str) -> bool:
        """Return whether it can be compiled, and does anything."""
        self._left -= len(code)
        if self._left < 0:
            return False
        begun = "if 1:\n" if code[:1].isspace() else ""  # what goes on where a problem's text ends
        try:
            with warnings.catch_warnings(action="ignore"):
                return bool(ast.parse(begun + code).body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False


class _Fence(NamedTuple):
    """A line, and how many backticks it begins and ends with, if that is a fence."""

    line: int
    indent: int
    leading: int
    trailing: int

    def begins(self, indent: int, length: int) -> bool:
        """Return whether it begins with the end of a block whose fence has so many backticks."""
        return self.leading >= length and self.indent <= indent + MOST_INDENT


def _fence(line: int, text: str) -> _Fence:
    begins, closed = _BEGINS.match(text), text.rstrip()
    trailing = len(closed) - len(closed.rstrip("`"))
    leading = len(begins["fence"]) if begins else 0
    return _Fence(line, len(begins["indent"]) if begins else 0, leading, trailing if trailing >= 3 else 0)


def _without(line: str, indent: int) -> str:
    """Return a line without so many of its leading blanks, where it has them."""
    return line[min(indent, len(line) - len(line.lstrip(" \t"))) :]


def humaneval_program(problem: dict[str, Any], reply: str) -> str:
    """Return a reply with the problem's own checks behind it.

    A reply that defines the function stands for itself, after the problem's text (whose imports it may use); another
    one goes on where that text ends.
    """
    code = code_in(reply)
    defines = re.search(rf"^(?:async )?def {re.escape(problem['entry_point'])}\b", code, re.MULTILINE)
    between = "\n    pass\n\n" if defines else ""
    program = placed_behind(problem["prompt"] + between, code)
    return f"{program}\n{problem['test']}\ncheck({problem['entry_point']})"


def functional_program(code: str, method: str, cases: list[Case]) -> str:
    """Return a program that calls `Solution().<method>` for every case and compares as JSON values."""
    checks = [([json.loads(line) for line in case.given.split("\n") if line], case.expected) for case in cases]
    return "\n".join(
        (
            placed_behind(IMPORTS + "\n", code),
            f"for __given, __expected in json.loads({json.dumps(checks)!r}):",
            f"    __found = json.loads(json.dumps(Solution().{method}(*__given)))",
            "    assert __found == json.loads(__expected), f'{__given}: {__found} is not {__expected}'",
        )
    )


def same_output(found: str, expected: str) -> bool:
    """Compare outputs by their lines, white space at their ends aside; numbers where the expected one has a point
    within 1e-6, whole ones exactly."""
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
    if not (_NUMBER.fullmatch(found) and _NUMBER.fullmatch(expected)):
        return False
    if "." not in expected:
        return "." in found and Decimal(found) == Decimal(expected)
    return abs(float(found) - float(expected)) <= 1e-6 * max(1.0, abs(float(expected)))


def cases_of(row: dict[str, Any]) -> list[Case]:
    """Public and private tests of a LiveCodeBench row. Raises ValueError: they cannot be read."""
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
