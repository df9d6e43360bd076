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

from collections import defaultdict

import numpy as np

from prime_hpc.config.sections.orchestrator import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray, RewardGroup, centered, register


@register("hierarchical_grpo", min_group=1)
class HierarchicalGRPO:
    """See the module."""

    def __init__(self, config: AdvantageConfig) -> None:
        self._within = set(config.within)

    def score_group(self, group: RewardGroup) -> FloatArray:
        """Mean of each episode's traces."""
        per_trace = self._score_traces(group)
        return np.array(
            [
                np.mean([per_trace[i, trace] for trace in dict.fromkeys(s.trace for s in episode.result.samples)])
                for i, episode in enumerate(group.episodes)
            ]
        )

    def score_tokens(self, group: RewardGroup, advantages: FloatArray) -> list[list[FloatArray]]:
        """Every sample's tokens get their trace's advantage."""
        per_trace = self._score_traces(group)
        return [
            [np.full(sample.num_tokens, per_trace[i, sample.trace]) for sample in episode.result.samples]
            for i, episode in enumerate(group.episodes)
        ]

    def _score_traces(self, group: RewardGroup) -> dict[tuple[int, int], float]:
        """(episode, trace) -> advantage."""
        traces = {(i, s.trace): s for i, e in enumerate(group.episodes) for s in e.result.samples}
        acting: defaultdict[tuple[int, str], int] = defaultdict(int)
        for (i, _), sample in traces.items():
            acting[i, sample.agent] += 1
        solvers = self._within or {agent for (_, agent), count in acting.items() if count > 1}
        peers: defaultdict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
        for (i, trace), sample in traces.items():
            peers[i if sample.agent in solvers else -1, sample.agent].append((i, trace))
        penalties = [e.result.reward - r for e, r in zip(group.episodes, group.rewards.tolist(), strict=True)]
        found: dict[tuple[int, int], float] = {}
        for keys in peers.values():
            rewards = np.array([traces[key].reward - penalties[key[0]] for key in keys])
            found |= dict(zip(keys, centered(rewards).tolist(), strict=True))
        return found
