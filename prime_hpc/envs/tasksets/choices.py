"""GPQA (diamond): questions with four answers, in an order of their own that no seed changes. One turn."""

import hashlib
import re
from collections.abc import Iterable

import verifiers.v1 as vf

from prime_hpc.envs.benchmarks.rows import read_rows
from prime_hpc.envs.errors import EnvError

__all__ = ["Choices"]

LETTERS = "ABCD"
INSTRUCTIONS = "Reason step by step, then give the letter of the right answer within \\boxed{}."
FIELDS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_BEFORE = r"(?:[\s*_$(\[{\"'`]|\\[A-Za-z]+\b|\\[ ,;:!])*+"
"""Brackets, quotation marks, emphasis, spaces and commands that may stand before a letter."""
_LETTER = (
    rf"{_BEFORE}([A-D])(?=[)\]}}*_$ \t]*+(?:[.:;,!?\r\n]|\Z)|[)\]}}*$]|_(?!\w)"
    r"|\s+(?:because|since|as|which|due|for|with|from|by|and\s+not)\b|\s+(?:[-\N{EN DASH}\N{EM DASH}]\s|\(|\d)"
    r"|[\N{EN DASH}\N{EM DASH}])"
)
"""As a capital, for `a` is an article; so is the `A` of a sentence, but with nothing behind it that ends the choice."""
_IS = rf"[\s*_]*+(?:(?i:is)\b[\s*_]*+:?|:)(?:{_BEFORE}(?i:it\s+is|option|choice)\b)?{_LETTER}"
_SAID = tuple(map(re.compile, (rf"(?i:answer){_IS}", rf"(?i:option|choice){_IS}", rf"(?i:\bit\s+is)\b{_LETTER}")))
"""Each counts if none of those before is there: other options are talked about too."""
_BOXED = re.compile(rf"{_BEFORE}([A-Da-d])(?:[)\]}}*_$\s\"'`]|\\[ ,;:!])*(?:[).:].*)?", re.DOTALL)


class ChoiceData(vf.TaskData):
    """One question."""

    answer: str
    """The right answer's letter."""


def letter_in(reply: str) -> str:
    """Return the letter that a reply chooses: the first thing in its box, or after its last `answer is` or `answer:`,
    else its last `option is` or `choice:`; empty without."""
    said = reply.rpartition("</think>")[2]
    boxed = _BOXED.fullmatch(vf.extract_boxed_answer(said, strict=True))
    if boxed:
        return boxed[1].upper()
    found = next(filter(None, (pattern.findall(said) for pattern in _SAID)), [""])
    return str(found[-1])


def shuffled(question: str, answers: list[str]) -> list[str]:
    """Return the answers in an order that follows from the texts alone: the same on every machine and in every run."""
    return sorted(answers, key=lambda answer: hashlib.sha256(f"{question}\0{answer}".encode()).digest())


class ChoiceTask(vf.Task[ChoiceData]):
    """Compares letters."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1 for the right letter."""
        return float(letter_in(trace.last_reply) == self.data.answer)

    @vf.metric
    async def chosen(self, trace: vf.Trace) -> float:
        """1 where the reply chooses at all."""
        return float(bool(letter_in(trace.last_reply)))


class ChoiceConfig(vf.TasksetConfig):
    """Arguments of `gpqa`."""

    benchmark: str = "gpqa"
    """Set by the id."""
    data: str | None = None
    """JSONL file, or a folder with `gpqa.jsonl`; default: where `fetch` puts it."""
    instructions: str | None = INSTRUCTIONS
    """The system prompt."""


class Choices(vf.Taskset[ChoiceTask, ChoiceConfig]):
    """The benchmark's questions, in its order."""

    def load(self) -> Iterable[ChoiceTask]:
        """One task a row. Raises EnvError: the data is not there, cannot be read, or lacks a field."""
        config = self.config
        for number, row in enumerate(read_rows(config.benchmark, config.data), 1):
            missing = [field for field in FIELDS if not str(row.get(field) or "").strip()]
            if missing:
                raise EnvError(f"benchmark {config.benchmark!r}: row {number} has no {missing[0]!r}")
            question, *answers = (str(row[field]).strip() for field in FIELDS)
            order = shuffled(question, answers)
            lines = [f"{letter}) {answer}" for letter, answer in zip(LETTERS, order, strict=True)]
            data = ChoiceData(
                prompt="\n".join([question, "", *lines]),
                system_prompt=config.instructions,
                answer=LETTERS[order.index(answers[0])],
            )
            yield ChoiceTask(data, config.task)
