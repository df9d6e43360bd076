"""From the rollouts of one group to advantages and to which of them train.

rewards - penalties -> overlong handling -> algorithm -> advantages of rollouts or tokens, finite or not at all
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray, RewardGroup, get_algorithm
from prime_hpc.orchestrator.algorithms.penalties import length_penalty, repetition_penalty, soft_overlong_penalty
from prime_hpc.orchestrator.errors import OrchestratorError
from prime_hpc.orchestrator.rollouts.episodes import Episode

Tokens = list[list[NDArray[np.float32]]]
References = Sequence[Sequence[NDArray[np.float32]]]


@dataclass(frozen=True)
class Scores:
    """Result of `Scorer.score` for G rollouts."""

    rewards: FloatArray
    """float64[G], penalties taken off where the rollout is compared."""
    advantages: FloatArray
    """float64[G], 0 where the rollout does not train."""
    kept: NDArray[np.bool_]
    """bool[G], rollouts that may train."""
    problem: str = ""
    """Why the group could not be scored; nothing of it trains then."""
    tokens: Tokens | None = None
    """Advantages of every token, where those of one rollout differ: for each rollout, each sample, float32[L], 0 where
    nothing trains."""

    @property
    def has_signal(self) -> bool:
        """True if any token that may train has an advantage other than 0."""
        return any_signal(self.advantages, self.tokens)


def any_signal(advantages: FloatArray, tokens: Tokens | None) -> bool:
    """Return whether any token has an advantage other than 0; `tokens`: those of each, where they differ."""
    if tokens is None:
        return bool(advantages.any())
    return any(bool(sample.any()) for rollout in tokens for sample in rollout)


class Scorer:
    """One configured algorithm, with whatever it remembers."""

    def __init__(self, config: AdvantageConfig, *, max_tokens: int, in_loss: bool = False) -> None:
        """Args:
            max_tokens: `orchestrator.sampling.max_tokens`, the default limit of the soft overlong penalty on a turn.
            in_loss: the loss has the teacher's word (`trainer.loss.distillation`): the algorithm is not told it.
        Raises ConfigError: the algorithm is unknown or cannot be imported."""
        registered = get_algorithm(config.type)
        self.min_group, self.teacher, self.greedy = registered.min_group, registered.teacher, registered.greedy
        self._config, self._max_tokens, self._in_loss = config, max_tokens, in_loss
        self._algorithm: Any = registered.build(config)

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state as plain JSON."""
        state: dict[str, Any] = self._algorithm.state_dict() if hasattr(self._algorithm, "state_dict") else {}
        assert isinstance(state, dict), f"{self._config.type}.state_dict() returned a {type(state).__name__}"
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        if state and hasattr(self._algorithm, "load_state_dict"):
            self._algorithm.load_state_dict(state)

    def score(
        self,
        episodes: Sequence[Episode],
        *,
        env: str = "",
        position: int = 0,
        references: References = (),
        greedy: Episode | None = None,
    ) -> Scores:
        """Advantages of one group's usable rollouts, in their order; `references` and `greedy` as in `RewardGroup`.

        A group that the algorithm cannot score (too few rollouts left, advantages that are not finite) is named in
        a warning and does not train.
        Raises OrchestratorError: the algorithm itself fails; names it and the group.
        """
        num_tokens = np.array([e.num_sampled_tokens for e in episodes], dtype=np.int64)
        truncated = np.array([e.result.truncated for e in episodes], dtype=bool)
        rewards = np.array([e.result.reward for e in episodes], dtype=np.float64)
        scored = ~truncated if self._config.overlong == "drop" else np.ones(len(episodes), dtype=bool)
        kept = ~truncated if self._config.overlong in ("drop", "mask") else scored
        lacks_greedy = greedy is not None and greedy.result.truncated and self._config.overlong == "drop"
        if scored.sum() < self.min_group or lacks_greedy:  # as if they had failed; nothing is left to compare
            return Scores(rewards, np.zeros_like(rewards), np.zeros_like(kept))
        chosen = [e for e, use in zip(episodes, scored, strict=True) if use]
        rewards[scored], beside = self._less_penalties(rewards[scored], chosen, greedy)
        told = () if self._in_loss else references
        kept_references = [r for r, use in zip(told, scored, strict=True) if use] if told else ()
        # none of an episode whose reward is the mean of several traces, of which one alone has tokens
        firsts = [next(iter(e.result.samples), None) for e in chosen]
        named = [
            first.rewards if first is not None and first.reward == episode.result.reward else {}
            for first, episode in zip(firsts, chosen, strict=True)
        ]
        group = RewardGroup(rewards[scored], num_tokens[scored], env, position, chosen, named, kept_references, beside)
        advantages = np.zeros_like(rewards)
        advantages[scored] = self._score_group(group)
        tokens = self._score_tokens(group, advantages[scored], episodes, kept)
        advantages[~kept] = 0.0
        finite = tokens is None or all(np.isfinite(s).all() for rollout in tokens for s in rollout)
        with np.errstate(over="ignore"):
            of_batch = advantages.astype(np.float32)
        if not (finite and np.isfinite(of_batch).all()):
            problem = (
                f"{group.name}: {self._config.type} gives the advantages {_short(advantages)}"
                f"{'' if finite else ', and to tokens some that are not finite,'} for the rewards {_short(rewards)}"
            )
            logger.warning(f"{problem}; the group does not train")
            return Scores(rewards, np.zeros_like(rewards), np.zeros_like(kept), problem)
        return Scores(rewards, advantages, kept, tokens=tokens)

    def _less_penalties(
        self, rewards: FloatArray, episodes: Sequence[Episode], greedy: Episode | None
    ) -> tuple[FloatArray, RewardGroup | None]:
        """Rewards with the penalties taken off; a greedy rollout's, too, as of one more of the group."""
        beside = [] if greedy is None else [greedy]
        every, all_rewards = [*episodes, *beside], np.append(rewards, [e.result.reward for e in beside])
        all_rewards -= self._penalties(all_rewards, every, np.array([e.result.truncated for e in every], dtype=bool))
        if greedy is None:
            return all_rewards, None
        lengths = np.array([greedy.num_sampled_tokens], np.int64)
        return all_rewards[:-1], RewardGroup(all_rewards[-1:], lengths, episodes=beside)

    def _penalties(self, rewards: FloatArray, episodes: Sequence[Episode], truncated: NDArray[np.bool_]) -> FloatArray:
        """Of rollouts that are compared with each other."""
        config = self._config
        assert np.isfinite(rewards).all(), "an episode whose reward is not finite is not usable"
        penalty = np.zeros_like(rewards)
        if config.length is not None:
            penalty += length_penalty(config.length, rewards, episodes)
        if config.repetition is not None:
            penalty += repetition_penalty(config.repetition, episodes)
        if config.soft_overlong is not None:
            penalty += soft_overlong_penalty(config.soft_overlong, episodes, self._max_tokens)
        if config.overlong == "penalize":
            penalty += config.overlong_penalty * truncated
        return penalty

    def _score_group(self, group: RewardGroup) -> FloatArray:
        name = self._config.type
        with self._named(group), np.errstate(all="ignore"):  # what is not finite is looked at, and named, afterwards
            advantages = np.asarray(self._algorithm.score_group(group), dtype=np.float64)
        if advantages.shape != group.rewards.shape:
            raise OrchestratorError(
                f"orchestrator.advantage.type = {name} returned shape {list(advantages.shape)} for {group.name}, which "
                f"has {len(group.rewards)} rollouts"
            )
        return advantages

    def _score_tokens(
        self, group: RewardGroup, advantages: FloatArray, episodes: Sequence[Episode], kept: NDArray[np.bool_]
    ) -> Tokens | None:
        """Of all `episodes`, zeros for those that do not train; None where the algorithm does not look at tokens."""
        score = getattr(self._algorithm, "score_tokens", None)
        if score is None:
            return None
        with self._named(group), np.errstate(all="ignore"):
            by_rollout = score(group, advantages)
            if by_rollout is None:
                return None
            scored = {id(e): rows for e, rows in zip(group.episodes, by_rollout, strict=True)}
            found = []
            for episode, trains in zip(episodes, kept.tolist(), strict=True):
                samples = episode.result.samples
                given = scored[id(episode)] if trains else [np.zeros(s.num_tokens) for s in samples]
                rows = [np.asarray(row) for row in given]
                if [row.shape for row in rows] != [(s.num_tokens,) for s in samples]:
                    shapes = [list(row.shape) for row in rows]
                    raise ValueError(f"shapes {shapes} for samples of {[s.num_tokens for s in samples]} tokens")
                found.append(
                    [np.where(s.loss_mask, row, 0.0).astype(np.float32) for s, row in zip(samples, rows, strict=True)]
                )
            return found

    @contextmanager
    def _named(self, group: RewardGroup) -> Iterator[None]:
        """Re-raise an algorithm's error with its name and the group's."""
        try:
            yield
        except Exception as error:
            raise OrchestratorError(
                f"orchestrator.advantage.type = {self._config.type} failed on {group.name}, rewards "
                f"{_short(group.rewards)}: {type(error).__name__}: {error}"
            ) from error


def _short(values: FloatArray) -> str:
    shown = ", ".join(f"{v:g}" for v in values[:8])
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"
