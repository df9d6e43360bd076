"""Dr. GRPO: GRPO without its length bias (arXiv 2503.20783, section 3.2).

    L = 1/G sum_i 1/M sum_t - min(r_it A_it, clip(r_it, 1 - low, 1 + high) A_it)

G counts as in `grpo.py`. The sequence's own length |o_i| gives way to a constant M (`trainer.loss.batch_tokens`,
default `seq_len`), so that a wrong answer is not punished less a token for being long. The other half of Dr. GRPO,
advantages without the standard deviation, is the orchestrator's: `orchestrator.advantage.type = dr_grpo`.

Edge cases: as in `ppo_clip.py`. The gradient's size grows with the mean length over M; the norm clip sees that.
"""

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import Bounds, Targets, Terms
from prime_hpc.trainer.objectives.ppo_clip import clipped_surrogate


def dr_grpo(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    return clipped_surrogate(targets, targets.log_ratio(), config, bounds)
