"""`GET /metrics` for whoever sends the token, and nothing for anybody else.

A small HTTP of its own: one request a connection. Who has not sent a whole request within `REQUEST_S` or `MOST_BYTES`
is hung up on, at most `MOST_CONNECTIONS` are kept at once (the oldest goes first), and without the token every path
and method gets the same empty 401.
"""

import contextlib
import gzip
import hmac
import socket
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import parse_qs, urlsplit

from loguru import logger

REQUEST_S = 2.0
ANSWER_S = 10.0
MOST_BYTES = 8192
MOST_CONNECTIONS = 32
_CONTENT = "text/plain; version=0.0.4; charset=utf-8"
_REASONS = {200: "OK", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class Endpoint:
    """Answers from its making to `close`.

    Args:
        listener: listens already.
        token: that a client must send as `Authorization: Bearer`.
        run: its name; a client that asks for another one (`/metrics?run=NAME`) is told that it is not here.
    """

    def __init__(self, listener: socket.socket, token: str, run: str, text: Callable[[], str]) -> None:
        self._listener, self._run, self._text = listener, run, text
        self._expected = token.encode()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}
        self._closed = False
        threading.Thread(target=self._accept, name="prometheus", daemon=True).start()

    def close(self) -> None:
        """Listen no more, and hang up."""
        self._closed = True
        for sock in (self._listener, *list(self._open)):
            _hang_up(sock)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                logger.warning(f"prometheus: {error}")  # no descriptors left
                time.sleep(1.0)
                continue
            with self._lock:
                if len(self._open) >= MOST_CONNECTIONS:
                    oldest = next(iter(self._open))
                    self._open.pop(oldest)  # its thread may take a while to notice
                    _hang_up(oldest)
                self._open[sock] = None
            try:
                threading.Thread(target=self._serve, args=(sock,), name="prometheus-scrape", daemon=True).start()
            except RuntimeError:  # no threads left
                self._forget(sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):
                status, body, headers = self._answer(_read_request(sock))
                lines = [f"HTTP/1.1 {status} {_REASONS[status]}", f"Content-Length: {len(body)}", "Connection: close"]
                lines += [f"{name}: {value}" for name, value in headers.items()]
                sock.settimeout(ANSWER_S)
                sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        finally:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.pop(sock, None)
        sock.close()

    def _answer(self, request: tuple[str, str, Mapping[str, list[str]]]) -> tuple[int, bytes, dict[str, str]]:
        method, target, headers = request
        if not self._knows(headers.get("authorization", [])):
            return 401, b"", {"WWW-Authenticate": "Bearer"}
        if method != "GET":
            return 405, b"", {"Allow": "GET"}
        address = urlsplit(target)
        wanted = parse_qs(address.query).get("run", [self._run])
        if address.path != "/metrics" or wanted != [self._run]:
            return 404, f"{self._run} answers at /metrics\n".encode(), {}
        body, more = self._text().encode(), {"Content-Type": _CONTENT}
        if any("gzip" in value for value in headers.get("accept-encoding", [])):
            body, more = gzip.compress(body, 1), more | {"Content-Encoding": "gzip"}
        return (200, body, more) if body else (503, b"", {})

    def _knows(self, given: list[str]) -> bool:
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(" ")
        return hmac.compare_digest(token.strip().encode(), self._expected) and scheme.lower() == "bearer"


def _hang_up(sock: socket.socket) -> None:
    """End a connection from another thread than the one that reads it, which then wakes up."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _read_request(sock: socket.socket) -> tuple[str, str, dict[str, list[str]]]:
    """Return a request's method, target and headers (names in lower case).

    Raises:
        OSError: none came in time.
        ValueError: it is too long, or no HTTP.
    """
    end, data = time.monotonic() + REQUEST_S, b""
    while b"\r\n\r\n" not in data:
        left = end - time.monotonic()
        if left <= 0 or len(data) > MOST_BYTES:
            raise ValueError("no request in time")
        sock.settimeout(left)
        more = sock.recv(MOST_BYTES)
        if not more:
            raise ValueError("closed before a request")
        data += more
    first, *lines = data.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    method, target, version = first.split(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("no HTTP/1")
    headers: dict[str, list[str]] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers.setdefault(name.strip().lower(), []).append(value.strip())
    return method, target, headers
