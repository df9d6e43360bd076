"""Challenge and response: both ends of a connection prove that they know a secret, which itself never goes over it.

    client -> server  {"nonce": C}
    server -> client  {"nonce": S}
    client -> server  {"proof": HMAC-SHA256(secret, purpose, "client", C, S)}
    server -> client  {"proof": HMAC-SHA256(secret, purpose, "server", C, S)}

Whoever has not given the proof is told nothing else, is let go after `PROOF_WITHIN_S`, may send `MAX_UNPROVEN_INPUT`
bytes, and no more than `MAX_UNPROVEN` are kept at once (`PendingClients`): on a shared machine or a cluster's network
anybody can open a connection.
"""

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from loguru import logger

PROOF_WITHIN_S = 2.0
MAX_UNPROVEN_INPUT = 512
"""Bytes; both lines of a client take some 150."""
MAX_UNPROVEN = 64
UNPROVEN_GRACE_S = 0.1
"""Of too many, one is let go for the next only after so long: an own process needs a few ms."""
CLIENT_TIMEOUT_S = 10.0
"""A client waits longer than a server: thousands may be waiting to be accepted."""
WARN_EVERY_S = 60.0


class AuthenticationError(ConnectionError):
    """The other end does not know the secret, or does not keep to the protocol."""


def new_secret() -> str:
    """192 random bits that need no quoting in a URL or an environment variable."""
    return secrets.token_urlsafe(24)


def _nonce() -> str:
    return secrets.token_hex(16)


def _proof(secret: str, purpose: str, side: str, client_nonce: str, server_nonce: str) -> str:
    text = "\0".join((purpose, side, client_nonce, server_nonce))
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


def _line(key: str, value: str) -> bytes:
    return json.dumps({key: value}).encode() + b"\n"


def _read(line: bytes, key: str) -> str:
    try:
        value = json.loads(line)[key]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise AuthenticationError("no proof, but something else") from error
    if not isinstance(value, str) or not value.isascii():
        raise AuthenticationError("no proof, but something else")
    return value


class Challenge:
    """The server's side of one connection, without any I/O of its own."""

    def __init__(self, secret: str, purpose: str) -> None:
        self._secret, self._purpose = secret, purpose
        self._received = b""
        self._num_bytes = 0
        self._client_nonce: str | None = None
        self._local_nonce = _nonce()
        self.proven = False
        """Whether the client knows the secret."""

    def feed(self, data: bytes) -> bytes:
        """Take what the client sent and return what to answer, b"" where nothing is due yet.
        Raises AuthenticationError: too much, no such protocol, or a wrong proof."""
        self._num_bytes += len(data)
        if self._num_bytes > MAX_UNPROVEN_INPUT:
            raise AuthenticationError(f"more than {MAX_UNPROVEN_INPUT} bytes and no proof")
        self._received += data
        line, end, rest = self._received.partition(b"\n")
        if not end:
            return b""
        if rest:  # a client waits for each answer
            raise AuthenticationError("no proof, but something else")
        self._received = b""
        if self._client_nonce is None:
            self._client_nonce = _read(line, "nonce")
            return _line("nonce", self._local_nonce)
        nonces = (self._client_nonce, self._local_nonce)
        expected = _proof(self._secret, self._purpose, "client", *nonces)
        if not hmac.compare_digest(_read(line, "proof"), expected):
            raise AuthenticationError("a wrong proof")
        self.proven = True
        return _line("proof", _proof(self._secret, self._purpose, "server", *nonces))


def prove(sock: socket.socket, secret: str, purpose: str, timeout_s: float = CLIENT_TIMEOUT_S) -> None:
    """Prove to know the secret, and have the server prove it: the client's side, blocking.

    Raises:
        AuthenticationError: the server does not know it.
        OSError: the connection broke, or no answer came in time. The socket's timeout is changed.
    """
    end = time.monotonic() + timeout_s
    own = _nonce()
    sock.settimeout(timeout_s)
    sock.sendall(_line("nonce", own))
    nonces = own, _read(_read_line(sock, end), "nonce")
    sock.sendall(_line("proof", _proof(secret, purpose, "client", *nonces)))
    if not hmac.compare_digest(_read(_read_line(sock, end), "proof"), _proof(secret, purpose, "server", *nonces)):
        raise AuthenticationError("the server does not know the secret")


