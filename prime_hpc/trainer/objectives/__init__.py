"""Objectives of the trainer: from log-probabilities of the trained tokens to a loss.

`policy_gradient/` has about one file an objective, `nll.py` imitation, `preference.py` those of pairs; they are found
by their config name (`trainer.loss.type`). `rl.py` joins one with what may stand beside any: `correction.py`, `kl.py`,
`covariance.py`, `entropy.py`; `normalize.py` gives every token its share of the batch. Nothing loops over sequences,
and nothing depends on how they are packed, sharded or split into micro-batches.

To add one: write a file in `policy_gradient/` with one function, and its row in `config.named_code.OBJECTIVES`; or keep
it in your own package and state `trainer.loss.type = module:function`.
"""

from collections.abc import Callable
from functools import partial

import torch

from prime_hpc.config.experiment import Experiment
from prime_hpc.trainer.batching.micro_batches import MicroBatch
from prime_hpc.trainer.objectives.base import LossStats, Targets, Terms, get_objective
from prime_hpc.trainer.objectives.nll import echo_loss, sft_loss
from prime_hpc.trainer.objectives.normalize import target_weights
from prime_hpc.trainer.objectives.preference import preference_loss
from prime_hpc.trainer.objectives.rl import normalization, requires_reference, rl_loss

__all__ = [
    "LossStats",
    "MicroBatchLoss",
    "Targets",
    "Terms",
    "echo_loss",
    "get_objective",
    "loss_of",
    "normalization",
    "preference_loss",
    "requires_reference",
    "rl_loss",
    "sft_loss",
    "target_weights",
]


MicroBatchLoss = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, LossStats]]
"""(micro-batch, log-probabilities float32[N], weights float32[N]) -> loss (0-dim), statistics."""


def loss_of(experiment: Experiment) -> MicroBatchLoss:
    """Return the configured objective of an RL run, of pairs of preferences, else the mean negative log-likelihood.
    Raises ConfigError: there is none of that name: now, and not in the first step."""
    if experiment.kind != "rl":
        preference = experiment.sft.preference
        return sft_loss if preference is None else partial(preference_loss, preference)
    get_objective(experiment.trainer.loss.type)
    return partial(rl_loss, experiment.trainer.loss)
