"""The critic's model: another sharded model with a scalar head, read where the policy predicts a token."""

import torch
import torch.distributed as dist
from loguru import logger

from prime_hpc.config import Experiment
from prime_hpc.config.errors import ConfigError
from prime_hpc.trainer.critic.step import CriticStep
from prime_hpc.trainer.model import score_head
from prime_hpc.trainer.model.load_policy import load_policy, resolve_source
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel.tensor import local


def load_critic(experiment: Experiment, policy: Policy, device: torch.device) -> CriticStep | None:
    """Return the critic with its optimizer, or None where the config has none. Collective.

    A new head begins at 0: so do all values. One of a reward model stays as it is.

    Raises:
        ConfigError: its vocabulary or layout is not the policy's.
        ValueError: it cannot be loaded.
    """
    config = experiment.trainer.critic
    if experiment.kind != "rl" or config is None:
        return None
    name = config.name or experiment.model.name
    if dist.get_rank() == 0:
        resolve_source(name)  # one download, then everyone finds the files
    dist.barrier()
    source = resolve_source(name)
    model = load_policy(
        experiment.model.model_copy(update={"name": name, "lora": None}),
        source,
        policy.parallel,
        device,
        reshard_after_forward=experiment.trainer.reshard_after_forward,
        chunk_tokens=experiment.trainer.logits_chunk_tokens,
        context=experiment.context,
        rows=experiment.trainer.rows,
        new_head=experiment.seed,
    )
    model.is_critic = True
    own, others = (p.hf.config.get_text_config().vocab_size for p in (policy, model))
    if own != others:
        raise ConfigError(
            f"{name} has {others} tokens, the policy has {own}: it reads none of its text", "trainer.critic.name"
        )
    if model.single_rows != policy.single_rows:
        families = [type(p.hf).__name__ for p in (policy, model)]
        message = f"{' and '.join(families)} lay out samples differently (one a row, or packed): take one family"
        raise ConfigError(message, "trainer.critic.name")
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
