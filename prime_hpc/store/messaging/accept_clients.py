"""Connections to a server with a selector: those who prove that they know its secret come in, few others wait."""

import selectors
import socket
import time

from loguru import logger

from prime_hpc.store.messaging.auth import UNPROVEN_GRACE_S, AuthenticationError, Challenge, PendingClients

_ACCEPT_AT_ONCE = 64


class Admission:
    """The listener of one server and the connections that have given no proof yet. Belongs to the server's thread.

    Args:
        listener: bound and listening; closed by `close`.
        secret: what a client must prove to know.
        purpose: the server's name, part of the proof.
    """

    def __init__(self, listener: socket.socket, secret: str, purpose: str) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._secret, self._purpose = secret, purpose
        self._pending = PendingClients(purpose)
        self._challenges: dict[socket.socket, Challenge] = {}
        self._is_accepting = False

    def tend(self, selector: selectors.BaseSelector, timeout: float) -> float:
        """Before each `select`: pending go whose time is over or who are in the way; others may come where there is
        room. Returns how long to sleep, at most `timeout`."""
        for sock in self._pending.overdue():
            self._refuse(selector, sock, "no proof in time")
        if self._pending.is_full and (victim := self._pending.first_to_go()) is not None:
            self._refuse(selector, victim, "too many at once")
        self._accept(selector, not self._pending.is_full)
        return min(timeout, UNPROVEN_GRACE_S / 2) if self._pending else timeout

    def concerns(self, sock: object) -> bool:
        """Return whether `handle` takes care of this socket."""
        return sock is self._listener or sock in self._challenges

    def handle(self, selector: selectors.BaseSelector, sock: socket.socket) -> tuple[socket.socket, bytes] | None:
        """Take care of a readable socket. Returns a connection whose client has given its proof, no longer in the
        selector, and the server's own proof, which must be sent first; None: there is none yet."""
        if sock is self._listener:
            self._admit(selector)
            return None
        return self._examine(selector, sock)

    def sockets(self) -> list[socket.socket]:
        """Return the listener and the connections without a proof: what a forked child must close."""
        return [self._listener, *self._challenges]

    def close(self, selector: selectors.BaseSelector) -> None:
        """Accept nobody any more and let go who waits. A second time does no harm."""
        self._accept(selector, False)
        self._listener.close()
        for sock in list(self._challenges):
            self._take_out(selector, sock)
            sock.close()

    def _accept(self, selector: selectors.BaseSelector, wanted: bool) -> None:
        if wanted and not self._is_accepting:
            selector.register(self._listener, selectors.EVENT_READ)
        elif self._is_accepting and not wanted:
            selector.unregister(self._listener)
        self._is_accepting = wanted

    def _admit(self, selector: selectors.BaseSelector) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            if self._pending.is_full:
                return
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the caller left again, or no descriptors are free: others are still served
                logger.debug(f"{self._purpose}: accept failed: {error}")
                time.sleep(0.05)
                return
            sock.setblocking(False)
            self._pending.add(sock, str(address[0]))
            self._challenges[sock] = Challenge(self._secret, self._purpose)
            selector.register(sock, selectors.EVENT_READ)

    def _examine(self, selector: selectors.BaseSelector, sock: socket.socket) -> tuple[socket.socket, bytes] | None:
        challenge = self._challenges[sock]
        try:
            data = sock.recv(4096)
            if not data:
                raise AuthenticationError("closed without a proof")
            self._pending.note_input(sock)
            answer = challenge.feed(data)
            if challenge.proven:
                self._take_out(selector, sock)
                return sock, answer
            if answer:
                sock.send(answer)  # some 50 bytes into an empty buffer
        except BlockingIOError:
            pass
        except OSError as error:
            self._refuse(selector, sock, str(error))
        return None

    def _take_out(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        selector.unregister(sock)
        del self._challenges[sock]
        self._pending.remove(sock)

    def _refuse(self, selector: selectors.BaseSelector, sock: socket.socket, why: str) -> None:
        selector.unregister(sock)
        del self._challenges[sock]
        self._pending.refuse(sock, why)
        sock.close()
