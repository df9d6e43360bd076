"""The GPUs of a node, and which of them each role gets where several share it."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

DEVICES = Path("/dev")
Gpu = TypeVar("Gpu", int, str)


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Ids of the GPUs that this process may use, from CUDA_VISIBLE_DEVICES, else from the driver's device files.

    Slurm sets the variable where it gives GPUs out; where it does not know them, a job has whole nodes.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [x for x in listed.split(",") if x.strip()]
    return sorted((p.name.removeprefix("nvidia") for p in DEVICES.glob("nvidia[0-9]*")), key=int)


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
