"""Echo: how much each of the environment's tokens counts in a cross-entropy beside the RL loss.

    loss = RL loss  +  1/M sum_t w_t ( - log pi(t) ),    over the batch's M tokens with w_t > 0

Tokens are those of tool results and users' turns after the first reply: what the policy's own acts brought about, so
that it learns to foresee them (a world model of the environment at no extra rollout). Prompts and its own tokens do not
count. w_t = `orchestrator.advantage.echo.weight` times what the user's filter says. M is the batch's, over all ranks.

Edge cases: episodes of one turn hold no such token (lint warns; the batch trains as without), nor do those of a
renderer that does not say whose tokens are whose (`model.renderer: default`; the log says so). A message in several
branches of a trace counts in the first alone. Groups that do not train (equal rewards) are not on the wire at all: with
`zero = keep` their environment tokens are learned all the same.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from prime_hpc.config.named_code import import_object
from prime_hpc.config.sections.teacher import EchoConfig
from prime_hpc.envs.samples import ROLES, Sample
from prime_hpc.orchestrator.errors import OrchestratorError

_KEY = "orchestrator.advantage.echo.filter"


class Echo:
    """Weights of one sample's tokens."""

    def __init__(self, config: EchoConfig) -> None:
        """Check the arguments. Raises ConfigError: the filter cannot be imported."""
        self._weight, self._roles = config.weight, [ROLES[role] for role in config.roles]
        self._name = config.filter
        self._filter = import_object(config.filter, _KEY) if config.filter is not None else None
        self._is_told = False

    def tell_if_idle(self, traces: Sequence[tuple[int, Sample]]) -> None:
        """Say in the log, once, where rollouts of a batch have several turns, and none a token that could be learned.
        `traces`: the batch's samples, each with its rollout."""
        turns: Counter[tuple[int, int]] = Counter()
        for rollout, sample in traces:
            if sample.roles is not None:  # else it was masked: nothing of it may train
                turns[rollout, sample.trace] += sample.num_turns
        known = any(sample.roles is not None and sample.roles.any() for _, sample in traces)
        if known or self._is_told or max(turns.values(), default=0) < 2:
            return
        self._is_told = True
        logger.warning(
            "orchestrator.advantage.echo learns nothing: rollouts have several turns, and no token of them is known to "
            "be a tool's or a user's; model.renderer: default, which auto takes for a model that it does not know, "
            "cannot tell (said once)"
        )

    def weights(self, sample: Sample) -> NDArray[np.float32]:
        """float32[L], 0 where nothing is learned.
        Raises OrchestratorError: the user's filter fails or returns no such weights; names it."""
        if sample.roles is None:
            return np.zeros(sample.num_tokens, np.float32)
        chosen = np.isin(sample.roles, self._roles) & ~sample.loss_mask
        weights = np.where(chosen, np.float32(self._weight), np.float32(0.0))
        if self._filter is None:
            return weights
        try:
            factors = np.asarray(self._filter(sample), dtype=np.float32)
        except Exception as error:
            raise OrchestratorError(f"{_KEY} = {self._name} failed: {type(error).__name__}: {error}") from error
        if factors.shape != weights.shape or not np.isfinite(factors).all() or (factors < 0).any():
            raise OrchestratorError(
                f"{_KEY} = {self._name} returned shape {list(factors.shape)} for a sample of {sample.num_tokens} "
                "tokens, or factors that are negative or not finite"
            )
        return weights * factors
