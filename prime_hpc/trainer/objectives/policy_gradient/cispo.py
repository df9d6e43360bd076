"""CISPO: the importance weight is clipped, never the update (MiniMax-M1, arXiv 2506.13585, eq. 4-5).

    l_t = - sg(clip(r_t, 1 - low, 1 + high)) A_t log pi(t),      r_t = pi(t) / mu(t)

Every token keeps a gradient, also the rare ones whose ratio moves fast. The paper uses no lower bound (`clip_low` = 1
here, the default) and tunes the upper one; ScaleRL (arXiv 2510.13786) finds weights up to 4..8 alike: `clip_high` = 4.
Both normalise over the tokens.

Edge cases: the clip is taken between logarithms, so log mu = -inf counts as 1 + high. With `clip_low` = 1 it is AIPO
with delta = 1 + clip_high.
"""

import math

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import MAX_LOG_RATIO, Bounds, Targets, Terms


def cispo(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    low = math.log(1 - bounds.low) if bounds.low < 1 else -math.inf
    high = math.log(1 + bounds.high)
    difference = targets.logprobs.detach() - targets.anchor
    weight = difference.clamp(low, min(high, MAX_LOG_RATIO)).exp()
    return Terms(-weight * targets.advantages * targets.logprobs, (difference > high) | (difference < low))
