"""Low-rank adapters: many of them in one frozen model, one in use at a time.

    names = add_lora(hf, config)                            before sharding: adapted linears, frozen base
    policy.adapters = Adapters(policy.hf, config, num_slots, mesh, device)   after it; `load_policy` does both

    adapters.reset(i, seed)                                 A random, B zero: the base model
    optimizer = build_optimizer(policy, optim, adapters.parameters(i))
    with adapters.use(i):                                   forward and backward passes of one step
        ...
    adapters.weights(i), adapters.load(i, tensors)          PEFT's names

Outside `use`, and inside `off`, the model is the base model.
"""

from prime_hpc.trainer.lora.linear import LoraLinear, add_lora
from prime_hpc.trainer.lora.slots import Adapters

__all__ = ["Adapters", "LoraLinear", "add_lora"]
