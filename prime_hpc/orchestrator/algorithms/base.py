"""What every algorithm takes, and the registry by config name. Used by the files beside it and by `loop`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from prime_hpc.config.errors import ConfigError, Problem
from prime_hpc.config.secret import revealed
from prime_hpc.config.sections.names import is_import_path
from prime_hpc.config.sections.orchestrator import AdvantageConfig
from prime_hpc.orchestrator.episodes import Episode
from prime_hpc.orchestrator.own import import_own

FloatArray = NDArray[np.float64]

SPREAD_TOLERANCE = 1e-9
"""Rewards that differ by less than this share of their size are equal: their difference is rounding, not signal."""

_KEY = "orchestrator.advantage.type"


@dataclass(frozen=True)
class RewardGroup:
    """The G rollouts of one prompt that an algorithm scores."""

    rewards: FloatArray
    """float64[G], finite, penalties already taken off."""
    num_tokens: NDArray[np.int64]
    """int64[G], sampled tokens of each rollout."""
    env: str = ""
    """Label of the environment."""
    position: int = 0
    """The prompt's place in the stream."""
    episodes: Sequence[Episode] = field(default=(), repr=False)
    """The rollouts themselves: tokens, named rewards, metrics."""
    references: Sequence[Sequence[NDArray[np.float32]]] = field(default=(), repr=False)
    """Of an algorithm with a teacher: its log-probability of every token of every sample of every rollout, float32[L];
    0 for a sample's first token, which nothing predicts."""

    @property
    def name(self) -> str:
        """The group in words, for messages."""
        return f"the group of prompt {self.position}" + (f" ({self.env})" if self.env else "")


class Algorithm(Protocol):
    """What scores groups; stateless ones are made by `register`."""

    def score_group(self, group: RewardGroup) -> FloatArray:
        """Advantages float64[G].

        An algorithm whose advantages differ within a rollout also has `score_tokens(group, advantages)`, called with
        what this returned, -> for every rollout, for each of its samples, float64[L]; read where tokens train.
        """

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON, stored with every batch; {} where nothing is remembered."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""


@dataclass(frozen=True)
class Registered:
    """An algorithm by name: how it is made, and the smallest group that it can score."""

    name: str
    build: Callable[[AdvantageConfig], Algorithm]
    min_group: int
    teacher: Literal["", "model", "self"] = ""
    """Who scores the tokens before it is called: nobody, `orchestrator.teacher`, or the policy itself, shown the task's
    demonstration."""


class _Stateless:
    """An algorithm that is one function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        self._function, self._arguments, self._named = function, arguments, named

    def score_group(self, group: RewardGroup) -> FloatArray:
        return self._function(group, *self._arguments, **self._named)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


_REGISTRY: dict[str, Registered] = {}


def register(*names: str, min_group: int = 2, teacher: Literal["", "model", "self"] = "") -> Callable[[Any], Any]:
    """Make a function `(group, config)`, or a class made with the config, known as `names`.

    Groups below `min_group` rollouts are unusable and never get there.
    """

    def decorate(found: Any) -> Any:
        for name in names:
            assert name not in _REGISTRY, f"advantage {name} is registered twice"
            build = found if isinstance(found, type) else lambda config: _Stateless(found, config)
            _REGISTRY[name] = Registered(name, build, min_group, teacher)
        return found

    return decorate


def get_algorithm(name: str) -> Registered:
    """The algorithm called `name`, or the user's own at `module:function` or `module:Class`.

    Its own one may have an attribute `min_group`; without, it must score groups of any size from 1. With an attribute
    `teacher` (`model` or `self`) its groups come with `references`.

    Raises:
        ConfigError: unknown, or the import fails; says why.
    """
    if name in _REGISTRY:
        return _REGISTRY[name]
    if not is_import_path(name):
        raise ConfigError(Problem(f"{name!r} is unknown; known: {', '.join(sorted(_REGISTRY))}", _KEY))
    found = import_own(name, _KEY)
    if isinstance(found, type) and not hasattr(found, "score_group"):
        raise ConfigError(Problem(f"the class {name!r} has no score_group(group)", _KEY))

    def build(config: AdvantageConfig) -> Algorithm:
        arguments = revealed(config.args)
        return found(**arguments) if isinstance(found, type) else _Stateless(found, **arguments)

    teacher: Literal["", "model", "self"] = getattr(found, "teacher", "")
    if teacher not in ("", "model", "self"):
        raise ConfigError(Problem(f"{name!r} has teacher = {teacher!r}: 'model', 'self' or nothing", _KEY))
    return Registered(name, build, int(getattr(found, "min_group", 1)), teacher)


def centered(rewards: FloatArray) -> FloatArray:
    """r - mean(r), exactly zero where all rewards are equal (a plain difference leaves rounding behind)."""
    return np.zeros_like(rewards) if all_equal(rewards) else rewards - rewards.mean()


def all_equal(rewards: FloatArray) -> bool:
    """Whether rewards differ by nothing but rounding."""
    spread = rewards.max() - rewards.min()
    return bool(spread <= SPREAD_TOLERANCE * max(1.0, float(np.abs(rewards).max())))
