"""Base of samplers and gates, and the import of a user's own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from prime_hpc.config.errors import ConfigError
from prime_hpc.orchestrator.rollouts.episodes import Episode
from prime_hpc.orchestrator.rollouts.groups import Group
from prime_hpc.orchestrator.rollouts.prompts import Draw


@dataclass(frozen=True)
class CompletedGroup:
    """The usable rollouts of one prompt, as samplers and gates see them."""

    env: str
    source: int
    """Its number."""
    task: int
    position: int
    """The prompt's place in the stream."""
    rewards: NDArray[np.float64]
    """float64[G], finite, as the environment gave them: the algorithm's penalties are not taken off."""
    episodes: Sequence[Episode] = field(default=(), repr=False)
    """The rollouts themselves: tokens, named rewards, metrics."""

    @classmethod
    def of(cls, group: Group, env: str) -> "CompletedGroup":
        """Collect what a `groups.Group` says of its usable rollouts."""
        episodes, prompt = group.usable, group.prompt
        rewards = np.array([episode.result.reward for episode in episodes], dtype=np.float64)
        return cls(env, prompt.source, prompt.task, prompt.position, rewards, episodes)

    @property
    def name(self) -> str:
        """The group in words, for messages."""
        return f"the group of prompt {self.position} ({self.env}, task {self.task})"


class TaskSampler(Protocol):
    """Chooses the task of every new position."""

    def choose(self, draw: Draw) -> int:
        """Return a task of the draw's environment, 0 <= task < `draw.num_tasks`."""

    def observe(self, group: CompletedGroup) -> None:
        """Take a group that joined a batch or was rejected. Each position comes once over all attempts of a run."""


class Gate(Protocol):
    """Says which groups join a batch."""

    def admits(self, group: CompletedGroup) -> bool:
        """Return whether the group may train."""


def state_of(thing: Any, key: str) -> dict[str, Any]:
    """`thing.state_dict()`, or {} where it remembers nothing."""
    state: dict[str, Any] = thing.state_dict() if hasattr(thing, "state_dict") else {}
    assert isinstance(state, dict), f"{key}: state_dict() returned a {type(state).__name__}"
    return state


def load_state(thing: Any, state: dict[str, Any]) -> None:
    """Take up what `state_of` gave."""
    if state and hasattr(thing, "load_state_dict"):
        thing.load_state_dict(state)


def make_object(found: Any, args: dict[str, Any], method: str, key: str) -> Any:
    """Return an object of a user's own class, which must have `method`.
    Raises ConfigError: it has not, or does not take `args`; names the key."""
    if not isinstance(found, type) or not callable(getattr(found, method, None)):
        raise ConfigError(f"{found.__name__!r} is not a class with a method {method}", key)
    try:
        return found(**args)
    except TypeError as error:
        raise ConfigError(f"{found.__name__}(**args) failed: {error}", key) from error
