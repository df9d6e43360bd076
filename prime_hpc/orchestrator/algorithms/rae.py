"""RAE, role-conditioned advantage estimation: a moving average of each role's own rewards as the baseline (SPIRAL,
arXiv 2506.24119, section 3.3, eq. 4-5).

For the reward R of role p's trace in a game of environment G:

    b_Gp <- decay b_Gp + (1 - decay) R;      A = R - b_Gp

One baseline for each environment and role (verifiers' `trace.agent.name`), moved trace by trace in the order of the
rollouts, before the trace is scored: the trace's own reward is in it with weight 1 - decay, which scales all advantages
by `decay` and biases none. It suits games, where the group's mean says nothing (in a zero-sum one the mean over the
seats is always 0) and the first move may be worth something, and groups of one.

Edge cases: with one agent an episode it is one baseline an environment. Baselines start at 0 and are part of the
orchestrator's state with every batch, so a resumed run goes on with them; a batch that is built again after a resume
starts from the state of the batch before it. A role that appears later in a run, or one that was saved before there
were roles, starts from the environment's baseline where that has one for no role. All samples (branches) of a trace
share its advantage; the episode's own, which the log shows, is the mean over its traces.
"""

from typing import Any

from prime_hpc.config.sections.advantage import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import (
    FloatArray,
    RewardGroup,
    episode_means,
    has_roles,
    token_advantages,
    traces_of,
)

_ANY = ""
"""Stands for all roles in a state that knows none."""


class RoleAdvantage:
    """See the module."""

    def __init__(self, config: AdvantageConfig) -> None:
        self._decay = config.decay
        self._baselines: dict[str, dict[str, float]] = {}
        self._per_trace: dict[tuple[int, int], float] = {}

    def score_group(self, group: RewardGroup) -> FloatArray:
        """Advantages in episode order; moves the roles' baselines."""
        baselines = self._baselines.setdefault(group.env, {})
        self._per_trace = {}
        for trace in traces_of(group):
            old = baselines.get(trace.agent, baselines.get(_ANY, 0.0))
            baselines[trace.agent] = new = self._decay * old + (1 - self._decay) * trace.reward
            self._per_trace[trace.episode, trace.number] = trace.reward - new
        return episode_means(group, self._per_trace)

    def score_tokens(self, group: RewardGroup, advantages: FloatArray) -> list[list[FloatArray]] | None:
        """Each trace's advantage on all its tokens; nothing where every episode has one trace."""
        return token_advantages(group, self._per_trace) if has_roles(group) else None

    def state_dict(self) -> dict[str, Any]:
        """environment -> role -> baseline."""
        return {env: dict(roles) for env, roles in self._baselines.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up stored baselines; a bare number is that of all the environment's roles."""
        self._baselines = {
            env: {role: float(b) for role, b in stored.items()} if isinstance(stored, dict) else {_ANY: float(stored)}
            for env, stored in state.items()
        }
