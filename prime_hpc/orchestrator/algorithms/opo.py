"""Baselines of least variance: one of a reply, by length, and one of each token, by what came before it.

**OPO** (arXiv 2505.23585, section 3.2) weighs rewards by length.

    A_i = r_i - sum_j l_j r_j / sum_j l_j

l is the number of sampled tokens: a sequence's squared gradient norm grows with it. The paper trains exactly on-policy
(`async_level = 0`) with the plain policy gradient (`trainer.loss.type = reinforce`).

Edge cases: equal rewards give exact zeros. Equal lengths give Dr. GRPO's advantages. No tokens at all counts as equal
lengths.

**The optimal token baseline** (arXiv 2602.07078) weighs them at every token by the squared gradient norm up to there:

    A_it = r_i - sum_j r_j W_jt / sum_j W_jt,      W_jt = sum_{u <= t} w_ju,      w_ju = 1 - pi(y_ju)

over the rollouts j that have a t-th sampled token. The paper's proxy of a token's squared norm is that of the logits,
1 - 2 pi(y) + sum_v pi(v)^2. Engines tell no sum over the vocabulary; pi(y) of a sampled y is an unbiased estimate of
it, and with that in its place the proxy is 1 - pi(y), of the same mean, and W adds up hundreds of them. pi is the
sampling engine's.

Edge cases: equal rewards of all that reach a place give exact zeros there. A token whose place no other rollout reaches
has none to compare with, and advantage 0 (verl's `handle_zero_tail` gives it the reward itself). Where all W are 0 the
baseline is the plain mean. Turns and pieces of a rollout follow each other. Agents of several roles are compared role
by role. The log shows each rollout's mean over its tokens.
"""

import numpy as np

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import (
    SPREAD_TOLERANCE,
    FloatArray,
    RewardGroup,
    Trace,
    all_equal,
    episode_means,
    traces_of,
)


def opo(group: RewardGroup, config: AdvantageConfig) -> FloatArray:
    """See the module."""
    if all_equal(group.rewards):
        return np.zeros_like(group.rewards)
    weights = group.num_tokens if group.num_tokens.any() else None
    return group.rewards - np.average(group.rewards, weights=weights)


class OptimalTokenBaseline:
    """See the module."""

    def __init__(self, config: AdvantageConfig) -> None:
        self._of_traces: dict[tuple[int, int], FloatArray] = {}

    def score_group(self, group: RewardGroup) -> FloatArray:
        """Return each rollout's mean over its tokens."""
        traces = traces_of(group)
        self._of_traces = {}
        for role in {trace.agent for trace in traces}:
            self._of_traces |= self._against_each_other(group, [trace for trace in traces if trace.agent == role])
        means = {key: float(values.mean()) if len(values) else 0.0 for key, values in self._of_traces.items()}
        return episode_means(group, means)

    def _against_each_other(self, group: RewardGroup, traces: list[Trace]) -> dict[tuple[int, int], FloatArray]:
        """(episode, trace) -> advantages of its sampled tokens, in order."""
        rewards = np.array([trace.reward for trace in traces])
        energies = [_energies(group, trace) for trace in traces]
        reaches = np.arange(max(map(len, energies)))[None] < np.array([len(e) for e in energies])[:, None]
        weights = np.zeros(reaches.shape)
        weights[reaches] = np.concatenate(energies)
        weights = np.where((weights > 0).any(0), weights, reaches)
        gaps = np.subtract.outer(rewards, rewards)
        gaps[np.abs(gaps) <= SPREAD_TOLERANCE * max(1.0, float(np.abs(rewards).max()))] = 0  # rounding
        advantages = gaps @ weights / weights.sum(0)
        keys = ((trace.episode, trace.number) for trace in traces)
        return {key: row[own] for key, row, own in zip(keys, advantages, reaches, strict=True)}

    def score_tokens(self, group: RewardGroup, advantages: FloatArray) -> list[list[FloatArray]]:
        """Return every sampled token's own; 0 at the others."""
        left = dict(self._of_traces)
        found: list[list[FloatArray]] = []
        for i, episode in enumerate(group.episodes):
            found.append([])
            for sample in episode.result.samples:
                values = np.zeros(sample.num_tokens)
                key, count = (i, sample.trace), sample.num_loss_tokens
                values[sample.loss_mask], left[key] = left[key][:count], left[key][count:]
                found[-1].append(values)
        return found


def _energies(group: RewardGroup, trace: Trace) -> FloatArray:
    """W of a trace's sampled tokens, float64[tokens]."""
    samples = [s for s in group.episodes[trace.episode].result.samples if s.trace == trace.number]
    log_pi = [s.logprobs[s.loss_mask].astype(np.float64) for s in samples]
    return np.cumsum(-np.expm1(np.minimum(np.concatenate([np.zeros(0), *log_pi]), 0)))
