"""Words for a device that ran out of memory: what a rank holds there, and which keys of the config make it less."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from prime_hpc.config import Experiment
from prime_hpc.config.memory_keys import advice
from prime_hpc.trainer.train_step import TrainStep

GIB = 2**30


def held_bytes(train_step: TrainStep, device: torch.device) -> dict[str, float]:
    """Bytes of a rank's shards on its device, also a critic's: `weights`, `gradients`, `optimizer`."""
    steps = [step for step in (train_step, train_step.critic) if step is not None]
    trained = [p for step in steps for group in step.optimizer.param_groups for p in group["params"]]
    own = [p for step in steps for p in step.policy.parameters()]
    parameters = {id(p): p for p in [*own, *trained]}.values()
    states = [value for step in steps for state in step.optimizer.state.values() for value in state.values()]
    parts: dict[str, list[Any]] = {
        "weights": list(parameters),
        "gradients": [p.grad for p in parameters],
        "optimizer": [value for value in states if isinstance(value, torch.Tensor)],
    }
    return {kind: float(sum(_bytes_on(device, t) for t in tensors)) for kind, tensors in parts.items()}


def peak_bytes(device: torch.device, held: dict[str, float]) -> float:
    """Bytes that were allocated there at most; elsewhere than on CUDA nobody counts, and it is what is held."""
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else sum(held.values())


def _bytes_on(device: torch.device, tensor: torch.Tensor | None) -> int:
    own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return own.nbytes if own is not None and own.device.type == device.type else 0


def explain(
    error: BaseException, experiment: Experiment, held: dict[str, float], peak: float, *, rank: int, step: int
) -> str:
    """Return the error's first sentence, the largest kinds, and what helps.
    `peak`: bytes that were allocated at most."""
    by_kind = {kind: size / GIB for kind, size in held.items()}
    by_kind["activations"] = max(0.0, peak / GIB - sum(by_kind.values()))
    shown = ", ".join(f"{kind} {gib:.2f}" for kind, gib in sorted(by_kind.items(), key=lambda item: -item[1]))
    said = str(error).partition(". ")[0].partition("\n")[0].rstrip(".")
    return (
        f"rank {rank} ran out of memory in step {step}: {said}. It held, in GiB: {shown} (activations with logits and "
        f"whole blocks' weights and gradients). What helps: {advice(experiment, by_kind)}. "
        "`prime-hpc plan --rehearse` says what a change saves"
    )
