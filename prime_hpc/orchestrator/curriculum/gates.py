"""Admission gates: which completed groups join a batch. Made by `curriculum` from `orchestrator.curriculum.gates`.

Rejecting groups of equal rewards and sampling others instead is DAPO's dynamic sampling (Yu et al. 2025,
arXiv:2503.14476, section 3.2): batches keep their size, and every group in them has a gradient.
"""

import math
from typing import Any

import numpy as np

from prime_hpc.config.named_code import import_object
from prime_hpc.config.secret import revealed
from prime_hpc.config.sections.curriculum import GateConfig
from prime_hpc.orchestrator.algorithms.base import RewardGroup, centered, has_roles, score_by_role
from prime_hpc.orchestrator.curriculum.base import CompletedGroup, Gate, make_object


class RewardRange:
    """Mean reward within [low, high]."""

    def __init__(self, low: float | None, high: float | None) -> None:
        self._low = -math.inf if low is None else low
        self._high = math.inf if high is None else high

    def admits(self, group: CompletedGroup) -> bool:
        """Return whether the group's mean reward lies in the range."""
        return self._low <= float(group.rewards.mean()) <= self._high


class AdvantageRange:
    """max_i |r_i - mean(r)| within [low, high]; without `low`: above 0 by more than rounding. Role by role where an
    episode has several agents.

    These are Dr. GRPO's advantages, whatever algorithm trains: gates look at groups one by one as they complete, and an
    algorithm that remembers (RAE) may score a group once only.
    """

    def __init__(self, low: float | None, high: float | None) -> None:
        self._low = np.nextafter(0.0, 1.0) if low is None else low
        self._high = math.inf if high is None else high

    def admits(self, group: CompletedGroup) -> bool:
        """Return whether the group's largest distance to the mean lies in the range."""
        whole = RewardGroup(group.rewards, np.zeros(len(group.rewards), np.int64), episodes=group.episodes)
        if has_roles(whole):
            largest = max(map(abs, score_by_role(whole, lambda same: centered(same.rewards)).values()))
        else:
            largest = float(np.abs(centered(group.rewards)).max())
        return bool(self._low <= largest <= self._high)


class _Function:
    """A user's own function as a gate."""

    def __init__(self, function: Any, args: dict[str, Any]) -> None:
        self._function, self._args = function, args

    def admits(self, group: CompletedGroup) -> bool:
        return self._function(group, **self._args)


def make_gate(config: GateConfig, key: str) -> Gate:
    """Return the gate that one entry of the config describes; `key` is where it stands.
    Raises ConfigError: your own cannot be imported or made."""
    if config.type == "reward_range":
        return RewardRange(config.low, config.high)
    if config.type == "advantage_range":
        return AdvantageRange(config.low, config.high)
    found = import_object(config.type, key)
    arguments = revealed(config.args)
    return make_object(found, arguments, "admits", key) if isinstance(found, type) else _Function(found, arguments)
