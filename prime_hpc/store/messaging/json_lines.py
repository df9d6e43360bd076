"""Line-JSON over one non-blocking TCP socket."""

import contextlib
import json
import socket
from typing import Any

MAX_LINE = 1 << 20  # bytes; announcements are a few hundred
MAX_BACKLOG = 8 << 20  # bytes unsent to a peer that does not read


class PeerGone(ConnectionError):
    """The other end closed, failed, or does not keep to the protocol."""


def encode(message: dict[str, Any]) -> bytes:
    """One line. Values that JSON lacks are sent as their text: publishing never fails."""
    return (json.dumps(message, default=str, separators=(",", ":")) + "\n").encode()


class Peer:
    """One connection: buffers for both directions, a line at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),  # a cut cable shows within 10 + 3 * 5 s
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ):
            sock.setsockopt(level, option, value)
        self.sock = sock
        self._received = bytearray()
        self._unsent = bytearray()

    @property
    def wants_write(self) -> bool:
        """True if bytes wait for the socket."""
        return bool(self._unsent)

    def queue(self, line: bytes) -> bool:
        """Add a line to send later; False where the peer reads too slowly to go on with it."""
        if len(self._unsent) + len(line) > MAX_BACKLOG:
            return False
        self._unsent += line
        return True

    def flush(self) -> None:
        """Send what the socket takes now. Raises PeerGone: the connection is broken."""
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise PeerGone(str(error)) from error
            del self._unsent[:sent]

    def receive(self) -> list[dict[str, Any]]:
        """Return the whole messages that arrived; lines that are no JSON object are skipped.
        Raises PeerGone: closed, broken, or an endless line."""
        try:
            data = self.sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return []
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not data:
            raise PeerGone("closed")
        self._received += data
        *lines, rest = bytes(self._received).split(b"\n")
        if len(rest) > MAX_LINE:
            raise PeerGone(f"a line of more than {MAX_LINE} bytes")
        self._received = bytearray(rest)
        parsed = (self._parse(line) for line in lines if line.strip())
        return [message for message in parsed if message is not None]

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        return message if isinstance(message, dict) else None

    def finish(self) -> None:
        """Say that nothing more will be sent; then read on until PeerGone before `close`.

        Closing a socket with unread bytes resets the connection: the other end loses what it has not read yet.
        """
        with contextlib.suppress(OSError):  # already gone: the next receive says so
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def parse_address(address: str) -> tuple[str, int]:
    """Split "host:port", or "secret@host:port". Raises ValueError: not of that form."""
    host, separator, port = address.rpartition("@")[2].rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ValueError(f"address of the message bus {address!r}: must be host:port")
    return host.strip("[]"), int(port)
