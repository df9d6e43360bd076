"""Negative log-likelihood of the batch's tokens, whoever sampled them: supervised fine-tuning, and over rollouts
imitation (`orchestrator.advantage.type = sft`).

    l_t = - log pi(t)

Advantages are not looked at, and there is no importance ratio; a KL penalty may stand beside it.

Edge cases: what the engine reported does not matter here, so log mu = -inf is harmless; the mismatch alarm is off,
since another model may have sampled the tokens. All trained tokens count, those of bad rollouts too.

Echo is the same on tokens that the environment said, beside any objective:

    loss += 1/M sum_t w_t ( - log pi(t) ),    M: tokens with w_t > 0 in the whole batch

The weights come with the batch (`orchestrator/algorithms/echo.py` says which tokens and why); M is global, as every
denominator here, so that packing, sharding and splitting change nothing.
"""

import torch

from prime_hpc.config.named_code import Bounds
from prime_hpc.config.sections.trainer import LossConfig
from prime_hpc.trainer.batching.micro_batches import MicroBatch
from prime_hpc.trainer.objectives.base import LossStats, Targets, Terms


def nll(targets: Targets, config: LossConfig, bounds: Bounds) -> Terms:
    """See the module."""
    loss = -targets.logprobs
    return Terms(loss, torch.zeros_like(loss, dtype=torch.bool))


def sft_loss(micro: MicroBatch | None, logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
    """- sum_t w_t log pi(t); with `token` weights the mean over the batch.

    Args:
        micro: not looked at; other losses do.
        logprobs: float32 `[N]`, differentiable.
        weights: float32 `[N]`.
    """
    return -(weights * logprobs).sum(), LossStats({"nll": -logprobs.detach().sum()}, {})


def echo_loss(micro: MicroBatch, logprobs: torch.Tensor, num_echo: int) -> torch.Tensor:
    """Return this micro-batch's share of the echo, 0-dim; without such tokens a 0 that is connected to the graph.

    Args:
        micro: `ce_weights` of all its targets; None where it has none.
        logprobs: float32 `[N]` of all its targets, differentiable.
        num_echo: M.
    """
    if micro.ce_weights is None:
        return logprobs.sum() * 0.0
    return -(micro.ce_weights * logprobs).sum() / num_echo
