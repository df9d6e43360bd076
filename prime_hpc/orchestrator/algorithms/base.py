"""Base of every algorithm, and how one is found by its config name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from prime_hpc.config.errors import ConfigError
from prime_hpc.config.named_code import ALGORITHMS, import_object
from prime_hpc.config.secret import revealed
from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.config.sections.names import is_import_path
from prime_hpc.orchestrator.rollouts.episodes import Episode

FloatArray = NDArray[np.float64]

SPREAD_TOLERANCE = 1e-9
"""Rewards that differ by less than this share of their size are equal: their difference is rounding, not signal."""

Named = Mapping[str, Sequence[float]]
"""As `Sample.rewards`."""

_KEY = "orchestrator.advantage.type"


@dataclass(frozen=True)
class RewardGroup:
    """The G rollouts of one prompt that an algorithm scores."""

    rewards: FloatArray
    """float64[G], finite, penalties already taken off."""
    num_tokens: NDArray[np.int64]
    """int64[G], sampled tokens of each rollout."""
    env: str = ""
    position: int = 0
    """The prompt's place in the stream."""
    episodes: Sequence[Episode] = field(default=(), repr=False)
    """The rollouts themselves: tokens, named rewards, metrics."""
    named: Sequence[Named] = field(default=(), repr=False)
    """Of each rollout: the rewards that add up to its own before penalties, by name; none of one that was cut off."""
    references: Sequence[Sequence[NDArray[np.float32]]] = field(default=(), repr=False)
    """Of an algorithm with a teacher: its log-probability of every token of every sample of every rollout, float32[L];
    0 for a sample's first token, which nothing predicts."""

    greedy: "RewardGroup | None" = None
    """Of an algorithm that asks for one: the prompt's greedy rollout, or a role's traces of it, as a group; it is none
    of `episodes`."""

    @property
    def name(self) -> str:
        """The group in words, for messages."""
        return f"the group of prompt {self.position}" + (f" ({self.env})" if self.env else "")


@dataclass(frozen=True)
class Trace:
    """One agent's part in one rollout: what the environment gave a reward of its own."""

    episode: int
    """Index of the rollout in its group."""
    number: int
    """Index of the trace among the rollout's trained ones."""
    agent: str
    """The role: the environment's name of the agent."""
    reward: float
    """The episode's penalties taken off."""
    num_tokens: int
    """Sampled tokens, over all its samples."""
    named: Named
    """As in `RewardGroup`."""


def traces_of(group: RewardGroup) -> list[Trace]:
    """Every rollout's traces, in order; a rollout that kept no tokens (a deadline) counts for each of the roles."""
    found: list[Trace] = []
    empty: list[int] = []
    for i, episode in enumerate(group.episodes):
        penalty = episode.result.reward - float(group.rewards[i])
        by_number: dict[int, list[Any]] = {}
        for sample in episode.result.samples:
            by_number.setdefault(sample.trace, []).append(sample)
        for number, samples in by_number.items():
            num_tokens = sum(sample.num_loss_tokens for sample in samples)
            first = samples[0]
            found.append(Trace(i, number, first.agent, first.reward - penalty, num_tokens, first.rewards))
        if not by_number:
            empty.append(i)
    roles = list(dict.fromkeys(trace.agent for trace in found))
    found += [Trace(i, n, role, float(group.rewards[i]), 0, {}) for i in empty for n, role in enumerate(roles)]
    return sorted(found, key=lambda trace: trace.episode)


def score_by_role(
    group: RewardGroup, score: Callable[[RewardGroup], FloatArray], min_group: int = 1
) -> dict[tuple[int, int], float]:
    """(episode, trace) -> advantage, every trace compared with those of the same role in the whole group.

    In self-play the mean over the seats says nothing (in a zero-sum game it is 0 whoever wins), and seats differ: the
    first move may be worth something. Roles with fewer than `min_group` traces get 0.
    """
    by_role: dict[str, list[Trace]] = {}
    for trace in traces_of(group):
        by_role.setdefault(trace.agent, []).append(trace)
    found: dict[tuple[int, int], float] = {}
    others = traces_of(group.greedy) if group.greedy is not None else []
    for role, traces in by_role.items():
        greedy = np.array([trace.reward for trace in others if trace.agent == role])
        if group.greedy is not None and not others:  # a deadline cut it off: as of the rollouts, for each of the roles
            greedy = group.greedy.rewards
        beside = RewardGroup(greedy, np.zeros(len(greedy), np.int64)) if len(greedy) else None
        rewards = np.array([t.reward for t in traces])
        lengths = np.array([t.num_tokens for t in traces], dtype=np.int64)
        named = [t.named for t in traces]
        part = RewardGroup(rewards, lengths, group.env, group.position, named=named, greedy=beside)
        scores = score(part) if len(traces) >= min_group else np.zeros_like(rewards)
        found |= {(t.episode, t.number): a for t, a in zip(traces, scores.tolist(), strict=True)}
    return found


