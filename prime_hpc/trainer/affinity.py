"""A rank on the CPUs of its GPU's socket: host memory and PCIe traffic then stay on one side of the machine.

The kernel says which CPUs are near a PCI device; a rank gives up those of its own that are not.
"""

import os
from pathlib import Path
from typing import Any

import torch
from loguru import logger

PCI_DEVICES = Path("/sys/bus/pci/devices")


def parse_cpus(text: str) -> set[int]:
    """Return the kernel's list of CPUs, `0-3,8`, as numbers. Raises ValueError: it is none."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if part:
            found |= set(range(int(first), int(last or first) + 1))
    return found


def pci_address(device: torch.device) -> str:
    """`domain:bus:device.function` of a GPU, as the kernel writes it."""
    facts: Any = torch.cuda.get_device_properties(device)  # torch's stubs leave these fields out
    return f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"


def near_cpus(address: str, allowed: set[int], ranks: int, devices: Path = PCI_DEVICES) -> set[int] | None:
    """Return the CPUs near a PCI device among those that this process may use.

    Returns:
        None where the kernel does not say, where nothing would change, or where the ranks of this node would be left
        with less than one each.
    """
    try:
        near = parse_cpus((devices / address / "local_cpulist").read_text()) & allowed
    except (OSError, ValueError):
        return None
    return near if near != allowed and len(near) >= ranks else None


def bind_to_gpu(device: torch.device, ranks: int) -> None:
    """Keep this process, and the threads that it starts from now on, on the CPUs near its GPU."""
    try:
        address = pci_address(device)
    except (AttributeError, RuntimeError) as error:  # a virtual GPU has no place on the bus
        logger.debug(f"the rank is not bound to CPUs: {error}")
        return
    near = near_cpus(address, os.sched_getaffinity(0), ranks)
    if near is not None:
        os.sched_setaffinity(0, near)
        logger.debug(f"bound to the {len(near)} CPUs near {address}")
