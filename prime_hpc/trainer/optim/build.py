"""From the config to an optimizer over a model's trainable parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

from prime_hpc.config.sections.trainer import OptimConfig
from prime_hpc.trainer.optim.fused import find_fused
from prime_hpc.trainer.optim.muon import Muon
from prime_hpc.trainer.optim.offload import keep_in_host_memory
from prime_hpc.trainer.optim.signsgd import SignSGD

MUON_MOMENTUM = 0.95
_VECTORS = ("A_log", "D")
"""Names of the parameters of a state space's recurrence: one number for each state or channel, in two dimensions."""


def build_optimizer(
    module: nn.Module, config: OptimConfig, parameters: Iterable[nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """Return the configured optimizer; matrices decay, vectors (norms, biases, see `_is_vector`) do not.

    All of them keep their state per parameter under its name, so that a checkpoint loads under any number of ranks.

    Args:
        module: the (sharded) model; frozen parameters are left out.
        parameters: to train instead of the module's own (an adapter's).
    """
    optimizer = _build(module, config, parameters)
    if config.offload:
        keep_in_host_memory(optimizer)
    return optimizer


def _build(module: nn.Module, config: OptimConfig, parameters: Iterable[nn.Parameter] | None) -> torch.optim.Optimizer:
    trainable = [p for p in (module.parameters() if parameters is None else parameters) if p.requires_grad]
    names = {id(p): name for owner in module.modules() for name, p in owner.named_parameters(recurse=False)}
    vectors = [p for p in trainable if _is_vector(p, names.get(id(p), ""))]
    found = {id(p) for p in vectors}
    matrices = [p for p in trainable if id(p) not in found]
    if config.type == "muon":
        aside = _token_tables(module) | _convolutions(module)
        hidden = [p for p in matrices if id(p) not in aside and _is_linear(p)]
        found = {id(p) for p in hidden}
        others = [p for p in matrices if id(p) not in found]
        momentum = MUON_MOMENTUM if config.momentum is None else config.momentum
        groups = [
            {"params": hidden, "algorithm": "muon", "weight_decay": config.weight_decay},
            {"params": others, "algorithm": "adamw", "weight_decay": config.weight_decay},
            {"params": vectors, "algorithm": "adamw", "weight_decay": 0.0},
        ]
        fused = find_fused(module)
        return Muon(_used(groups), lr=config.lr, momentum=momentum, betas=config.betas, eps=config.eps, fused=fused)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if config.type == "signsgd":
        return SignSGD(_used(groups), lr=config.lr, momentum=config.momentum or 0.0)
    return torch.optim.AdamW(_used(groups), lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def _is_vector(parameter: nn.Parameter, name: str) -> bool:
    """Return whether a parameter is added or multiplied element by element, whatever its shape: a stack of biases, a
    state space's rates, RWKV's mixing factors, [1, 1, width]. A matrix with one row is a linear map all the same."""
    is_named = name.endswith("bias") or name in _VECTORS or name.startswith("time_")
    return parameter.ndim < 2 or is_named or (parameter.ndim > 2 and sum(size > 1 for size in parameter.shape) <= 1)


def _is_linear(matrix: nn.Parameter) -> bool:
    """Return whether a parameter is a linear map by its shape, or a stack of them (experts, blocks of a diagonal)."""
    return matrix.ndim == 2 or (matrix.ndim == 3 and min(matrix.shape[-2:]) > 1)


def _convolutions(module: nn.Module) -> set[int]:
    """ids of kernels: of most, a channel's has two dimensions and mixes no channels."""
    return {id(m.weight) for m in module.modules() if isinstance(m, _ConvNd)}


def _used(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups that hold anything, divided by device mesh: one fused kernel takes parameters of one mesh."""
    found = []
    for group in groups:
        by_mesh: dict[Any, list[Any]] = {}
        for p in group["params"]:
            by_mesh.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
        found += [{**group, "params": params} for params in by_mesh.values()]
    return found


def _token_tables(module: nn.Module) -> set[int]:
    """ids of the parameters with a row per token: embeddings and the output head, which are no linear maps between
    hidden states (Muon's authors give them to AdamW)."""
    found = {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for part in module.modules():
        head = getattr(part, "get_output_embeddings", lambda: None)()
        if isinstance(head, nn.Module):
            found |= {id(p) for p in head.parameters()}
    return found
