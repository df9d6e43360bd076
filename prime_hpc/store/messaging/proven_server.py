"""A server with a thread for each connection, which answers only those who prove that they know its secret."""

import socket
import socketserver
import time
from typing import Any

from loguru import logger

from prime_hpc.store.messaging.auth import PendingClients, check
from prime_hpc.store.messaging.listeners import keep_open


class ProvenServer(socketserver.ThreadingTCPServer):
    """Takes connections from `serve_forever` to `shutdown`."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, listening: socket.socket, handler: "type[ProvenRequest]", owner: Any, secret: str, purpose: str
    ) -> None:
        """Make a server that does not answer yet.

        Args:
            listening: bound and listening; closed by `server_close`.
            owner: for the handler, as `server.owner`.
            purpose: the server's name, part of the proof.
        """
        self.owner, self.secret, self.purpose = owner, secret, purpose
        self.pending = PendingClients(purpose)
        address = listening.getsockname()
        super().__init__(address, handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_address = listening, address
        keep_open(listening)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, once few others wait for their proof."""
        while self.pending.is_full:
            victim = self.pending.first_to_go()
            if victim is not None:
                self.pending.refuse(victim, "too many at once")
            else:
                time.sleep(0.01)
        self.pending.add(request, str(client_address[0]))
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing of a caller that left."""
        logger.opt(exception=True).debug(f"{self.purpose} to {client_address} broke off")


class ProvenRequest(socketserver.StreamRequestHandler):
    """One connection."""

    server: ProvenServer
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Have the client prove itself, then answer it."""
        try:
            check(self.connection, self.server.secret, self.server.purpose)
        except OSError as error:
            self.server.pending.refuse(self.connection, str(error))
            return
        self.server.pending.remove(self.connection)
        self.answer()

    def answer(self) -> None:
        """Answer a client that has given its proof, until it leaves."""
        raise NotImplementedError
