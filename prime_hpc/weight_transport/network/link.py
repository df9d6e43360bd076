"""A server's connection to one rank of the trainer; see `sender` for what is said over it. Blocking, with deadlines."""

import contextlib
import json
import socket
from typing import Any

from prime_hpc.store.errors import StoreError
from prime_hpc.store.messaging.auth import prove
from prime_hpc.store.messaging.json_lines import parse_address
from prime_hpc.weight_transport.network.sender import MAX_LINE, PURPOSE

CONNECT_S = 5.0
ANSWER_S = 15.0
"""Longest wait for an answer that costs the rank no work."""


class TransferError(StoreError):
    """A version cannot be had over the network now."""


class TrainerLink:
    """Open until either end leaves. Every method raises a TransferError where the rank does not do as it should, and
    the link is of no use after it."""

    def __init__(self, address: str, secret: str) -> None:
        self.address = address
        try:
            self._socket = socket.create_connection(parse_address(address), CONNECT_S)
            prove(self._socket, secret, PURPOSE)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError) as error:
            raise TransferError(f"the trainer at {address} cannot be reached: {error}") from error
        self._lines = self._socket.makefile("rb")

    def join(self, session: str, size: int) -> dict[str, Any]:
        """Ask for a group of `size` members; returns where: `host`, `port`, `name`."""
        self._say({"join": session, "size": size})
        return self._answer("host", ANSWER_S)

    def joined(self, deadline_s: float) -> None:
        """Wait until the rank has joined it too."""
        self._answer("joined", deadline_s)

    def hold(self, xxh3: str) -> None:
        """Have the rank keep an image as it is."""
        self._say({"hold": xxh3})
        if not self._answer("held", ANSWER_S)["held"]:
            raise TransferError(f"the trainer at {self.address} has another version by now")

    def send(self, xxh3: str) -> None:
        """Have it begin to send."""
        self._say({"send": xxh3})

    def sent(self, deadline_s: float) -> None:
        """Wait until it has sent."""
        self._answer("sent", deadline_s)

    def release(self) -> None:
        """Give back what is on hold."""
        self._say({"release": True})
        self._answer("released", ANSWER_S)

    def close(self) -> None:
        """Leave; the rank gives up the group."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._socket.close()

    def _say(self, request: dict[str, Any]) -> None:
        try:
            self._socket.settimeout(ANSWER_S)
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise TransferError(f"the trainer at {self.address} is gone: {error}") from error

    def _answer(self, key: str, deadline_s: float) -> dict[str, Any]:
        try:
            self._socket.settimeout(deadline_s)
            line = self._lines.readline(MAX_LINE)
            answer: dict[str, Any] = json.loads(line) if line else {}
        except (OSError, ValueError) as error:
            raise TransferError(f"the trainer at {self.address} does not answer: {error}") from error
        if key not in answer:
            raise TransferError(f"the trainer at {self.address} {'said something else' if line else 'is gone'}")
        return answer
