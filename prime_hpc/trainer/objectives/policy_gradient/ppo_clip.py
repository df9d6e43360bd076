"""PPO's clipped surrogate over tokens (arXiv 1707.06347, eq. 7), with an asymmetric clip and an optional dual clip.

With r_t = pi(t) / mu(t):

    l_t = - min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t)

A token loses its gradient where a step further would only leave the trust region: A > 0 and r > 1 + high, or A < 0
and r < 1 - low. `high > low` is DAPO's clip-higher (arXiv 2503.14476, section 3.1). With `dual_clip` = c > 1, tokens
with A < 0 lose at most -c A (arXiv 1912.09729): l_t = min(-c A_t, ...) there, which bounds the only unbounded side.

Normalised over tokens, as DAPO and most PPO codes do; `grpo` and `dr_grpo` (`grpo.py`) differ in nothing else.

Edge cases: r is the distance to the engine's policy (staleness and numerics, and what earlier updates by the batch
moved), not to the start of an inner epoch. Ratios saturate at e^+-20 with gradient 0. A = 0: no gradient, and no clip
counted.
"""

import torch

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import Bounds, Targets, Terms


def clipped_surrogate(targets: Targets, log_ratio: torch.Tensor, config: LossConfig, bounds: Bounds) -> Terms:
    """Return the surrogate for ratios given as logarithms [N] (of tokens here, of sequences in `gspo.py`)."""
    advantages, ratio = targets.advantages, log_ratio.exp()
    free = ratio * advantages
    inside = ratio.clamp(1 - bounds.low, 1 + bounds.high) * advantages
    gain = torch.minimum(free, inside)
    clipped = inside < free
    if config.dual_clip is not None:
        floor = config.dual_clip * advantages
        bounded = (advantages < 0) & (gain < floor)
        gain, clipped = torch.where(bounded, floor, gain), clipped | bounded
    return Terms(-gain, clipped)


def ppo_clip(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    return clipped_surrogate(targets, targets.log_ratio(), config, bounds)