def episode_means(group: RewardGroup, per_trace: dict[tuple[int, int], float]) -> FloatArray:
    """float64[G], each rollout's mean over its traces: what the log shows of advantages that differ within it."""
    values: list[list[float]] = [[] for _ in group.episodes]
    for (episode, _), advantage in per_trace.items():
        values[episode].append(advantage)
    return np.array([float(np.mean(v)) if v else 0.0 for v in values])


def token_advantages(group: RewardGroup, per_trace: dict[tuple[int, int], float]) -> list[list[FloatArray]]:
    """For every rollout, each of its samples, float64[L]: all tokens get their trace's advantage."""
    return [
        [np.full(sample.num_tokens, per_trace[i, sample.trace]) for sample in episode.result.samples]
        for i, episode in enumerate(group.episodes)
    ]


def has_roles(group: RewardGroup) -> bool:
    """Return whether any rollout has more than one trained trace."""
    return any(sample.trace for episode in group.episodes for sample in episode.result.samples)


class Algorithm(Protocol):
    """Scores groups. One that remembers anything has `state_dict()`, plain JSON that is stored with every batch, and
    `load_state_dict(state)`."""

    def score_group(self, group: RewardGroup) -> FloatArray:
        """Advantages float64[G].

        An algorithm whose advantages differ within a rollout also has `score_tokens(group, advantages)`, called with
        what this returned, -> for every rollout, for each of its samples, float64[L], read where tokens train; None
        where they do not differ in this group.
        """


@dataclass(frozen=True)
class FoundAlgorithm:
    """An algorithm by name: how it is made, and the smallest group that it can score."""

    name: str
    build: Callable[[AdvantageConfig], Algorithm]
    min_group: int
    teacher: Literal["", "model", "self", "peer"] = ""
    """As in `AlgorithmEntry`."""
    greedy: bool = False
    """As in `AlgorithmEntry`."""


class _Stateless:
    """An algorithm that is one function of rollouts, whatever these are."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        self._function, self._arguments, self._named = function, arguments, named

    def score_group(self, group: RewardGroup) -> FloatArray:
        return self._function(group, *self._arguments, **self._named)


class _ByRole(_Stateless):
    """A function that compares rewards: of rollouts, or where these have several traces, of each role's traces."""

    def __init__(self, function: Callable[..., Any], config: AdvantageConfig, min_group: int) -> None:
        super().__init__(function, config)
        self._min_group = min_group
        self._per_trace: dict[tuple[int, int], float] | None = None

    def score_group(self, group: RewardGroup) -> FloatArray:
        self._per_trace = None
        if not has_roles(group):
            return super().score_group(group)
        self._per_trace = score_by_role(group, super().score_group, self._min_group)
        return episode_means(group, self._per_trace)

    def score_tokens(self, group: RewardGroup, advantages: FloatArray) -> list[list[FloatArray]] | None:
        return None if self._per_trace is None else token_advantages(group, self._per_trace)


def get_algorithm(name: str) -> FoundAlgorithm:
    """Return the algorithm called `name`, or the user's own at `module:function` or `module:Class`.

    Its own one may have an attribute `min_group`; without, it must score groups of any size from 1. With an attribute
    `teacher` (`model`, `self`, `peer`) its groups come with `references`, with one `greedy` that is true
    with a greedy rollout.
    Raises ConfigError: unknown, or the import fails; says why.
    """
    if (entry := ALGORITHMS.get(name)) is not None:
        known = import_object(entry.place, _KEY)
        make = known if isinstance(known, type) else lambda config: _ByRole(known, config, entry.min_group)
        return FoundAlgorithm(name, make, entry.min_group, entry.teacher, entry.greedy)
    if not is_import_path(name):
        raise ConfigError(f"{name!r} is unknown; known: {', '.join(sorted(ALGORITHMS))}", _KEY)
    found = import_object(name, _KEY)
    if isinstance(found, type) and not hasattr(found, "score_group"):
        raise ConfigError(f"the class {name!r} has no score_group(group)", _KEY)

    def build(config: AdvantageConfig) -> Algorithm:
        arguments = revealed(config.args)
        return found(**arguments) if isinstance(found, type) else _Stateless(found, **arguments)

    teacher: Literal["", "model", "self", "peer"] = getattr(found, "teacher", "")
    if teacher not in ("", "model", "self", "peer"):
        raise ConfigError(f"{name!r} has teacher = {teacher!r}: 'model', 'self', 'peer' or nothing", _KEY)
    return FoundAlgorithm(
        name, build, int(getattr(found, "min_group", 1)), teacher, bool(getattr(found, "greedy", False))
    )


def centered(rewards: FloatArray) -> FloatArray:
    """r - mean(r), exactly zero where all rewards are equal (a plain difference leaves rounding behind)."""
    return np.zeros_like(rewards) if all_equal(rewards) else rewards - rewards.mean()


def all_equal(rewards: FloatArray) -> bool:
    """Return whether rewards differ by nothing but rounding."""
    spread = rewards.max() - rewards.min()
    return bool(spread <= SPREAD_TOLERANCE * max(1.0, float(np.abs(rewards).max())))
