"""Hierarchical groups for episodes of several agents: each is compared with its own kind, at its own level.

An episode is one proposal: a proposer's trace, then several solvers' traces at it. With r the reward of a trace:

    solver s of episode i:     A_is = r_is - mean over the solver's traces of episode i
    proposer of episode i:     A_i  = r_i - mean over the proposer's traces of all the group's episodes

Solvers of different proposals face different tasks, so that a baseline across them would reward easy proposals; the
proposals of one prompt are what the proposer is compared over. It is GRPO without the standard deviation
(arXiv 2402.03300; 2503.20783) with the group chosen by level; no paper of its own.

The level is read off the episodes: an agent (verifiers' `trace.agent.name`) that acts more than once in some episode of
the group is a solver, any other a proposer; `orchestrator.advantage.within` names the solvers instead.

Edge cases: with one agent that acts once an episode it is `dr_grpo`. Equal rewards and lone traces give exact zeros.
Penalties, which are the episode's, are taken off each of its traces' rewards. All samples (branches) of a trace share
its advantage; the episode's own, which the log shows, is the mean over its traces.
"""

from collections import Counter, defaultdict

import numpy as np

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import (
    FloatArray,
    RewardGroup,
    Trace,
    centered,
    episode_means,
    token_advantages,
    traces_of,
)


class HierarchicalGRPO:
    """See the module."""

    def __init__(self, config: AdvantageConfig) -> None:
        self._within = set(config.within)

    def score_group(self, group: RewardGroup) -> FloatArray:
        """Mean of each episode's traces."""
        return episode_means(group, self._score_traces(group))

    def score_tokens(self, group: RewardGroup, advantages: FloatArray) -> list[list[FloatArray]]:
        """Every sample's tokens get their trace's advantage."""
        return token_advantages(group, self._score_traces(group))

    def _score_traces(self, group: RewardGroup) -> dict[tuple[int, int], float]:
        """(episode, trace) -> advantage."""
        traces = traces_of(group)
        acting = Counter((trace.episode, trace.agent) for trace in traces)
        solvers = self._within or {agent for (_, agent), count in acting.items() if count > 1}
        peers: defaultdict[tuple[int, str], list[Trace]] = defaultdict(list)
        for trace in traces:
            peers[trace.episode if trace.agent in solvers else -1, trace.agent].append(trace)
        found: dict[tuple[int, int], float] = {}
        for same in peers.values():
            scores = centered(np.array([trace.reward for trace in same]))
            found |= {(t.episode, t.number): a for t, a in zip(same, scores.tolist(), strict=True)}
        return found
