"""From the config to an optimizer over a model's trainable parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from prime_hpc.config.sections.trainer import OptimConfig
from prime_hpc.trainer.optim.fused import find_fused
from prime_hpc.trainer.optim.muon import Muon
from prime_hpc.trainer.optim.offload import keep_in_host_memory
from prime_hpc.trainer.optim.signsgd import SignSGD

MUON_MOMENTUM = 0.95


def build_optimizer(
    module: nn.Module, config: OptimConfig, parameters: Iterable[nn.Parameter] | None = None
) -> torch.optim.Optimizer:
    """Return the configured optimizer; matrices decay, vectors (norms, biases) do not.

    All of them keep their state per parameter under its name, so that a checkpoint loads under any number of ranks.

    Args:
        module: the (sharded) model; frozen parameters are left out.
        config: `trainer.optim`.
        parameters: to train instead of the module's own (an adapter's).
    """
    optimizer = _build(module, config, parameters)
    if config.offload:
        keep_in_host_memory(optimizer)
    return optimizer


def _build(module: nn.Module, config: OptimConfig, parameters: Iterable[nn.Parameter] | None) -> torch.optim.Optimizer:
    trainable = [p for p in (module.parameters() if parameters is None else parameters) if p.requires_grad]
    matrices, vectors = [p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2]
    if config.type == "muon":
        tables = _token_tables(module)
        hidden = [p for p in matrices if id(p) not in tables and p.ndim in (2, 3)]
        others = [p for p in matrices if id(p) in tables or p.ndim > 3]
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
