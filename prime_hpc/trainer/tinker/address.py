"""The address on which the service listens, and the file from which clients on other machines learn it.

On this machine it is 127.0.0.1 and a port that stays. As a job of a cluster nobody knows the node before: the service
listens there as the job's engines do, on a free port, and `<run>/tinker.url` says where for as long as it does.
"""

import errno
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from prime_hpc.config.run_files import TINKER_URL
from prime_hpc.config.sections.trainer import TinkerConfig
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.runtime.role_context import LED, NODE
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.network import Network

HOST, PORT = "127.0.0.1", 8780
"""On this machine, where nothing else is stated."""
LINGER_S = 20.0
"""So long a port may be taken that a service before this one had."""


def listen(config: TinkerConfig, run_dir: Path, environ: Mapping[str, str] = os.environ) -> tuple[socket.socket, str]:
    """Take the address; returns the socket and the URL for clients. Raises ValueError: it cannot be listened on."""
    in_job = bool(environ.get(LED))
    network = Network.from_env(environ)
    place = network.place("serving") if in_job and config.host is None else None
    host = config.host or (place.address if place is not None else sockets.ALL if in_job else HOST)
    port = config.port if config.port is not None else 0 if in_job else PORT
    sock = _listen(host, port, network.ports, seed=str(run_dir))
    reached_at = (environ.get(NODE) or socket.gethostname()) if sockets.is_wildcard(host) else host
    return sock, sockets.http_url(reached_at, sock.getsockname()[1], "")


def _listen(host: str, port: int, ports: sockets.PortRange | None, seed: str) -> socket.socket:
    """Take the port, also where connections of a service that was killed still linger on it."""
    end = time.monotonic() + LINGER_S
    while True:
        try:
            return sockets.listen(host, port, ports=ports, seed=seed)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= end:
                raise ValueError(
                    f"cannot listen on {sockets.join(host, port)}: {error.strerror}; set trainer.tinker.port to a free "
                    "one, or 0"
                ) from error
        time.sleep(0.5)


def announce(run_dir: Path, url: str) -> None:
    """Say where the service answers, in place of where one before it did."""
    write_atomic(run_dir / TINKER_URL, f"{url}\n")


def forget(run_dir: Path, url: str | None = None) -> None:
    """Take back what `announce` said: only of this URL, where one is named."""
    path = run_dir / TINKER_URL
    try:
        if url is None or path.read_text(encoding="utf-8").strip() == url:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return
