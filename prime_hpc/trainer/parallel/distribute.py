"""A model built without memory becomes this rank's part of it.

Order: tensor and expert parallel put parameters onto their meshes; each block then gets compilation, recomputation and
FSDP2; FSDP2 takes the rest. Losses carry the batch's global denominators: FSDP sums gradients and never averages.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from prime_hpc.config.sections.common import ModelConfig
from prime_hpc.trainer.ops.context_parallel import repeats
from prime_hpc.trainer.ops.cpu_elementwise import use_elementwise
from prime_hpc.trainer.ops.cpu_matmul import use_products
from prime_hpc.trainer.ops.fp8 import use_fp8
from prime_hpc.trainer.ops.recompute import recompute
from prime_hpc.trainer.parallel.expert import split_experts
from prime_hpc.trainer.parallel.mesh import Parallel
from prime_hpc.trainer.parallel.tensor import local, split_tensors


def transformer_blocks(hf: Any) -> list[nn.Module]:
    """Return the model's repeated blocks, each of which becomes one FSDP unit.
    Raises ValueError: the model has no list of blocks."""
    lists: list[Any] = [m for m in hf.base_model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ValueError(f"{type(hf).__name__} has no list of transformer blocks to shard")

    def size(blocks: Any) -> int:
        return sum(p.numel() for p in blocks.parameters())

    return list(max(lists, key=size))


def distribute(
    policy: nn.Module, hf: Any, config: ModelConfig, parallel: Parallel, dtype: torch.dtype, reshard: bool
) -> list[nn.Module]:
    """Spread `policy` (with the HF model `hf` inside it) over the ranks. Collective.

    Args:
        policy: becomes the root FSDP module.
        dtype: of the forward and backward pass.
        reshard: free gathered block parameters after the forward pass.

    Returns:
        modules whose gradients are to be summed over tensor-parallel ranks, see `tensor.split_tensors`.

    Raises:
        ValueError: the model cannot be split as the layout asks; says why.
    """
    if parallel.cp is not None:
        _check_heads(hf, parallel)
    if parallel.tp is not None:  # it advises against gathering over two dimensions: publishing does, once a version
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    partly_used = split_tensors(hf, parallel) if parallel.tp is not None else []
    experts = split_experts(hf, parallel) if parallel.expert_fsdp is not None else []
    reshard = reshard and not gathers_from_itself(parallel)
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=True
    )
    # The root's input is a whole micro-batch: FSDP would round its float fields, temperatures among them, to `dtype`.
    # Experts get their weights as the router computes them, which without expert parallelism nobody rounds either.
    exact = replace(precision, cast_forward_inputs=False)
    for module in experts:
        placement = functools.partial(_expert_dimension, ranks=parallel.dims.expert_shard)
        fully_shard(
            module, mesh=parallel.expert_fsdp, mp_policy=exact, reshard_after_forward=reshard,
            shard_placement_fn=placement,
        )  # fmt: skip
    if parallel.fsdp.device_type == "cpu" and dtype == torch.float32 and not config.compile:
        use_elementwise(hf)
    for i, block in enumerate(transformer_blocks(hf)):
        if config.fp8:
            use_fp8(block)
        if not config.compile:
            use_products(block)
        if config.compile:  # within recomputation, which Dynamo cannot trace together with attention's own kernel
            vars(block)["forward"] = compiled(block.forward)
        if config.ac is not None and i % config.ac.freq == 0:
            recompute(block, config.ac)
        fully_shard(block, mesh=parallel.fsdp, mp_policy=precision, reshard_after_forward=reshard)
    fully_shard(policy, mesh=parallel.fsdp, mp_policy=exact, reshard_after_forward=False)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            if dist.get_world_size() > 1:  # alone, FSDP would divide by it into new memory
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return partly_used


def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a block's forward pass, for rows of any length."""
    return torch.compile(forward, dynamic=True)


def reshard_all(policy: nn.Module) -> None:
    """Free what a forward pass gathered and no backward pass will: until then the parameters are not the shards.

    `FSDPModule.reshard` is of one module, without those below it.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathers_from_itself(parallel: Parallel) -> bool:
    """Return whether the only rank is on a CPU: to free what it has copied from its own shards, and copy it again for
    every micro-batch, costs more there than the memory is worth."""
    return parallel.fsdp.size() == 1 and parallel.fsdp.device_type == "cpu"


def _check_heads(hf: Any, parallel: Parallel) -> None:
    config, tp, cp = hf.config.get_text_config(), parallel.dims.tp, parallel.dims.cp
    for layer in config.per_layer_config:  # Gemma 4's differ
        heads = layer.num_attention_heads
        repeats(heads // tp, (getattr(layer, "num_key_value_heads", None) or heads) // tp, cp)


def _expert_dimension(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """FSDP divides a rank's experts among `ranks`; where they are too few, the rows of each."""
    own = local(parameter)
    few = own.shape[0] < ranks and own.ndim > 1 and own.shape[1] % ranks == 0
    return Shard(1) if few else None
