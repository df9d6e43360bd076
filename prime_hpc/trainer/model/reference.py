"""Models beside the policy, and the frozen one that a KL penalty keeps it close to (`trainer.loss.kl`)."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prime_hpc.config import Experiment
from prime_hpc.config.errors import ConfigError
from prime_hpc.trainer.model.load_policy import load_policy, resolve_source
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.objectives import requires_reference


def load_beside(
    experiment: Experiment,
    policy: Policy,
    device: torch.device,
    key: str,
    name: str,
    changes: dict[str, Any],
    **how: Any,
) -> tuple[Policy, Path]:
    """Return another model, sharded as the policy is, and where it was read. Collective.

    Args:
        key: of the config, that names it.
        changes: what is otherwise in its section `model` than in the policy's.
        how: as of `load_policy`.

    Raises:
        ConfigError: its vocabulary or layout is not the policy's.
        ValueError: it cannot be loaded.
    """
    if dist.get_rank() == 0:
        resolve_source(name, key)  # one download, then everyone finds the files
    dist.barrier()
    source = resolve_source(name, key)
    other = load_policy(
        experiment.model.model_copy(update={"name": name, "lora": None, **changes}),
        source,
        policy.parallel,
        device,
        chunk_tokens=experiment.trainer.logits_chunk_tokens,
        context=experiment.context,
        rows=experiment.trainer.rows,
        key=key,
        **how,
    )
    own, others = (p.hf.config.get_text_config().vocab_size for p in (policy, other))
    if own != others:
        raise ConfigError(f"{name} has {others} tokens, the policy has {own}: take a model with the policy's", key)
    if other.single_rows != policy.single_rows:
        families = " and ".join(type(p.hf).__name__ for p in (policy, other))
        raise ConfigError(f"{families} lay out samples differently (one a row, or packed): take one family", key)
    return other, source


def load_reference(experiment: Experiment, policy: Policy, device: torch.device) -> Policy | None:
    """Return the sharded reference model, or None where the objective needs none. Collective.

    It costs the memory of one more set of sharded weights; it has no gradients and no optimizer. With adapters it is
    the policy itself: the engine switches the adapter off.

    Raises as `load_beside`.
    """
    config = experiment.trainer.loss
    if experiment.kind != "rl" or config.kl is None or not requires_reference(config):
        return None
    name = config.kl.model or experiment.model.name
    if policy.adapters is not None and name == experiment.model.name:
        return policy
    key = "trainer.loss.kl.model"
    reference, _ = load_beside(experiment, policy, device, key, name, {"ac": None}, reshard_after_forward=True)
    reference.requires_grad_(False)
    reference.trains_vision = False
    return reference
