"""Objectives of the trainer: from log-probabilities of the trained tokens to a loss.

One file an objective, found by its config name (`trainer.loss.type`); `rl.py` joins one with the optional
importance correction and KL penalty, `normalize.py` gives every token its share of the batch. Nothing loops over
sequences, and nothing depends on how they are packed, sharded or split into micro-batches.

To add one: write a file here with one function under `@register("name")`, import it below and add the name to
`config.sections.trainer.ObjectiveName`; or keep it in your own package and state `trainer.loss.type = module:function`.
"""

from prime_hpc.trainer.objectives import aipo, cispo, dppo, dr_grpo, grpo, gspo, ipo, nll, ppo_clip, reinforce
from prime_hpc.trainer.objectives.base import Bounds, LossStats, Targets, Terms, get_objective, register
from prime_hpc.trainer.objectives.echo import echo_loss
from prime_hpc.trainer.objectives.normalize import target_weights
from prime_hpc.trainer.objectives.rl import normalization, requires_reference, rl_loss
from prime_hpc.trainer.objectives.sft import sft_loss

__all__ = [
    "Bounds",
    "LossStats",
    "Targets",
    "Terms",
    "aipo",
    "cispo",
    "dppo",
    "dr_grpo",
    "echo_loss",
    "get_objective",
    "grpo",
    "gspo",
    "ipo",
    "nll",
    "normalization",
    "ppo_clip",
    "register",
    "reinforce",
    "requires_reference",
    "rl_loss",
    "sft_loss",
    "target_weights",
]
