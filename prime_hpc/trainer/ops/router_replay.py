"""Router replay (`trainer.router_replay`): a token goes to the experts to which the engine sent it when it sampled.

Engine and trainer round differently, and a router turns a last bit into another expert: the log-probability of a token
then jumps, and with it the importance ratio. Here the choice is the engine's (`moe.replay`). Tokens without a record
(the last one of a sample, padding) take the live choice.
"""

from typing import Any

import numpy as np

from prime_hpc.moe.routers import moe_layers
from prime_hpc.store.batch.rank_batch import NOT_SAMPLED, RankBatch


def check_recorded(hf: Any, batch: RankBatch) -> None:
    """Raise a ValueError for a batch whose recorded experts cannot be those of a causal LM, or that has none."""
    layers, routed = moe_layers(hf), batch.routed
    if routed is None:
        if (batch.versions != NOT_SAMPLED).any():
            raise ValueError(
                "trainer.router_replay: the batch holds no recorded experts: it was sampled without the option, or by "
                "a server that does not record them; leave the option out for it"
            )
        return
    last, num_experts = layers[-1].number, min(int(getattr(layer.experts, "num_experts", 0)) for layer in layers)
    known = routed != np.iinfo(routed.dtype).max
    if routed.shape[1] <= last or int(routed.max(initial=0, where=known)) >= num_experts:
        most = int(routed.max(initial=0, where=known))
        raise ValueError(
            f"trainer.router_replay: experts up to {most} in {routed.shape[1]} layers are recorded, the model has "
            f"{num_experts} in {last + 1} layers: the engines serve another one"
        )
