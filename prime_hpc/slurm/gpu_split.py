"""Split a node's GPUs among the roles that share it, and tell each by its environment."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from prime_hpc.config import ConfigError
from prime_hpc.runtime.device import Device
from prime_hpc.runtime.gpus import build_problem

Gpu = TypeVar("Gpu", int, str)
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def assign_gpus(
    available: Sequence[Gpu], need: Mapping[str, int], named: Mapping[str, Sequence[Gpu] | None]
) -> dict[str, list[Gpu]]:
    """Role -> its GPUs; a list that is shorter than `need` says that there are too few.

    Args:
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


def at_positions(positions: Sequence[int], visible: Sequence[str], key: str) -> list[str]:
    """Return the GPUs at some positions of the visible ones.
    Raises ConfigError: there is none at one of them, or one is named twice."""
    if len(set(positions)) == len(positions) and all(0 <= i < len(visible) for i in positions):
        return [visible[i] for i in positions]
    last = len(visible) - 1
    raise ConfigError(
        f"{list(positions)} must be different positions, from 0 to {last}, among the {len(visible)} GPUs that are "
        f"visible here ({', '.join(visible)})",
        key,
    )


def gpu_environment(gpus: Sequence[str], environ: Mapping[str, str], *, trains: bool = False) -> dict[str, str]:
    """Return the variables that name a role's GPUs; [] is the CPU.

    Args:
        gpus: as CUDA_VISIBLE_DEVICES takes them.
        environ: of the role so far: what the user states there stays.
    """
    found = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} | Device("cuda" if gpus else "cpu", len(gpus)).to_env()
    if gpus:
        # CUDA numbers GPUs by their speed unless told otherwise, nvidia-smi by their place
        found["CUDA_DEVICE_ORDER"] = environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if gpus and trains and not any(name in environ for name in ALLOCATOR_VARIABLES):
        # rows differ in length from step to step, which would leave unusable gaps between an allocator's fixed blocks
        found["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return found


def refuse_cpu_builds(on_gpus: bool) -> None:
    """Raise a ConfigError where roles are to compute on GPUs with packages that cannot: nobody need wait for them."""
    problem = build_problem() if on_gpus else None
    if problem is not None:
        raise ConfigError(f"GPUs are planned for this run, but {problem}", "device")
