"""simple-math: whole-number arithmetic of a few terms, in digits, without tools. One turn; the last number counts."""

import random
from collections.abc import Iterable

import verifiers.v1 as vf

from prime_hpc.envs.tasksets.countdown import evaluate
from prime_hpc.envs.tasksets.generated import GeneratedConfig, drawn
from prime_hpc.envs.tasksets.integers import IntegerData, IntegerTask

__all__ = ["SimpleMathTaskset"]

INSTRUCTIONS = "Work it out step by step and end with the answer as a number."


class SimpleMathConfig(GeneratedConfig):
    """Arguments of `simple-math`."""

    num_tasks: int = 5000
    """How many."""
    min_terms: int = 2
    """Fewest terms of an expression."""
    max_terms: int = 4
    """Most terms of an expression."""
    max_number: int = 99
    """Largest number in an expression."""
    operations: str = "+-*"
    """Some of + - *."""
    question: str = "What is {}?"
    """The user's words; `{}` stands for the expression."""
    instructions: str | None = INSTRUCTIONS
    """The system prompt; none: the chat template's own, where it has one."""


class SimpleMathTaskset(vf.Taskset[IntegerTask, SimpleMathConfig]):
    """Expressions with the usual precedence."""

    def load(self) -> Iterable[IntegerTask]:
        """Return the split's questions, in the seed's order; the same one may come twice."""
        config = self.config
        if not 2 <= config.min_terms <= config.max_terms <= 20 or config.max_number < 3:
            raise ValueError("simple-math needs 2 <= min_terms <= max_terms <= 20 and max_number >= 3")
        if not config.operations or set(config.operations) - set("+-*"):
            raise ValueError(f"simple-math knows the operations + - *, not {config.operations!r}")
        if config.question.count("{}") != 1:
            raise ValueError(f"simple-math needs one {{}} in `question`, for the expression, not {config.question!r}")

        def draw(rng: random.Random) -> tuple[str, str]:
            expression = str(rng.randint(1, config.max_number))
            for _ in range(rng.randint(config.min_terms, config.max_terms) - 1):
                expression += f" {rng.choice(config.operations)} {rng.randint(1, config.max_number)}"
            return expression, expression

        for expression in drawn("simple-math", config, draw):
            found = evaluate(expression, most_characters=None)
            assert found is not None
            data = IntegerData(
                prompt=config.question.replace("{}", expression),
                system_prompt=config.instructions,
                answer=int(found[0]),
            )
            yield IntegerTask(data, config.task)
