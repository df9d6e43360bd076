"""The critic's model: another sharded model with a scalar head, read where the policy predicts a token."""

import torch
import torch.distributed as dist
from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.trainer.critic.step import CriticStep
from prime_hpc.trainer.model import score_head
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.model.reference import load_beside
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel.tensor import local


def load_critic(experiment: Experiment, policy: Policy, device: torch.device) -> CriticStep | None:
    """Return the critic with its optimizer, or None where the config has none. Collective.

    A new head begins at 0: so do all values. One of a reward model stays as it is.

    Raises as `load_beside`.
    """
    config = experiment.trainer.critic
    if experiment.kind != "rl" or config is None:
        return None
    model, source = load_beside(
        experiment,
        policy,
        device,
        "trainer.critic.name",
        config.name or experiment.model.name,
        {},
        reshard_after_forward=experiment.trainer.reshard_after_forward,
        new_head=experiment.seed,
    )
    model.is_critic = True
    if model.weights is not None and score_head.is_new(model.weights.stored):
        local(model.hf.score.weight).detach().zero_()
    if dist.get_rank() == 0 and config.warmup_steps:
        logger.info(f"the critic learns alone up to step {config.warmup_steps}: weight versions stay what they are")
    trainer = experiment.trainer.for_critic
    step = CriticStep(
        model,
        build_optimizer(model, trainer.optim),
        trainer,
        max_steps=experiment.max_steps,
        normalize="token",
        device=device,
        peak_flops=1.0,  # nobody asks this step for its throughput
        with_entropy=False,
        row_tokens=experiment.micro_batch_tokens,
    )
    step.source = source
    return step
