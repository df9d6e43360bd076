"""Calls on what a model writes: they end, whatever it is, and none of it is run."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from prime_hpc.envs.bounded import calls
from prime_hpc.envs.bounded.calls import CallFailed, call
from prime_hpc.envs.math_answers import same_answer
from prime_hpc.envs.patches import reasoning_scorers
from prime_hpc.envs.patches.reasoning_scorers import readable
from prime_hpc.envs.tasksets.reasoning_gym import ReasoningGymConfig, ReasoningGymTaskset


@pytest.fixture
def one_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of the test's own, for limits of its own."""
    monkeypatch.setattr(calls, "MOST_CHILDREN", 1)
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


def test_a_copy_of_the_process_has_children_of_its_own(one_child: None) -> None:
    before = call("os:getpid")
    own = os.fork()
    if not own:
        os._exit(0 if call("os:getpid") != before else 1)
    assert os.waitpid(own, 0)[1] == 0 and call("os:getpid") == before


@pytest.mark.parametrize("answer", ["9^{9^{9}}", "100000000!"])
def test_an_answer_beyond_all_numbers_is_another_one(
    one_child: None, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    call("prime_hpc.envs.math_answers:compare", "\\boxed{4+2}", "\\boxed{6}")
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
