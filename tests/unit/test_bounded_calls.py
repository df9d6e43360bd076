"""Calls on what a model writes: they end, whatever it is, and none of it is run."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prime_hpc.envs.bounded import calls
from prime_hpc.envs.bounded.calls import CallBroken, CallFailed, call, call_elsewhere
from prime_hpc.envs.episode_runner import SourceRunner
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.legacy.messages import State
from prime_hpc.envs.legacy.rubrics import Rubric
from prime_hpc.envs.math_answers import open_comparison, same_answer
from prime_hpc.envs.patches import reasoning_scorers
from prime_hpc.envs.patches.reasoning_scorers import readable
from prime_hpc.envs.tasksets.math_questions import MathQuestions
from prime_hpc.envs.tasksets.reasoning_gym import ReasoningGymConfig, ReasoningGymTaskset
from tests.support.ranks import spawn


@pytest.fixture
def one_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of the test's own, for limits of its own."""
    monkeypatch.setattr(calls, "MOST_CHILDREN", 1)
    monkeypatch.setattr(calls, "_children", set())
    calls._threads.cache_clear()


def test_what_keeps_the_interpreter_busy_is_ended(one_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CPU_S", 0.5)
    with pytest.raises(CallFailed, match=r"more than 0\.5 s of CPU time"):
        call("operator:pow", 9, 9**9)
    assert call("operator:add", 1, 2) == 3
    with pytest.raises(CallFailed, match="ZeroDivisionError"):
        call("operator:truediv", 1, 0)
    with pytest.raises(CallFailed, match="MemoryError"):
        call("operator:mul", [0], 1 << 30)


def test_a_child_that_somebody_ends_is_replaced(one_child: None) -> None:
    before = call("os:getpid")
    os.kill(before, signal.SIGTERM)  # Slurm's warning goes to all
    assert call("os:getpid") == before
    os.kill(before, signal.SIGKILL)
    assert call("os:getpid") not in (before, os.getpid())


def test_a_child_that_says_nothing_is_no_answer_s_fault(one_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = call("os:getpid")
    with monkeypatch.context() as patch, pytest.raises(CallBroken, match=r"nothing was heard of time:sleep for 0\.2 s"):
        patch.setattr(calls, "WALL_S", 0.2)
        call("time:sleep", 300)
    assert call("os:getpid") != before


def test_what_cannot_be_called_is_said_at_once(one_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CallBroken, match="ModuleNotFoundError"):
        call("no_such_module:function")
    with pytest.raises(CallBroken, match="AttributeError"):
        call("os:no_such_function")
    assert call("operator:add", 1, 2) == 3
    with pytest.raises(CallBroken, match="exit code -9"):
        call("signal:raise_signal", 9)  # as the kernel does where memory runs out; the second child too
    monkeypatch.setattr(calls.sys, "executable", "/no/such/program")
    with pytest.raises(CallBroken, match="no process can be started"):
        call("os:getpid")


BROKEN = """
import asyncio
import prime_hpc.envs
import verifiers.v1 as vf
from prime_hpc.envs.math_answers import open_comparison, same_answer
def said(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
print(said(lambda: asyncio.run(same_answer("0.5", "1/2"))))
print(said(lambda: vf.verify_boxed_math_answer(r"\\boxed{0.5}", "1/2")))
print(said(lambda: asyncio.run(open_comparison())))
"""


def test_no_answer_is_wrong_because_math_verify_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('half of it is missing')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=280, check=True)
    *broken, opened = done.stdout.splitlines()
    assert len(broken) == 2 and opened.startswith("EnvError: answers cannot be compared")
    for line in broken:
        assert line.startswith("CallBroken: ") and line.endswith("ImportError: half of it is missing")
    assert done.stderr.count("episodes fail") == 1  # said once


def test_no_episode_is_played_where_answers_cannot_be_compared(
    one_child: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls.sys, "executable", "/no/such/program")
    runner = SourceRunner.__new__(SourceRunner)
    runner.env, runner._stack = SimpleNamespace(taskset=MathQuestions.__new__(MathQuestions)), AsyncExitStack()
    with pytest.raises(EnvError, match="answers cannot be compared: no process can be started"):
        asyncio.run(runner.open())

    async def correct() -> float:
        return float(await same_answer("0.5", "1/2"))

    with pytest.raises(CallBroken):
        asyncio.run(Rubric([correct]).value(correct, State()))


def test_a_child_that_keeps_much_is_replaced(one_child: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = call("os:getpid")
    monkeypatch.setattr(calls, "KEPT_BYTES", 1 << 20)
    call("builtins:exec", "import builtins; builtins.kept = bytearray(8 << 20); builtins.kept[::4096] = bytes(2048)")
    after = call("os:getpid")
    assert after != before
    with pytest.raises(CallFailed, match="MemoryError"):
        call("operator:mul", [0], 1 << 30)
    assert call("os:getpid") != after


def test_who_waits_for_an_answer_does_not_wait_for_other_ones(one_child: None) -> None:
    """Episodes' answers, each of which may take its whole time, are not before it."""

    async def ask() -> int:
        hard = asyncio.create_task(call_elsewhere("time:sleep", 300))
        await asyncio.sleep(0)
        found: int = call("operator:add", 1, 2)  # keeps the event loop
        assert not hard.done()
        for child in calls._children:
            child._process.kill()
        with pytest.raises(CallBroken):
            await asyncio.gather(hard, _killing())
        return found

    assert asyncio.run(ask()) == 3


async def _killing() -> None:
    while True:
        await asyncio.sleep(0.05)
        for child in list(calls._children):
            child._process.kill()


def test_what_compares_is_there_before_the_first_answer(one_child: None) -> None:
    asyncio.run(open_comparison())
    (child,) = calls._children
    before = child._process.pid
    assert asyncio.run(same_answer("0.5", "\\frac{1}{2}")) and {c._process.pid for c in calls._children} == {before}


def copy_that_calls(_: int) -> None:
    before = call("os:getpid")
    own = os.fork()
    if not own:
        os._exit(0 if call("os:getpid") != before else 1)
    assert os.waitpid(own, 0)[1] == 0 and call("os:getpid") == before


def test_a_copy_of_the_process_has_children_of_its_own() -> None:
    spawn(copy_that_calls, (), 1)


@pytest.mark.parametrize("answer", ["9^{9^{9}}", "100000000!"])
def test_an_answer_beyond_all_numbers_is_another_one(
    one_child: None, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    call("prime_hpc.envs.bounded.math_comparison:compare", "\\boxed{4+2}", "\\boxed{6}")
    monkeypatch.setattr(calls, "CPU_S", 1.0)
    assert not asyncio.run(same_answer("5", answer))


def tasks_of(generator: str, num_tasks: int = 3) -> list[Any]:
    config = ReasoningGymConfig(id="reasoning-gym", generators=[generator], num_tasks=num_tasks)
    return list(ReasoningGymTaskset(config))


class Reply:
    """What a reward reads of a trace."""

    def __init__(self, answer: str) -> None:
        self.last_reply = f"<answer>{answer}</answer>"


def score(task: Any, answer: str) -> float:
    return asyncio.run(task.answer_score(Reply(answer)))


RUNNERS = reasoning_scorers.LITERALS | reasoning_scorers.ARITHMETIC | reasoning_scorers.EXPRESSIONS


@pytest.mark.parametrize("generator", sorted(RUNNERS))
def test_no_scorer_runs_an_answer(generator: str, tmp_path: Path) -> None:
    (task,) = tasks_of(generator, num_tasks=1)
    mark = tmp_path / "mark"
    touch = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    for answer in (touch, f"[{touch}]", f"1 + {touch}", f"sqrt({touch})"):
        assert score(task, answer) <= 0.05 and not mark.exists()
    right = task.data.entry["metadata"].get("valid_answers", [task.data.entry["answer"]])[0]
    if generator != "puzzle24":  # whose entry has none
        assert score(task, right) == 1.0


def test_an_answer_of_another_form_is_worth_what_it_was() -> None:
    (task,) = tasks_of("spiral_matrix", num_tasks=1)
    assert score(task, "[" + task.data.entry["answer"].replace(" ", ", ") + "]") == 0.1
    assert readable("puzzle24", "(1 + 2) * 8 / 1.0") and not readable("puzzle24", "exit()")
    assert not readable("countdown", "9**9**9") and not readable("countdown", "9\n* *9")
    assert readable("simple_integration", "7*X**10/10 + exp(3*x) - sqrt(x)/2 + C")
    for answer in ("x.diff", "S(1)", "N", "().a", "x if x else y", "lambda: 1", "'a'", "x_", "1.real", "[1]", "éx"):
        assert not readable("simple_integration", answer), answer
    for answer in ("tan(x) + sec(x)", "csc(x) - cot(x)", "erf(x)", "1e-3*x", "2.5E3"):
        assert readable("simple_integration", answer), answer
    assert readable("polynomial_multiplication", "S*theta + 1", ("S", "theta"))
    assert not readable("polynomial_multiplication", "theta + 1", ("S",))
    assert not readable("puzzle24", "1" * 3000 + "!")  # in no time
    assert readable("chain_sum", "anything('at all')")


def test_all_scorers_that_run_answers_are_known() -> None:
    """A new release of reasoning-gym may have others."""
    import reasoning_gym

    runs, found = re.compile(r"(?<![\w.])(?:eval|exec|sympify|literal_eval)\(|parse_expr\(|sympify\("), set()
    own = {"bitwise_arithmetic", "number_sorting", "propositional_logic"}  # their own questions; a parser of their own
    for path in Path(reasoning_gym.__file__).parent.rglob("*.py"):
        scorer = re.search(r"    def score_answer\(.*?(?=\n    def |\n    @|\nclass |\Z)", path.read_text(), re.DOTALL)
        if scorer and runs.search(scorer[0]):
            found.add(path.stem)
    assert found - own == RUNNERS


@pytest.mark.parametrize("generator", ["arc_agi", "rearc"])
def test_right_answers_score_what_their_generator_gives_them(generator: str) -> None:
    """Their entries hold tuples, which JSON would make lists of."""
    for task in tasks_of(generator):
        assert score(task, str(task.data.entry["answer"])) == 1.0


@pytest.mark.parametrize(
    ("generator", "answer"),
    [("prime_factorization", "1 × x"), ("game_of_life", "12"), ("coin_flip", "1e999999"), ("boxnet", "[1]")],
)
def test_a_scorer_that_raises_gives_nothing(generator: str, answer: str) -> None:
    (task,) = tasks_of(generator, num_tasks=1)
    assert score(task, answer) == 0.0
