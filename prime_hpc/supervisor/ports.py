"""Ports: derived from what makes a run its own, probed before use.

Two runs on one node must not collide, and a port below the ephemeral range cannot be taken by an
outgoing connection between the probe and the bind. Called by the placement and the supervisor.
"""

import os
import socket
import zlib
from pathlib import Path

from prime_hpc.config.errors import ConfigError

FIRST, LAST = 10_000, 32_000
STRIDE = 16


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could bind `host:port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def run_base(run_dir: Path, job_id: str | None = None) -> int:
    """First port of a run: from the Slurm job id, else from the run directory and this process."""
    seed = job_id or f"{run_dir.resolve()}:{os.getpid()}"
    slots = (LAST - FIRST) // STRIDE
    return FIRST + (zlib.crc32(seed.encode()) % slots) * STRIDE


def choose(count: int, base: int, host: str = "127.0.0.1") -> list[int]:
    """`count` free ports, searched upwards from `base` and around.

    Raises:
        ConfigError: no such ports are free on this node.
    """
    found: list[int] = []
    for offset in range(LAST - FIRST):
        port = FIRST + (base - FIRST + offset) % (LAST - FIRST)
        if is_free(port, host):
            found.append(port)
            if len(found) == count:
                return found
    raise ConfigError(f"no {count} free ports between {FIRST} and {LAST} on this node")


def require_free(port: int, host: str, key: str) -> None:
    """Refuse a port that the user named and somebody else holds.

    Raises:
        ConfigError: naming the port, the key and the ways out.
    """
    if not is_free(port, host):
        raise ConfigError(
            f"{key} = {port}: the port is already taken on {host}; end what listens there, "
            f"choose another with --{key.replace('_', '-')}, or 0 to let prime-hpc find a free one"
        )
