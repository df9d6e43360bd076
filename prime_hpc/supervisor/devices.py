"""Which of a node's GPUs each role gets where several share it.

Called by `roles` (one machine) and `placement` (a Slurm job).
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

Gpu = TypeVar("Gpu", int, str)


def share_out(
    available: Sequence[Gpu], need: Mapping[str, int], named: Mapping[str, Sequence[Gpu] | None]
) -> dict[str, list[Gpu]]:
    """Role -> its GPUs; a list that is shorter than `need` says that there are too few.

    Args:
        available: of the node.
        need: role -> how many, in the order in which they are served.
        named: role -> those that its key names, which win and may overlap; None: the first that no key names.
    """
    taken = {gpu for gpus in named.values() for gpu in gpus or ()}
    free = [gpu for gpu in available if gpu not in taken]
    shares: dict[str, list[Gpu]] = {}
    for role, count in need.items():
        own = named.get(role)
        if own is None:
            own, free = free[:count], free[count:]
        shares[role] = list(own)
    return shares
