"""GRPO: PPO's clip, averaged within each sequence first (DeepSeekMath, arXiv 2402.03300, eq. 3).

    L = 1/G sum_i 1/|o_i| sum_t - min(r_it A_it, clip(r_it, 1 - low, 1 + high) A_it)  +  beta KL_3(pi || ref)

G counts all rollouts of the step here, not one group's, those of groups without signal included: the mean over the
prompts of the paper's sum, whose groups are of one size. o_i is a rollout: pieces of one (a turn each, where the
renderer cannot extend the tokens so far) share its weight. `trainer.loss.denominators = trained` counts pieces, and
those that train. Advantages with the group's standard deviation (`orchestrator.advantage.type = grpo`) or without are
the orchestrator's; the KL term to a reference model is `trainer.loss.kl` with its defaults (estimator k3; the paper's
beta is 0.04), over the groups without signal too.

Edge cases: as in `ppo_clip.py`. Short sequences weigh more a token than long ones; that is the length bias that
`dr_grpo.py` removes.
"""

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import Bounds, Targets, Terms
from prime_hpc.trainer.objectives.ppo_clip import clipped_surrogate


def grpo(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    return clipped_surrogate(targets, targets.log_ratio(), config, bounds)
