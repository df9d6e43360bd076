"""The frozen model that a KL penalty keeps the policy close to (`trainer.loss.kl`)."""

import torch
import torch.distributed as dist

from prime_hpc.config import Experiment
from prime_hpc.config.errors import ConfigError
from prime_hpc.trainer.model.load_policy import load_policy, resolve_source
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.objectives import requires_reference


def load_reference(experiment: Experiment, policy: Policy, device: torch.device) -> Policy | None:
    """Return the sharded reference model, or None where the objective needs none. Collective.

    It costs the memory of one more set of sharded weights; it has no gradients and no optimizer. With adapters it is
    the policy itself: the engine switches the adapter off.

    Raises:
        ConfigError: its vocabulary is not the policy's.
        ValueError: it cannot be loaded.
    """
    config = experiment.trainer.loss
    if experiment.kind != "rl" or config.kl is None or not requires_reference(config):
        return None
    name = config.kl.model or experiment.model.name
    if policy.adapters is not None and name == experiment.model.name:
        return policy
    if dist.get_rank() == 0:
        resolve_source(name)  # one download, then everyone finds the files
    dist.barrier()
    reference = load_policy(
        experiment.model.model_copy(update={"name": name, "ac": None, "lora": None}),
        resolve_source(name),
        policy.parallel,
        device,
        reshard_after_forward=True,
        chunk_tokens=experiment.trainer.logits_chunk_tokens,
        context=experiment.context,
        rows=experiment.trainer.rows,
    )
    own, others = (p.hf.config.get_text_config().vocab_size for p in (policy, reference))
    if own != others:
        raise ConfigError(
            f"{name} has {others} tokens, the policy has {own}: no KL between them", "trainer.loss.kl.model"
        )
    if reference.single_rows != policy.single_rows:
        families = [type(p.hf).__name__ for p in (policy, reference)]
        raise ConfigError(
            f"{' and '.join(families)} lay out samples differently (one a row, or packed): no KL between them",
            "trainer.loss.kl.model",
        )
    reference.requires_grad_(False)
    reference.trains_vision = False
    return reference
