"""Supervised fine-tuning: the targets' negative log-likelihood, l_t = - log pi(t)."""

import torch

from prime_hpc.trainer.objectives.base import LossStats


def sft_loss(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
    """- sum_t w_t log pi(t); with `token` weights the mean over the batch.

    Args:
        logprobs: float32 `[N]`, differentiable.
        weights: float32 `[N]`.
    """
    return -(weights * logprobs).sum(), LossStats({"nll": -logprobs.detach().sum()}, {})
