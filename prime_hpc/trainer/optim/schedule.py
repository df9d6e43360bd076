"""Learning-rate schedules. The rate is a pure function of the step: nothing of it needs saving."""

import math

import torch

from prime_hpc.config import Experiment
from prime_hpc.config.sections.trainer import SchedulerConfig


def learning_rate_factor(config: SchedulerConfig, step: int, max_steps: int) -> float:
    """Return the share of the peak learning rate that step `step` uses.

    Warm-up: step i of w uses i / w, so the first step already moves and step w has the peak. The decay falls from the
    peak, which its first step still has, towards `min_lr_ratio`, which the step after its last one would have (as in
    Hugging Face's schedules): no step of the run is for nothing, not even the only one. Where `decay_steps` ends
    earlier than the run, the rest has `min_lr_ratio`.

    `step`: 1-based, of the run: all updates by one batch have the same.
    Raises ValueError: warm-up and decay do not fit into the run."""
    warmup = config.warmup_steps
    if config.type == "wsd" and config.decay_steps is not None and warmup + config.decay_steps > max_steps:
        raise ValueError(
            f"trainer.scheduler: warmup_steps ({warmup}) and decay_steps ({config.decay_steps}) together exceed "
            f"max_steps ({max_steps})"
        )
    if step <= warmup:
        return step / warmup
    if config.type == "constant":
        return 1.0
    after = max(max_steps - warmup, 0)
    # Of two steps at least, where there are as many: the first one still has the peak.
    default = min(after, max(2, math.ceil(max_steps / 10))) if config.type == "wsd" else after
    decay = default if config.decay_steps is None else config.decay_steps
    start = max_steps - decay if config.type == "wsd" else warmup
    if step <= start:
        return 1.0
    done = min((step - start - 1) / decay, 1.0) if decay else 1.0
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.type == "cosine" else 1.0 - done
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape


def check_schedule(experiment: Experiment) -> None:
    """Raise a ValueError for a learning-rate schedule that does not fit into the run."""
    if (last := experiment.num_steps) is not None:
        learning_rate_factor(experiment.trainer.scheduler, last, last)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
