"""Low-rank adapters: many of them in one frozen model, one in use at a time.

    names = add_lora(hf, config)                            before sharding: adapted linears, frozen base
    policy.adapters = Adapters(policy.hf, config, num_slots, mesh, device)   after it; `load_policy` does both

    reset_slot(policy, i, seed)                             A random, B zero: the base model
    optimizer = build_optimizer(policy, optim, slot_parameters(policy, i))
    with use_slot(policy, i):                               forward and backward passes of one step
        ...
    slot_weights(policy, i), load_slot(policy, i, tensors)  PEFT's names

Outside `use_slot`, and inside `without_adapter`, the model is the base model.
"""

from prime_hpc.trainer.lora.linear import LoraLinear, add_lora
from prime_hpc.trainer.lora.slots import (
    Adapters,
    load_slot,
    reset_slot,
    slot_named_parameters,
    slot_parameters,
    slot_weights,
    use_slot,
    without_adapter,
)

__all__ = [
    "Adapters",
    "LoraLinear",
    "add_lora",
    "load_slot",
    "reset_slot",
    "slot_named_parameters",
    "slot_parameters",
    "slot_weights",
    "use_slot",
    "without_adapter",
]
