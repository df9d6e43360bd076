"""Letters and programs, found in replies."""

import ast
import sys
from types import SimpleNamespace

import pytest

from prime_hpc.envs.benchmarks import programs
from prime_hpc.envs.benchmarks.programs import MOST_COMPILED, code_in
from prime_hpc.envs.legacy.parsers import XMLParser, sections
from prime_hpc.envs.tasksets.choices import letter_in
from prime_hpc.envs.tasksets.reasoning_gym import extract_answer


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("To answer a question like this we need physics. I cannot decide.", ""),
        ("The answer is a combination of effects.", ""),
        ("The correct answer is B.\nThis answer accounts for the shift; without it the answer is a guess.", "B"),
        ("ANSWER: **C**", "C"),
        ("**Final answer:** (D)", "D"),
        ("The answer is:\n\n**B) 5 eV**", "B"),
        ("The answer is $\\mathbf{A}$.", "A"),
        ("answer A or B", ""),
        ("The answer is Deuterium", ""),
        ("so \\boxed{\\mathbf{C}}", "C"),
        ("so \\boxed{\\textbf{(b)}}", "B"),
        ("so \\boxed{\\text{Carbon}}, the answer is D", "D"),
        ("\\boxed{B) 5 m/s}", "B"),
        ("\\boxed{10^{-3}\\,C}", ""),
        ("\\boxed{A, B}", ""),
        ("Answer: A proton moves, so it is C", "C"),
        ("the answer is D-glucose", ""),
        ("The answer is option B.", "B"),
        ("The correct choice is B because it is so.", "B"),
        ("The correct answer is B. The closest other option is C, but its sign is wrong.", "B"),
        ("Answer: B\n\nThe tempting option: D, which ignores spin.", "B"),
        ("The first option is wrong. The best choice: D.", "D"),
        ("The answer is B \N{EM DASH} because x", "B"),
        ("The answer is B\N{EM DASH}because x", "B"),
        ("The answer is C - 4 carbons", "C"),
        ("The answer is C \N{EN DASH} the second", "C"),
        ("The answer is C (4 carbons)", "C"),
        ("Answer: D 4.5 eV", "D"),
        ("Answer: B and not C.", "B"),
        ("Answer: B\r\nIt is so.", "B"),
        ('so \\boxed{"A"}', "A"),
        ("so \\boxed{'B'}", "B"),
        ("so \\boxed{B\\ }", "B"),
        ("so \\boxed{A\\,}", "A"),
        ("so \\boxed{\\,B}", "B"),
        ("so \\boxed{\\Large B}", "B"),
        ("\\boxed{4 A}", ""),
        ("\\boxed{A 4}", ""),
    ],
)
def test_a_choice_is_a_letter_that_is_called_the_answer(reply: str, letter: str) -> None:
    assert letter_in(reply) == letter


@pytest.mark.parametrize(
    "reply",
    [
        "Example:\n\n```text\n3\n```\n\nSolution:\n\n```python\ncode\n```\n\nDone.",
        "```python\ncode\n```\nRun it:\n```bash\npython a.py\n```\nIt runs in O(1).",
        "```python\ncode\n```\nIt prints\n```\n3\n```\n",
        "```Python3\nold\n```\n```{python}\ncode\n```",
        "Output is ```3```\n```\ncode\n```",
        "Output is ```3``` here.\n1. So ```py\ncode\n```",
        "   ```python title=a.py\ncode\n   ```\n```c++\nint x;\n```",
        "```json\n{}\n```\n```\ncode\n",
        "```python\ncode```\nDone.",
        "````python\ncode\n````",
    ],
)
def test_the_program_is_the_last_block_that_is_called_python(reply: str) -> None:
    assert code_in(reply).strip() == "code"


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("1. Here:\n\n   ```python\n   def f(x):\n       return x\n   ```\n", "def f(x):\n    return x\n"),
        ("```python\ns = '''```'''\nx = 1\n```", "s = '''```'''\nx = 1\n"),
        ("```python\n'''\n    ```\n    f(1)\n    ```\n'''\n```\n", "'''\n    ```\n    f(1)\n    ```\n'''\n"),
        ("```python\n'''\n```\nf(1)\n```\n'''\n```\nIt runs.\n```\n2\n```", "'''\n```\nf(1)\n```\n'''\n"),
        ("<answer>```python\nf(1)\n```</answer>\nIt is.", "f(1)\n"),
        ("```python\nf(1)\n``` This prints\n\nOutput:\n```\n1\n```", "f(1)\n"),
        ("```python\nf(1)```\n\nOutput:\n```\n1\n```\n", "f(1)"),
        ("```python\n    return 1```\n\nOutput:\n```\n1\n```\n", "    return 1"),
        ("```python\nf(1)  # as in\n# ```\n# f(2)\n# ```\nf(3)\n```\n", "f(1)  # as in\n# ```\n# f(2)\n# ```\nf(3)\n"),
        ("```python\nf(\n```\nIt lacks an end.\n```\n1\n```", "f(\n"),
        ("```python\nf(1)\n```python\nf(2)\n```", "f(2)\n"),
    ],
)
def test_a_block_loses_its_own_indentation_and_ends_where_its_program_does(reply: str, code: str) -> None:
    assert code_in(reply) == code


@pytest.mark.parametrize("unit", ["```python\nf(1)\n```\n", "x```py\ny```\n"])
def test_a_reply_that_repeats_itself_costs_in_proportion_to_its_length(unit: str) -> None:
    """It is read where all episodes of a process are played."""

    def num_calls(reply: str) -> int:
        found: list[int] = []
        sys.setprofile(lambda frame, event, value: found.append(1))
        try:
            code_in(reply)
        finally:
            sys.setprofile(None)
        return len(found)

    assert num_calls(unit * 160) < 2.8 * num_calls(unit * 80)


def test_programs_that_are_none_are_tried_so_many_times(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def parse(code: str) -> ast.Module:
        read.append(len(code))
        return ast.parse(code)

    monkeypatch.setattr(programs, "ast", SimpleNamespace(parse=parse))
    assert code_in("```python\nf(\n```\n" * 300) == "f(\n" and sum(read) <= MOST_COMPILED


@pytest.mark.parametrize("line", ["x" + "`" * 200_000 + " y", "```" + "a" * 200_000 + "`", "```" + " " * 200_000 + "`"])
def test_a_long_line_is_no_fence_in_no_time(line: str) -> None:
    assert code_in(line) == line


@pytest.mark.parametrize("unit", ["<answer>", " ", "<answer> ", "</answer>"])
def test_an_answer_that_never_ends_is_read_in_no_time(unit: str) -> None:
    reply = "<answer>" + unit * 100_000
    is_ended = "/" in unit
    assert extract_answer(reply) == ("" if is_ended else reply.strip())
    assert XMLParser(["answer"]).parse_answer(reply) == ("" if is_ended else None)


def test_the_last_section_of_a_name_counts_from_its_first_beginning_on() -> None:
    text = "</a> <a> 1 </a> <b>x</b> <a>\n2 <a> 3</a> 4</a> <a>"
    assert sections(text, "a") == ["1", "2 <a> 3"] and sections(text, "c") == []
    parsed = XMLParser(["a", ("b", "c")]).parse(text)
    assert (parsed.a, parsed.b, parsed.c) == ("1", "x", None)
