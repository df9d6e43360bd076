"""Ports: derived from what makes a run its own, probed and reserved before use.

Two runs on one node must not collide, nor two roles of one run; and a port below the ephemeral range cannot be taken by
an outgoing connection between the probe and the bind.
"""

import os
import socket
from pathlib import Path

from prime_hpc.config.errors import ConfigError
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.network import NUM_ENGINE_PORTS
from prime_hpc.store.messaging.sockets import PortRange, is_free, release, reserve

FIRST, LAST = 10_000, 32_000
STRIDE = 16
BUILT_IN = PortRange(FIRST, LAST)

__all__ = ["BUILT_IN", "choose", "for_engines", "is_free", "release", "require_free", "reserve", "run_base"]


def run_base(run_dir: Path, job_id: str | None = None, within: PortRange = BUILT_IN) -> int:
    """First port of a run: from the Slurm job id, else from the run directory and this process."""
    return within.from_seed(job_id or f"{run_dir.resolve()}:{os.getpid()}", STRIDE)


def choose(count: int, base: int, host: str = "127.0.0.1", within: PortRange = BUILT_IN) -> list[int]:
    """`count` neighbouring free ports, searched upwards from `base` and around. They stay reserved for this process and
    those that it starts until it ends, or `release`s them. Raises ConfigError: no such ports are free on this node."""
    _require_local(host)
    found: list[int] = []
    for port in within.after(base) if count else ():
        if found and port != found[-1] + 1:
            release(found)
            found = []
        if is_free(port, host, untouched=True) and reserve(port):
            found.append(port)
        else:
            release(found)
            found = []
        if len(found) == count:
            return found
    release(found)
    if count:
        raise within.full(count)
    return found


def for_engines(within: PortRange | None, base: int) -> int | None:
    """First of the ports that a server's engines may take for themselves; None where no range is stated."""
    return None if within is None else choose(NUM_ENGINE_PORTS, base, sockets.ALL, within)[0]


def _require_local(host: str) -> None:
    try:
        sockets.bind(host, 0).close()
    except OSError as error:
        raise ConfigError(
            f"{host} is no address of node {socket.gethostname()} ({error.strerror or error}): nothing can listen on it"
        ) from error


def require_free(port: int, host: str, key: str) -> None:
    """Reserve a port that the user named; refuse one that somebody else holds.
    Raises ConfigError: naming the port, the key and the ways out."""
    _require_local(host)
    ours = port in sockets.reserved()
    if not is_free(port, host, but_reserved=ours) or not (ours or reserve(port)):
        where = "on every address" if sockets.is_wildcard(host) else f"on {host}"
        raise ConfigError(
            f"{key} = {port}: the port is already taken {where}; end what listens there, or will once it has loaded "
            f"its model, choose another with --{key.replace('_', '-')}, or 0 to let prime-hpc find a free one"
        )
