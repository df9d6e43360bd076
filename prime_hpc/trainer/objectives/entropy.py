"""Entropy of the policy at the trained tokens: a bonus for it, and the tokens where it is high.

    loss -= alpha sum_t w_t H_t,      H_t = - sum_v pi(v) log pi(v)   over the whole vocabulary, differentiable

With a target the coefficient is controlled (Skywork-OR1, arXiv 2505.22312), H the mean over a step's tokens:

    c += delta  where H <= target,  else  c -= delta,   within [0, max_coef];      alpha = c where H <= target, else 0

The report measures H on the rollouts before the update; here, as in TRL, it is that of the step before, so that no step
computes anything twice.

**High entropy alone** (Wang et al. 2025, "Beyond the 80/20 Rule", arXiv 2506.01939, eq. 5): a token trains where H_t is
among the ceil(share N) highest of all N tokens of the batch, over all ranks; divisors count what is left out.

Edge cases: a step without targets leaves the coefficient as it is. Tokens that tie for the last place all train. Of a
truncated distribution (`orchestrator.sampling.top_p`) it is the entropy of what is left.
"""

import numpy as np
import torch

from prime_hpc.config.sections.trainer import EntropyConfig


class EntropyBonus:
    """The bonus' coefficient over a run's steps."""

    def __init__(self, config: EntropyConfig) -> None:
        self._config = config
        self._values = np.array([config.coef, 0.0])  # c; H of the last step
        self.state = torch.from_numpy(self._values)
        """float64[2], in host memory, the same on all ranks: what a checkpoint keeps."""

    @property
    def coef(self) -> float:
        """Alpha of the next step."""
        if self._config.target is None:
            return self._config.coef
        coef, entropy = self._values.tolist()
        return float(coef) if entropy <= self._config.target else 0.0

    def observe(self, entropy: float) -> None:
        """Take note of a step's mean entropy, in nats a token."""
        if self._config.target is not None:
            change = self._config.delta if entropy <= self._config.target else -self._config.delta
            self._values[:] = min(max(self._values[0] + change, 0.0), self._config.max_coef), entropy
