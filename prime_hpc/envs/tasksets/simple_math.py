"""simple-math: whole-number arithmetic of a few terms, in digits, without tools. One turn; the last number counts."""

import random
from collections.abc import Iterable
from typing import Literal

import verifiers.v1 as vf

from prime_hpc.envs.tasksets.countdown import evaluate
from prime_hpc.envs.tasksets.integers import IntegerData, IntegerTask
from prime_hpc.envs.tasksets.splitting import split_of

__all__ = ["SimpleMathTaskset"]

INSTRUCTIONS = "Work it out step by step and end with the answer as a number."


class SimpleMathConfig(vf.TasksetConfig):
    """Arguments of `simple-math`."""

    split: Literal["train", "eval"] = "train"
    """The set of questions; the two sets have none in common."""
    seed: int = 0
    """Selection from the split's questions, and its order."""
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
        rng = random.Random(f"simple-math:{config.split}:{config.seed}")
        count = 0
        while count < config.num_tasks:
            expression = str(rng.randint(1, config.max_number))
            for _ in range(rng.randint(config.min_terms, config.max_terms) - 1):
                expression += f" {rng.choice(config.operations)} {rng.randint(1, config.max_number)}"
            if split_of(expression) != config.split:
                continue
            count += 1
            found = evaluate(expression)
            assert found is not None
            data = IntegerData(
                prompt=config.question.replace("{}", expression),
                system_prompt=config.instructions,
                answer=int(found[0]),
            )
            yield IntegerTask(data, config.task)
