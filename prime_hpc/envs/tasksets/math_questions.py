"""Mathematics benchmarks: math500, AIME 2024 and 2025, GSM8K. One turn; the boxed answer counts, by math-verify."""

from collections.abc import Iterable

import verifiers.v1 as vf

from prime_hpc.envs.benchmarks.registry import BENCHMARKS
from prime_hpc.envs.benchmarks.rows import answer_of, question_of, read_rows
from prime_hpc.envs.math_answers import open_comparison, same_answer
from prime_hpc.envs.tasksets.integers import last_number

__all__ = ["MathQuestions"]

INSTRUCTIONS = "Reason step by step, and put the final answer within \\boxed{}."


class MathData(vf.TaskData):
    """One question."""

    answer: str
    integer: bool


def answer_in(reply: str, *, integer: bool) -> str:
    """Return a reply's answer: its last box; of whole numbers, where nothing is boxed, the last number; else none."""
    said = reply.rpartition("</think>")[2]
    boxed = vf.extract_boxed_answer(said, strict=True).strip()
    if boxed or not integer:
        return boxed
    number = last_number(said)
    return "" if number is None else format(number, "f")


class MathTask(vf.Task[MathData]):
    """Compares the answer as mathematics."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1 where the reply's answer equals the task's."""
        found = answer_in(trace.last_reply, integer=self.data.integer)
        return float(bool(found) and await same_answer(self.data.answer, found))

    @vf.metric
    async def boxed(self, trace: vf.Trace) -> float:
        """1 where the reply boxes an answer."""
        return float(bool(answer_in(trace.last_reply, integer=False)))


class MathConfig(vf.TasksetConfig):
    """Arguments of the mathematics benchmarks."""

    benchmark: str = "math500"
    """Set by the id."""
    data: str | None = None
    """JSONL file, or a folder with `<name>.jsonl`; default: where `fetch` puts it."""
    instructions: str | None = INSTRUCTIONS
    """The system prompt."""


class MathQuestions(vf.Taskset[MathTask, MathConfig]):
    """The benchmark's questions, in its order."""

    async def open_scorer(self) -> None:
        """Start what compares answers, where episodes are about to be played.
        Raises EnvError: math-verify cannot be imported."""
        await open_comparison()

    def load(self) -> Iterable[MathTask]:
        """One task a row. Raises EnvError: the data is not there or cannot be read."""
        config = self.config
        benchmark = BENCHMARKS[config.benchmark]
        for row in read_rows(config.benchmark, config.data):
            data = MathData(
                prompt=question_of(benchmark, row),
                system_prompt=config.instructions,
                answer=answer_of(benchmark, row),
                integer=benchmark.integer,
            )
            yield MathTask(data, config.task)
