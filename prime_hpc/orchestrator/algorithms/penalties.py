"""Penalties, taken off the rewards before an algorithm compares them.

Each returns float64[G], never negative, for the G rollouts of one group.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from prime_hpc.config.sections.advantage import LengthPenaltyConfig, RepetitionPenaltyConfig, SoftOverlongConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray
from prime_hpc.orchestrator.rollouts.episodes import Episode


def length_penalty(config: LengthPenaltyConfig, rewards: FloatArray, episodes: Sequence[Episode]) -> FloatArray:
    """Linear in length, relative to the group's longest: s (output o_i/max o + input p_i/max p + turns t_i/max t).

    s is the group's mean reward (at least 0), so that only what already works is made short; 1 without `by_success`.
    """
    scale = max(0.0, float(rewards.mean())) if config.by_success else 1.0
    counts = (
        (config.output, [e.num_sampled_tokens for e in episodes]),
        (config.input, [e.num_prompt_tokens for e in episodes]),
        (config.turns, [sum(s.num_turns for s in e.result.samples) for e in episodes]),
    )
    return scale * sum((weight * _share(np.array(values)) for weight, values in counts), np.zeros(len(episodes)))


def _share(values: NDArray[np.int64]) -> FloatArray:
    return values / max(1, int(values.max()))


def repetition_penalty(config: RepetitionPenaltyConfig, episodes: Sequence[Episode]) -> FloatArray:
    """coef x the share of a rollout's n-grams that are repeats: 1 - distinct / all (compare arXiv 2502.03373, app. E).

    n-grams lie within one stretch of sampled tokens; a rollout without any (too short) has no penalty.
    """
    return config.coef * np.array([_repeated_share(config.ngram, e) for e in episodes])


def _repeated_share(n: int, episode: Episode) -> float:
    grams = [np.lib.stride_tricks.sliding_window_view(run, n) for run in sampled_runs(episode) if len(run) >= n]
    if not grams:
        return 0.0
    every = np.concatenate(grams)
    return 1.0 - len(np.unique(every, axis=0)) / len(every)


def sampled_runs(episode: Episode) -> Iterator[NDArray[np.int32]]:
    """Yield the stretches of sampled tokens of an episode, in order."""
    for sample in episode.result.samples:
        edges = np.flatnonzero(np.diff(sample.loss_mask, prepend=False, append=False))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            yield sample.token_ids[start:stop]


def soft_overlong_penalty(config: SoftOverlongConfig, episodes: Sequence[Episode], max_tokens: int) -> FloatArray:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), times coef.

    0 up to max - buffer tokens, then rising evenly to 1 at max tokens, 1 beyond. The paper's answers have one turn;
    of several turns, each is held against the limit of a turn and the longest counts, or all together against that of
    the episode (`config.per`).
    `max_tokens`: of one turn; stands for `config.max_tokens` where that is not set.
    """
    if config.per == "turn":
        longest = [max((len(run) for run in sampled_runs(e)), default=0) for e in episodes]
        num_tokens = np.array(longest, dtype=np.int64)
    else:
        num_tokens = np.array([e.num_sampled_tokens for e in episodes], dtype=np.int64)
    limit = config.max_tokens or max_tokens
    buffer = min(config.buffer or max(1, limit // 5), limit)
    return config.coef * np.clip((num_tokens - (limit - buffer)) / buffer, 0.0, 1.0)
