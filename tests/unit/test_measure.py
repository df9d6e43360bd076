"""tools/measure on a small made-up tree."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "measure"

FILES = {
    "prime_hpc/__init__.py": '"""A package."""\n',
    "prime_hpc/room/policy.py": '''"""What a policy is."""

LIMIT = 3
"""Whose limit this is."""
NAME = "x"
"""The name."""


class Whole:
    """Whether it is whole."""

    def read(self):
        """Read it.

        What follows is no first line.
        """
        import json

        from prime_hpc.other import policy

        def inner():
            from . import late

            return late

        return json, policy, inner
''',
    "prime_hpc/other/policy.py": '"""Whatever it is, this is one word."""\n',
    "prime_hpc/other/__init__.py": "",
    "tests/test_a.py": "assert True\n",
    "README.md": "# Two words and four\nmore\n",
}


def measure(root: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(TOOL), "--root", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    full = {f"prime_hpc/full/m{index}.py": "" for index in range(21)}
    for name, text in (FILES | full).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_each_figure_is_counted(tree: Path) -> None:
    done = measure(tree, "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    text = FILES["prime_hpc/room/policy.py"]
    assert figures["product_files"] == 4 + 21
    assert figures["product_lines"] == text.count("\n") + 2
    assert figures["docstring_lines"] == 10
    assert figures["longest_file"] == f"{text.count(chr(10))} prime_hpc/room/policy.py"
    assert figures["functions"] == 2
    assert figures["longest_function"] == "15 prime_hpc/room/policy.py:12 read"
    clauses = [line.split(" ", 1)[1] for line in figures["noun_clause_docstrings"]]
    assert clauses == ["What a policy is.", "Whether it is whole."]
    assert [line.split(" ", 1)[1] for line in figures["noun_clause_attribute_docstrings"]] == ["Whose limit this is."]
    assert figures["shared_basenames"] == ["policy.py 2"]
    assert [line.split()[1] for line in figures["late_imports"]] == ["prime_hpc.other", "prime_hpc"]
    assert [line.split()[1] for line in figures["late_imports_of_others"]] == ["json"]
    assert figures["full_folders"] == ["prime_hpc/full 21"]
    assert (figures["test_lines"], figures["tool_lines"], figures["readme_words"]) == (1, 0, 6)


def test_the_table_names_what_it_counted_when_asked(tree: Path) -> None:
    short, long = measure(tree).stdout, measure(tree, "--list").stdout
    assert "noun clause docstrings" in short and "Whether it is whole." not in short
    assert "Whether it is whole." in long and "prime_hpc/full 21" in long


@pytest.mark.parametrize("command", [("measure", "--root", "{tree}"), ("proofs", "--list")])
def test_who_has_read_enough_sees_no_traceback(command: tuple[str, ...], tree: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, str(TOOL.with_name(command[0])), *(word.format(tree=tree) for word in command[1:])]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == -signal.SIGPIPE and done.stderr == ""


def test_a_folder_without_the_package_is_refused(tmp_path: Path) -> None:
    done = measure(tmp_path)
    assert done.returncode == 2 and "has no folder prime_hpc" in done.stderr


def test_a_file_that_is_no_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "prime_hpc").mkdir()
    (tmp_path / "prime_hpc" / "broken.py").write_text("def f(:\n")
    done = measure(tmp_path)
    assert done.returncode == 2 and "prime_hpc/broken.py" in done.stderr and "Traceback" not in done.stderr


def test_the_product_keeps_the_rules_of_its_house() -> None:
    figures = json.loads(measure(TOOL.parents[1], "--json").stdout)
    assert figures["noun_clause_docstrings"] == []
    assert figures["noun_clause_attribute_docstrings"] == []
    assert figures["full_folders"] == []
    assert int(figures["longest_file"].split()[0]) <= 500, figures["longest_file"]
    assert int(figures["longest_function"].split()[0]) <= 75, figures["longest_function"]
