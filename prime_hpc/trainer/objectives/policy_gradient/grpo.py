"""GRPO: PPO's clip, averaged within each sequence first (DeepSeekMath, arXiv 2402.03300, eq. 3).

    L = 1/G sum_i 1/|o_i| sum_t - min(r_it A_it, clip(r_it, 1 - low, 1 + high) A_it)  +  beta KL_3(pi || ref)

G counts all rollouts of the step here, not one group's, those of groups without signal included: the mean over the
prompts of the paper's sum, whose groups are of one size. o_i is a rollout: pieces of one (a turn each, where the
renderer cannot extend the tokens so far) share its weight. `trainer.loss.denominators = trained` counts pieces, and
those that train. Advantages with the group's standard deviation (`orchestrator.advantage.type = grpo`) or without are
the orchestrator's; the KL term to a reference model is `trainer.loss.kl` with its defaults (estimator k3; the paper's
beta is 0.04), over the groups without signal too.

Short sequences weigh more a token than long ones. **Dr. GRPO** is without that length bias (arXiv 2503.20783, section
3.2):

    L = 1/G sum_i 1/M sum_t - min(r_it A_it, clip(r_it, 1 - low, 1 + high) A_it)

The sequence's own length |o_i| gives way to a constant M (`trainer.loss.batch_tokens`, default `seq_len`), so that a
wrong answer is not punished less a token for being long. The other half of Dr. GRPO, advantages without the standard
deviation, is the orchestrator's: `orchestrator.advantage.type = dr_grpo`.

Edge cases: as in `ppo_clip.py`. The size of Dr. GRPO's gradient grows with the mean length over M; the norm clip sees
that.
"""

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import Bounds, Targets, Terms
from prime_hpc.trainer.objectives.policy_gradient.ppo_clip import clipped_surrogate


def grpo(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    return clipped_surrogate(targets, targets.log_ratio(), config, bounds)


def dr_grpo(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    return clipped_surrogate(targets, targets.log_ratio(), config, bounds)
