"""RAE: a moving average of the environment's own rewards as the baseline (SPIRAL, arXiv 2506.24119, section 3.3).

    A_i = r_i - b;      then  b <- decay b + (1 - decay) r_i

One baseline an environment, updated rollout by rollout; each is scored before its own reward counts. It suits games
where the group's mean says nothing (zero-sum), and groups of one.

Edge cases: baselines start at 0 and are part of the orchestrator's state with every batch, so a resumed run goes on
with them. A batch that is built again after a resume starts from the state of the batch before it.
"""

from typing import Any

import numpy as np

from prime_hpc.config.sections.orchestrator import AdvantageConfig
from prime_hpc.orchestrator.algorithms.base import FloatArray, RewardGroup, register


@register("rae", min_group=1)
class RoleAdvantage:
    """See the module."""

    def __init__(self, config: AdvantageConfig) -> None:
        self._decay = config.decay
        self._baselines: dict[str, float] = {}

    def score_group(self, group: RewardGroup) -> FloatArray:
        """Advantages in episode order; moves the environment's baseline."""
        baseline = self._baselines.get(group.env, 0.0)
        advantages = np.empty_like(group.rewards)
        for i, reward in enumerate(group.rewards.tolist()):
            advantages[i] = reward - baseline
            baseline = self._decay * baseline + (1 - self._decay) * reward
        self._baselines[group.env] = baseline
        return advantages

    def state_dict(self) -> dict[str, Any]:
        """Baseline of each environment by its label."""
        return dict(self._baselines)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up stored baselines."""
        self._baselines = {name: float(value) for name, value in state.items()}
