"""A tiny policy with adapters, and what an adapter means written down directly: W + scale B A."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.config.sections.lora import LoraConfig
from prime_hpc.config.sections.parallel import ParallelDims
from prime_hpc.config.sections.trainer import LossConfig, OptimConfig, TrainerConfig
from prime_hpc.trainer.lora.slots import PREFIX, Adapters
from prime_hpc.trainer.model.load_policy import load_policy
from prime_hpc.trainer.model.policy import Policy
from prime_hpc.trainer.objectives import rl_loss
from prime_hpc.trainer.optim import build_optimizer
from prime_hpc.trainer.parallel import build_parallel
from prime_hpc.trainer.train_step import TrainStep


def lora_policy(source: Path, num_slots: int = 1, lora: LoraConfig | None = None, **model: Any) -> Policy:
    """Sharded over the default process group."""
    parallel = build_parallel(ParallelDims(dp_shard=dist.get_world_size()), "cpu")
    config = ModelConfig(name=str(source), lora=lora or LoraConfig(rank=4, alpha=8), **({"dtype": "float32"} | model))
    return load_policy(
        config, source, parallel, torch.device("cpu"), reshard_after_forward=True, chunk_tokens=512, num_slots=num_slots
    )


def adapters_of(policy: Policy) -> Adapters:
    """Those of a policy that has some."""
    assert policy.adapters is not None
    return policy.adapters


def fill_randomly(policy: Policy, slot: int, seed: int) -> dict[str, torch.Tensor]:
    """Both matrices of every module normal, so that neither gradient vanishes; the whole tensors under
    PEFT's names for the model's own modules."""
    adapters = adapters_of(policy)
    generator = torch.Generator().manual_seed(seed)
    named = adapters.named_parameters(slot)
    tensors = {f"{PREFIX}{n}.weight": torch.randn(p.shape, generator=generator) * 0.1 for n, p in named.items()}
    adapters.load(slot, {adapters.peft_name(n): tensors[f"{PREFIX}{n}.weight"] for n in named})
    return tensors


def merged_model(source: Path, tensors: Mapping[str, torch.Tensor], scale: float, grad: bool = False) -> Any:
    """transformers' own model whose weights are W + scale B A; with `grad`, a function of `tensors`."""
    hf = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    merged = {}
    for name in tensors:
        if name.endswith("lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            a, b = tensors[name], tensors[name.replace("lora_A", "lora_B")]
            merged[f"{module}.weight"] = hf.get_submodule(module).weight.detach() + scale * b @ a
    if grad:
        return partial(torch.func.functional_call, hf, merged)
    hf.load_state_dict(merged, strict=False)
    return hf


def lora_train_step(policy: Policy, slot: int = 0, kind: str = "adamw", **more: Any) -> TrainStep:
    """A train step of one slot."""
    # Adam divides by sqrt(v): below a large epsilon, rounding of a gradient of almost nothing would steer the update
    optim = OptimConfig(type=kind, lr=1e-2, eps=1e-4)
    return TrainStep(
        policy,
        build_optimizer(policy, optim, adapters_of(policy).parameters(slot)),
        TrainerConfig(optim=optim, no_sync=False),
        max_steps=100,
        normalize="token",
        device=torch.device("cpu"),
        peak_flops=1.0,
        slot=slot,
        **more,
    )


objective = partial(rl_loss, LossConfig())
