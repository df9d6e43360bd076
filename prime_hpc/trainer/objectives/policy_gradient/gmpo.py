"""GMPO: the geometric mean of a sequence's token ratios, each clipped by itself (arXiv 2507.20673, eq. 4).

    L = 1/G sum_i - A_i ( prod_t c_it )^(1/|o_i|),      log c_t = min(log r_t, high)  where A > 0
                                                        log c_t = max(log r_t, -low)  where A < 0

with r_t = pi(t) / mu(t). `gspo.py` clips the whole sequence at once, by one token's outlier; here that token alone
loses its gradient. The bounds are of log r, and wide: (e^-0.4, e^0.4).

Computed in a token form, as GSPO is: every target takes s_it = sg(s_i) c_it / sg(c_it), s_i being the geometric mean,
which has its value and, summed over the sequence, its gradient; advantages may then differ within a sequence.

Edge cases: sequences as in `gspo.py`. Logarithms saturate at +-20. A = 0: no loss, and no clip counted.
"""

import torch

from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.objectives.base import Bounds, Targets, Terms


def gmpo(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    log_ratio, advantages = targets.log_ratio(), targets.advantages
    kept = torch.where(advantages > 0, log_ratio.clamp(max=bounds.high), log_ratio.clamp(min=-bounds.low))
    geometric_mean = targets.sequence_mean(kept)[targets.sequence]
    ratio = (geometric_mean + (kept - kept.detach())).exp()
    return Terms(-ratio * advantages, (kept != log_ratio) & (advantages != 0))
