"""Where log-probabilities and objectives used to live: the old import path. New code imports the two modules."""

from prime_hpc.trainer.logprobs import token_logprobs
from prime_hpc.trainer.objectives import LossStats, sft_loss, target_weights

__all__ = ["LossStats", "sft_loss", "target_weights", "token_logprobs"]
