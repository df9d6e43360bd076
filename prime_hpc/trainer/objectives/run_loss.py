"""The loss that a run minimises, micro-batch by micro-batch, by the run's kind."""

from collections.abc import Callable
from functools import partial

import torch

from prime_hpc.config.experiment import Experiment
from prime_hpc.trainer.batching.micro_batches import MicroBatch
from prime_hpc.trainer.objectives.base import LossStats
from prime_hpc.trainer.objectives.nll import sft_loss
from prime_hpc.trainer.objectives.rl import rl_loss

MicroBatchLoss = Callable[[MicroBatch, torch.Tensor, torch.Tensor], tuple[torch.Tensor, LossStats]]
"""(micro-batch, log-probabilities float32[N], weights float32[N]) -> loss (0-dim), statistics."""


def loss_of(experiment: Experiment) -> MicroBatchLoss:
    """Return the configured objective of an RL run, else the mean negative log-likelihood."""
    return partial(rl_loss, experiment.trainer.loss) if experiment.kind == "rl" else sft_loss