def check(sock: socket.socket, secret: str, purpose: str, timeout_s: float = PROOF_WITHIN_S) -> None:
    """Check the client's proof: the server's side, blocking.

    Raises:
        AuthenticationError: the client does not know the secret.
        OSError: the connection broke, or no proof came in time.
    """
    end = time.monotonic() + timeout_s
    challenge = Challenge(secret, purpose)
    while not challenge.proven:
        sock.settimeout(_remaining(end))
        data = sock.recv(MAX_UNPROVEN_INPUT)
        if not data:
            raise AuthenticationError("closed without a proof")
        sock.sendall(challenge.feed(data))


def _remaining(end: float) -> float:
    remaining = end - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("no proof in time")
    return remaining


def _read_line(sock: socket.socket, end: float) -> bytes:
    """Return a line, byte by byte: what follows it belongs to the protocol that comes after the proof."""
    line = b""
    while not line.endswith(b"\n"):
        sock.settimeout(_remaining(end))
        byte = sock.recv(1)
        if not byte or len(line) > MAX_UNPROVEN_INPUT:
            raise AuthenticationError("the server closed the connection, or sent no proof")
        line += byte
    return line


@dataclass
class _PendingClient:
    host: str
    since: float
    has_spoken: bool = False


class PendingClients:
    """The connections of one server that have given no proof yet. May be used from several threads.

    Args:
        server: its name, for warnings.
        clock: monotonic seconds.
    """

    def __init__(self, server: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._waiting: dict[socket.socket, _PendingClient] = {}
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._warned_at: float | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sock: socket.socket, host: str) -> None:
        """Add a connection that was accepted."""
        with self._lock:
            self._waiting[sock] = _PendingClient(host, self._clock())

    def note_input(self, sock: socket.socket) -> None:
        """Note that it has sent something: more than most who only hold a connection."""
        with self._lock:
            if sock in self._waiting:
                self._waiting[sock].has_spoken = True

    def remove(self, sock: socket.socket) -> None:
        """Remove one that gave its proof, or is gone."""
        with self._lock:
            self._waiting.pop(sock, None)

    def overdue(self) -> list[socket.socket]:
        """Those whose time is over."""
        now = self._clock()
        with self._lock:
            return [sock for sock, one in self._waiting.items() if now - one.since >= PROOF_WITHIN_S]

    @property
    def is_full(self) -> bool:
        """True if one has to go before another may come."""
        return len(self._waiting) >= MAX_UNPROVEN

    def first_to_go(self) -> socket.socket | None:
        """Choose who is let go where it is full: the silent before those that spoke, of the address with the most, the
        oldest first; None while all are younger than `UNPROVEN_GRACE_S`."""
        now = self._clock()
        with self._lock:
            counts = Counter(one.host for one in self._waiting.values())
            ripe = [(s, one) for s, one in self._waiting.items() if now - one.since >= UNPROVEN_GRACE_S]
        if not ripe:
            return None
        return min(ripe, key=lambda item: (item[1].has_spoken, -counts[item[1].host], item[1].since))[0]

    def refuse(self, sock: socket.socket, why: str) -> None:
        """Forget it and end the connection, which its owner closes. One warning a minute, however many come."""
        with self._lock:
            one = self._waiting.pop(sock, None)
            if one is not None:
                self._refused[one.host] += 1
                self._warn(why)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    def _warn(self, why: str) -> None:
        now = self._clock()
        if self._warned_at is not None and now - self._warned_at < WARN_EVERY_S:
            return
        self._warned_at = now
        hosts = ", ".join(f"{number} from {host}" for host, number in self._refused.most_common(3))
        logger.warning(f"{self._server}: refused connections that did not prove to belong to the run: {hosts} ({why})")
        self._refused.clear()
