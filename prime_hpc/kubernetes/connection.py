"""The way from the supervisor's pod to the run's other pods: an address, and a proof that both belong to the run.

Every pod of a run reads the run's key from a file of its Secret. The key itself never goes over the network
(`store.messaging.auth`), stands in no command line and in no environment.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.store.messaging.auth import prove

PORT = 8471
"""At which each pod listens; its address is its own, so that pods on the host's network do not collide."""
PURPOSE = "pods"
KEY_FILE = "PRIMEHPC_POD_KEY_FILE"
ADDRESS = "PRIMEHPC_POD_ADDRESS"
"""Environment of a pod: its own IP address."""
CONNECT_S = 5.0


def read_key(environ: Mapping[str, str] = os.environ) -> str:
    """Return the run's key. Raises ConfigError: the pod names no file of it, or the file holds none."""
    path = environ.get(KEY_FILE)
    if not path:
        raise ConfigError(f"{KEY_FILE} is not set: this runs in a pod of `prime-hpc render --target kubernetes`")
    try:
        key = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: the run's key cannot be read ({error}); is its Secret there?") from error
    if len(key) < 16:
        raise ConfigError(f"{path}: a run's key has at least 16 characters, this one {len(key)}")
    return key


def connect(host: str, key: str) -> socket.socket:
    """Return a connection to a pod that has proved to know the run's key.
    Raises OSError: the pod is not there (yet), or belongs to another run."""
    connection = socket.create_connection((host, PORT), CONNECT_S)
    try:
        prove(connection, key, PURPOSE)
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def say(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message. Raises OSError."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def messages(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield what the other end says, until it closes. Raises OSError, ValueError."""
    with connection.makefile("rb") as lines:
        for line in lines:
            message = json.loads(line)
            if not isinstance(message, dict):
                raise ValueError("a message is an object")
            yield message
