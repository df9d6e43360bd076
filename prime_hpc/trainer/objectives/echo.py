"""Echo: cross-entropy on tokens that the environment said, beside any objective.

    loss += 1/M sum_t w_t ( - log pi(t) ),    M: tokens with w_t > 0 in the whole batch

The weights come with the batch (`orchestrator/algorithms/echo.py` says which tokens and why); M is global, as every
denominator here, so that packing, sharding and splitting change nothing.

Edge cases: a micro-batch without such tokens adds a 0 that is connected to the graph.
"""

import torch

from prime_hpc.trainer.batching.micro_batches import MicroBatch


def echo_loss(micro: MicroBatch, logprobs: torch.Tensor, num_echo: int) -> torch.Tensor:
    """Return this micro-batch's share of it, 0-dim.

    Args:
        micro: `ce_weights` of all its targets; None where it has none.
        logprobs: float32 `[N]` of all its targets, differentiable.
        num_echo: M.
    """
    if micro.ce_weights is None:
        return logprobs.sum() * 0.0
    return -(micro.ce_weights * logprobs).sum() / num_echo
