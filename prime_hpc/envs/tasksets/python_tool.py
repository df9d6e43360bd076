"""python-tool: questions on whole numbers, too long to work out by heart, and a tool that runs Python in a sandbox.

The tool `python` runs a program and shows what it prints. Each call is an interpreter of its own; files that one has
written are there for the next. The reward is for the right last number of the final reply.
"""

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import verifiers.v1 as vf

from prime_hpc.envs.harness import InProcessConfig, InProcessHarness, LocalTool, local_tool
from prime_hpc.envs.sandbox.sandbox_runtime import SandboxRuntime, explain
from prime_hpc.envs.tasksets.generated import GeneratedConfig, drawn
from prime_hpc.envs.tasksets.integers import IntegerData, IntegerToolTask

__all__ = ["PythonToolHarness", "PythonToolTaskset"]

MOST_SHOWN = 2000
"""Characters of a program's output that the model sees."""
SYSTEM = "Answer with a number. The tool `python` runs Python programs; print what you want to see."


def _digit_sum(rng: random.Random) -> tuple[str, int]:
    a, b = rng.randint(3, 99), rng.randint(20, 200)
    return f"the sum of the decimal digits of {a} to the power of {b}", sum(map(int, str(a**b)))


def _remainder(rng: random.Random) -> tuple[str, int]:
    a, b, m = rng.randint(3, 999), rng.randint(100, 9999), rng.randint(100, 9999)
    return f"the remainder of {a} to the power of {b} divided by {m}", pow(a, b, m)


def _divisors(rng: random.Random) -> tuple[str, int]:
    n = rng.randint(1000, 99999)
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return f"the sum of all divisors of {n}, {n} included", sum({*small, *(n // d for d in small)})


def _coprime(rng: random.Random) -> tuple[str, int]:
    n, most = rng.randint(10, 999), rng.randint(100, 999)
    found = sum(math.gcd(n, k) == 1 for k in range(1, most + 1))
    return f"the number of whole numbers from 1 to {most} that have no common divisor with {n} but 1", found


_KINDS: tuple[Callable[[random.Random], tuple[str, int]], ...] = (_digit_sum, _remainder, _divisors, _coprime)


class PythonToolConfig(GeneratedConfig):
    """Arguments of `python-tool`."""


class PythonToolTaskset(vf.Taskset[IntegerToolTask, PythonToolConfig]):
    """Digit sums, remainders, divisors, common divisors."""

    def load(self) -> Iterable[IntegerToolTask]:
        """Return the split's questions, in the seed's order; the same one may come twice."""
        config = self.config

        def draw(rng: random.Random) -> tuple[str, tuple[str, int]]:
            asked = rng.choice(_KINDS)(rng)
            return asked[0], asked

        for question, answer in drawn("python-tool", config, draw):
            data = IntegerData(prompt=f"What is {question}?", system_prompt=SYSTEM, answer=answer)
            yield IntegerToolTask(data, config.task)


class PythonToolHarness(InProcessHarness, vf.Harness[InProcessConfig]):
    """The in-process harness with the tool."""

    needs_sandbox = True

    def tools_of(self, runtime: Any) -> tuple[LocalTool, ...]:
        """Return `python`, which runs in the episode's sandbox."""
        assert isinstance(runtime, SandboxRuntime), "needs_sandbox"

        async def python(code: str) -> str:
            """Run a Python program and return what it prints."""
            ended = await runtime.command(program=code, may_exit=True)
            printed = (ended.stdout + ended.stderr).decode(errors="replace")
            shown = printed if len(printed) <= MOST_SHOWN else f"{printed[:MOST_SHOWN]}\n... and more"
            how = explain(ended)
            return shown if how == "passed" else f"{shown}\n{how}".strip()

        return (local_tool(python),)
