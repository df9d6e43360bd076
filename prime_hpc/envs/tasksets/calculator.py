"""calculator: work out a small expression with two tools, `add` and `multiply`, that run in this process.

Tools are declared in the prompt in Qwen3's (Hermes') format; a call is `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>`. The reward is for the right final answer.
"""

import random
from collections.abc import Iterable

import verifiers.v1 as vf

from prime_hpc.envs.harness import InProcessConfig, InProcessHarness, local_tool
from prime_hpc.envs.tasksets.generated import GeneratedConfig, drawn
from prime_hpc.envs.tasksets.integers import IntegerData, IntegerToolTask

__all__ = ["CalculatorHarness", "CalculatorTaskset"]

MAX_OPERAND = 10**15
"""Keeps what a model makes the tools compute small."""


def add(a: int, b: int) -> int:
    """Add two integers."""
    return _checked(a) + _checked(b)


def multiply(a: int, b: int) -> int:
    """Multiply two integers."""
    return _checked(a) * _checked(b)


def _checked(value: int) -> int:
    if abs(value) > MAX_OPERAND:
        raise ValueError(f"operands must be between -{MAX_OPERAND} and {MAX_OPERAND}")
    return value


class CalculatorConfig(GeneratedConfig):
    """Arguments of `calculator`."""

    max_number: int = 99
    """Largest number in an expression."""


class CalculatorTaskset(vf.Taskset[IntegerToolTask, CalculatorConfig]):
    """Expressions `a + b`, `a * b` and `a * b + c`."""

    def load(self) -> Iterable[IntegerToolTask]:
        """Return the split's expressions, in the seed's order; the same one may come twice."""
        config = self.config
        if config.max_number < 3:
            raise ValueError("calculator needs max_number >= 3")

        def draw(rng: random.Random) -> tuple[str, tuple[str, int]]:
            a, b, c = (rng.randint(1, config.max_number) for _ in range(3))
            chosen = rng.choice([(f"{a} + {b}", a + b), (f"{a} * {b}", a * b), (f"{a} * {b} + {c}", a * b + c)])
            return chosen[0], chosen

        for expression, answer in drawn("calculator", config, draw):
            yield IntegerToolTask(IntegerData(prompt=f"What is {expression}?", answer=answer), config.task)


class CalculatorHarness(InProcessHarness, vf.Harness[InProcessConfig]):
    """The in-process harness with the two tools."""

    local_tools = (local_tool(add), local_tool(multiply))
