"""The highest of some value over the whole batch, whichever ranks hold the tokens."""

import math

import torch
import torch.distributed as dist


def top_share_threshold(values: torch.Tensor, share: float, *, counts: bool) -> torch.Tensor:
    """Return the value from which on tokens are among the highest `share` of all ranks' tokens, 0-dim. Collective.

    Args:
        values: float `[N]`, of this rank's tokens.
        share: in (0, 1].
        counts: whether they are this rank's own: one of several ranks that have the same part of the batch.
    """
    own = values if counts else values[:0]
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=own.device)
    dist.all_gather_single(sizes, torch.tensor([len(own)], device=own.device))
    lengths = sizes.tolist()
    place = max(1, math.ceil(round(share * sum(lengths), 6)))  # however small the share, one token is of it
    most = min(max(*lengths, len(own)), place)  # a rehearsal reads no true lengths
    # `kthvalue` and `deterministic` exclude each other
    highest = own.sort(descending=True).values[:most]  # nobody has more of the batch's highest
    padded = own.new_full((most,), -math.inf)
    padded[: len(highest)] = highest
    table = own.new_empty((len(lengths), most))
    dist.all_gather_single(table, padded[None])
    if not table.numel():
        return own.new_zeros(())
    return table.flatten().sort(descending=True).values[place - 1]
