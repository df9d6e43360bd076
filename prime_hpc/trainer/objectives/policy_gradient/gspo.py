"""GSPO: ratio and clip of whole sequences (arXiv 2507.18071, eq. 5-7).

    s_i = (pi(y_i) / mu(y_i))^(1/|y_i|) = exp(mean_t log r_it)
    L = 1/G sum_i - min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i)

Computed in the paper's token form (section 4.3, eq. 13-14): every target takes s_it = sg(s_i) pi(t) / sg(pi(t)), which
has the value s_i and, summed over the sequence, the gradient of s_i; advantages may then differ within a sequence.

The bounds are much narrower than a token's (3e-4 and 4e-4), since the mean over a sequence hardly moves.

Edge cases: a sequence is what the packed batch holds as one: of a multi-turn episode all its trained tokens, tool
results left out of mean and length. Sequences never span micro-batches. mean log r saturates at +-20. A sequence
without targets has no loss.
"""

from dataclasses import replace

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import MAX_LOG_RATIO, Bounds, Targets, Terms
from prime_hpc.trainer.objectives.policy_gradient.ppo_clip import clipped_surrogate


def gspo(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    mean = targets.sequence_mean(targets.logprobs - targets.anchor)[targets.sequence]
    mean = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    terms = clipped_surrogate(targets, mean + (targets.logprobs - targets.logprobs.detach()), config, bounds)
    return replace(terms, log_ratio=mean)
