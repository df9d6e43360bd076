"""guess-number: find a number by asking; every wrong guess is answered with `higher` or `lower`. Several turns.

The environment plays the user, so one episode is one conversation, and one training sample.
"""

import random
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

from prime_hpc.envs.lazy_runtime import LazyBox
from prime_hpc.envs.tasksets.generated import GeneratedConfig, OneSeatConfig, drawn
from prime_hpc.envs.tasksets.integers import last_integer

__all__ = ["GuessNumberEnv", "GuessNumberTaskset"]


class GuessNumberData(vf.TaskData):
    """One number to find."""

    low: int
    high: int
    secret: int
    max_guesses: int


class GuessNumberTask(vf.Task[GuessNumberData]):
    """Scores the game that the environment recorded."""

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        """0 when not found; else 1 for the first guess down to 0.5 for the last allowed one."""
        guesses = trace.info.get("guesses_to_find")
        if guesses is None:
            return 0.0
        return 1.0 - 0.5 * (guesses - 1) / max(1, self.data.max_guesses - 1)

    @vf.metric
    async def solved(self, trace: vf.Trace) -> float:
        """1 when found."""
        return float(trace.info.get("guesses_to_find") is not None)


class GuessNumberConfig(GeneratedConfig):
    """Arguments of `guess-number`."""

    max_number: int = 100
    """Ranges lie within 1..max_number."""
    max_guesses: int = 7
    """Guesses a game allows."""


class GuessNumberTaskset(vf.Taskset[GuessNumberTask, GuessNumberConfig]):
    """Games over random ranges."""

    def load(self) -> Iterable[GuessNumberTask]:
        """Return the split's games, in the seed's order; the same game may come twice."""
        config = self.config
        if config.max_number < 3 or config.max_guesses < 1:
            raise ValueError("guess-number needs max_number >= 3 and max_guesses >= 1")

        def draw(rng: random.Random) -> tuple[str, tuple[int, int, int]]:
            low, high = sorted(rng.sample(range(1, config.max_number + 1), 2))
            secret = rng.randint(low, high)
            return f"{low} {high} {secret}", (low, high, secret)

        for low, high, secret in drawn("guess-number", config, draw):
            prompt = f"Guess my number from {low} to {high}. Answer with a number."
            data = GuessNumberData(prompt=prompt, low=low, high=high, secret=secret, max_guesses=config.max_guesses)
            yield GuessNumberTask(data, config.task)


def judge(reply: str, secret: int) -> str | None:
    """Answer a guess (the reply's last number); None when it is right."""
    guess = last_integer(reply)
    if guess is None:
        return "Answer with a number."
    if guess == secret:
        return None
    return "higher" if guess < secret else "lower"


class GuessNumberEnv(vf.Env[OneSeatConfig]):
    """Plays the user who knows the number."""

    async def run(self, task: Any, agents: Any) -> None:
        """One game."""
        async with LazyBox() as box, agents.agent.interaction(task, runtime=box) as game:
            segment = await game.turn()
            for guess in range(1, task.data.max_guesses + 1):
                if segment.terminated:
                    return
                answer = judge(segment.last_reply, task.data.secret)
                if answer is None:
                    game.trace.info["guesses_to_find"] = guess
                    return
                if guess < task.data.max_guesses:
                    segment = await game.turn(answer)
