"""The device on which a role computes: decided once by the plan, handed on in its environment, refused where it lacks.

The supervisor (or an agent of its) puts `to_env` into the environment of each role that it starts. A role asks
`planned_device` what it was given and, for GPUs, calls `require_gpus` before anything else: nothing falls back to the
CPU by itself.
"""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from prime_hpc.runtime.failures import NodeError
from prime_hpc.runtime.gpus import build_problem, driver_problem, driver_version, stated_devices, visible_gpus

DEVICE = "PRIMEHPC_DEVICE"
"""`cpu`, or `cuda:N`: the process may use the N GPUs of its CUDA_VISIBLE_DEVICES."""
Stated = Literal["auto", "cuda", "cpu"]
NONE_SEEN = "no NVIDIA GPU is to be seen here; device: cuda would refuse this"


class DeviceError(NodeError):
    """GPUs were planned and are not there; says what is and what to do."""


@dataclass(frozen=True)
class Device:
    """The device of one process."""

    type: Literal["cuda", "cpu"]
    num_gpus: int | None = None
    """GPUs that it must see, exactly; None: at least one (nobody planned for it)."""
    why: str = "the plan says so"
    is_stated: bool = True
    """True if somebody said so; False: by what is to be seen here."""

    def to_env(self) -> dict[str, str]:
        """For the environment of the process."""
        return {DEVICE: "cpu" if self.type == "cpu" else f"cuda:{self.num_gpus}"}


def planned_device(stated: Stated = "auto", environ: Mapping[str, str] = os.environ) -> Device:
    """Return the device of this process: given by whoever started it, else (started by hand) by the config, else by
    what is there."""
    told = environ.get(DEVICE)
    if told:
        kind, _, count = told.partition(":")
        return Device("cuda", int(count)) if kind == "cuda" else Device("cpu")
    if stated == "cpu":
        return Device("cpu", why="device = cpu")
    if stated == "cuda":
        return Device("cuda", why="device = cuda")
    if stated_devices(environ) == []:
        return Device("cpu", why="CUDA_VISIBLE_DEVICES hides all GPUs")
    if visible_gpus(environ):
        return Device("cuda", why="there are GPUs here; device: cpu leaves them alone", is_stated=False)
    return Device("cpu", why=NONE_SEEN, is_stated=False)


def require_gpus(device: Device, *, process: str = "this process", environ: Mapping[str, str] = os.environ) -> int:
    """Check that torch sees exactly the GPUs that were planned; their number.

    Makes no context on any of them.
    Raises DeviceError: it sees fewer or more, with the reason as far as it can be known.
    """
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    count = torch.cuda.device_count() if usable else 0
    wanted = device.num_gpus
    if count == wanted or (wanted is None and count):
        return count
    planned = "GPUs were planned" if wanted is None else f"{wanted} GPU{'s were' if wanted != 1 else ' was'} planned"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    shown = "is not set" if visible is None else f"= {visible!r}"
    raise DeviceError(
        f"{planned} for {process} (CUDA_VISIBLE_DEVICES {shown}), but torch {torch.__version__} sees {count}: "
        + _reason(count, " ".join(str(w.message) for w in said))
    )


def _reason(count: int, said: str) -> str:
    """Why torch sees no GPU, or another number of them.

    Args:
        count: of those that it sees.
        said: torch's own warnings.
    """
    import torch

    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return build_problem() or "this torch is a CPU build; make the environment with `bash tools/setup gpu`"
    if count:
        return (
            "some of those that are named are not there, or it may use more than it was given; compare nvidia-smi -L "
            "on this node with what the job asked for"
        )
    driver = driver_version()
    if torch.version.cuda is not None and (problem := driver_problem(torch.version.cuda, driver)) is not None:
        return problem
    text = said or "CUDA does not start"
    return f"{' '.join(text.split())[:300]} (driver {driver}); nvidia-smi on this node says more"


def describe_gpus(device: Device, count: int) -> str:
    """Return the line that a role logs about its GPUs. Names them without touching them."""
    import torch

    return f"device cuda: {count} GPU{'s' if count > 1 else ''} ({device.why}), driver {driver_version()}, " + (
        f"torch {torch.__version__} for CUDA {torch.version.cuda}"
    )


def describe_cpu(device: Device) -> str:
    """Return the line that a role logs where it computes on the CPU: aloud, for a GPU may have been meant."""
    return f"device cpu, no GPU is used: {device.why}"
