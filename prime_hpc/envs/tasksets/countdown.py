"""countdown: reach a target from given numbers with + - * /, each number used exactly once. One turn.

An answer is what stands in the last `<answer>...</answer>` of the reply, or the whole reply without the tags.
"""

import ast
import operator
import random
import re
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import verifiers.v1 as vf

from prime_hpc.envs.tasksets.generated import GeneratedConfig, drawn
from prime_hpc.envs.tasksets.reasoning_gym import extract_answer

__all__ = ["CountdownTaskset"]

INSTRUCTIONS = "Think, then give the expression alone inside <answer></answer>."
_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ALLOWED = re.compile(r"[\d\s+\-*/()]+")


def evaluate(expression: str, most_characters: int | None = 200) -> tuple[Fraction, list[int]] | None:
    """Value of an expression over whole numbers, and the numbers in it; None where it is none or divides by 0.

    Only + - * / and parentheses, of a reply at most 200 characters: nothing of it is executed.
    """
    if most_characters is not None and len(expression) > most_characters:
        return None
    if not _ALLOWED.fullmatch(expression) or "**" in expression or "//" in expression:
        return None
    numbers: list[int] = []

    def value(node: ast.AST) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            left, right = value(node.left), value(node.right)
            return Fraction(_OPERATIONS[type(node.op)](left, right))
        raise ValueError(ast.dump(node))

    try:
        found = value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return found, numbers


def score(reply: str, numbers: Sequence[int], target: int) -> float:
    """1 for an expression of exactly these numbers that gives the target, 0.1 for one that gives another value."""
    found = evaluate(extract_answer(reply).rpartition("=")[0] or extract_answer(reply))
    if found is None or sorted(found[1]) != sorted(numbers):
        return 0.0
    return 1.0 if found[0] == target else 0.1


class CountdownData(vf.TaskData):
    """One puzzle."""

    numbers: list[int]
    target: int


class CountdownTask(vf.Task[CountdownData]):
    """Scores the last reply."""

    @vf.reward
    async def reached(self, trace: vf.Trace) -> float:
        """See `score`."""
        return score(trace.last_reply, self.data.numbers, self.data.target)

    @vf.metric
    async def solved(self, trace: vf.Trace) -> float:
        """1 where the target is reached."""
        return float(score(trace.last_reply, self.data.numbers, self.data.target) == 1.0)


class CountdownConfig(GeneratedConfig):
    """Arguments of `countdown`."""

    num_tasks: int = 10000
    """How many."""
    min_numbers: int = 3
    """Fewest numbers of a puzzle."""
    max_numbers: int = 4
    """Most numbers of a puzzle."""
    max_number: int = 99
    """Largest number."""
    max_target: int = 999
    """Largest target."""
    instructions: str | None = INSTRUCTIONS
    """The system prompt."""


class CountdownTaskset(vf.Taskset[CountdownTask, CountdownConfig]):
    """Puzzles that have a solution: the target is made of the numbers."""

    def load(self) -> Iterable[CountdownTask]:
        """Return the split's puzzles, in the seed's order."""
        config = self.config
        if not 2 <= config.min_numbers <= config.max_numbers <= 8 or config.max_number < 2 or config.max_target < 10:
            raise ValueError("countdown needs 2 <= min_numbers <= max_numbers <= 8, max_number >= 2, max_target >= 10")

        def draw(rng: random.Random) -> tuple[str, tuple[list[int], int]] | None:
            count = rng.randint(config.min_numbers, config.max_numbers)
            numbers = [rng.randint(1, config.max_number) for _ in range(count)]
            target = _combine(rng, numbers)
            if not 1 <= target <= config.max_target or target in numbers:
                return None
            return f"{sorted(numbers)} {target}", (numbers, target)

        for numbers, target in drawn("countdown", config, draw):
            prompt = (
                f"Make {target} from the numbers {', '.join(map(str, numbers))} with + - * / and parentheses. "
                "Use each number exactly once."
            )
            data = CountdownData(prompt=prompt, system_prompt=config.instructions, numbers=numbers, target=target)
            yield CountdownTask(data, config.task)


def _combine(rng: random.Random, numbers: Sequence[int]) -> int:
    """Return what the numbers give, two at a time, by operations drawn at random; whole at every step."""
    values = list(numbers)
    while len(values) > 1:
        rng.shuffle(values)
        a, b = values.pop(), values.pop()
        results = [a + b, a - b, a * b, *([a // b] if b and a % b == 0 else [])]
        values.append(rng.choice(results))
    return values[0]
