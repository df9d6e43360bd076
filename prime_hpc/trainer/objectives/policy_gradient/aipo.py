"""AIPO: REINFORCE under importance sampling, the ratio clipped from above (LlamaRL, arXiv 2505.24034).

With pi the trainer's policy, mu the one that sampled the token, A the advantage, sg a stopped gradient:

    l_t = - min(rho_t, delta) A_t log pi(t),      rho_t = sg(pi(t) / mu(t))

so that the gradient is - min(rho_t, delta) A_t grad log pi(t). Unlike PPO's clip, a clipped token keeps its gradient,
with factor delta. The paper's entropy and KL terms are `trainer.loss.entropy` and `trainer.loss.kl`.

Edge cases: on-policy (rho = 1) it is plain REINFORCE. The minimum is taken between logarithms, so a ratio that would
overflow, or a token to which the engine gave probability 0 (log mu = -inf), counts as delta. delta = inf switches the
clip off (up to e^20). A non-finite advantage or log pi makes the loss non-finite, which stops the run
(`train_step.py`).
"""

import math

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import MAX_LOG_RATIO, Bounds, Targets, Terms


def aipo(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module; `trainer.loss.delta` is the clip."""
    limit = math.log(config.delta)
    difference = targets.logprobs.detach() - targets.anchor
    ratio = difference.clamp(max=min(limit, MAX_LOG_RATIO)).exp()
    return Terms(-ratio * targets.advantages * targets.logprobs, difference > limit)
