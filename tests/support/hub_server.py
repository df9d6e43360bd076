"""A model hub for tests: the routes that the hub's client asks, over real HTTP, out of a dictionary of files."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub:
    """Serves one version of each repository."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        """Args:
        repositories: name -> file -> content.
        """
        self.repositories = repositories
        self.url = ""
        self.sent: list[tuple[str, int]] = []
        """File and first byte of every answer with a body."""
        self.cards: dict[str, dict[str, Any]] = {}
        """Data sets, each with the head of its card."""
        self.asked: list[str] = []
        """Paths of all requests, each with its key."""
        self.break_off: str | None = None
        """File of which only the first half is sent."""

    def commit(self, name: str) -> str:
        """Return the version's id."""
        return hashlib.sha1(name.encode()).hexdigest()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a GET or a HEAD."""
        path = unquote(urlsplit(request.path).path)
        self.asked.append(f"{path} {request.headers.get('Authorization', '')}".strip())
        if (card := self.cards.get(path.removeprefix("/api/datasets/"))) is not None:
            return _send(request, json.dumps({"cardData": card}).encode(), {"Content-Type": "application/json"})
        for name, files in self.repositories.items():
            if path.startswith(f"/api/models/{name}/tree/"):
                rows = [{"type": "file", "path": f, "size": len(b), "oid": _etag(b)} for f, b in files.items()]
                return _send(request, json.dumps(rows).encode(), {"Content-Type": "application/json"})
            if path.startswith(f"/api/models/{name}"):
                siblings = [{"rfilename": f, "size": len(b), "blobId": _etag(b)} for f, b in files.items()]
                info = {"id": name, "sha": self.commit(name), "siblings": siblings, "private": False}
                return _send(request, json.dumps(info).encode(), {"Content-Type": "application/json"})
            file = path.partition(f"/{name}/resolve/")[2].partition("/")[2]
            if file in files:
                return self._send_file(request, name, file)
        request.send_error(404)
        return None

    def _send_file(self, request: BaseHTTPRequestHandler, name: str, file: str) -> None:
        content = self.repositories[name][file]
        headers = {"ETag": f'"{_etag(content)}"', "X-Repo-Commit": self.commit(name), "Accept-Ranges": "bytes"}
        first = int((request.headers.get("Range") or "bytes=0-")[6:].partition("-")[0])
        if request.command == "HEAD":
            return _send(request, content, headers)
        self.sent.append((file, first))
        if self.break_off == file:
            request.send_response(206 if first else 200)
            for key, value in {**headers, "Content-Length": str(len(content) - first)}.items():
                request.send_header(key, value)
            request.end_headers()
            request.wfile.write(content[first : first + (len(content) - first) // 2])
            request.close_connection = True
            return None
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        return _send(request, content[first:], headers, 206 if first else 200)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _send(request: BaseHTTPRequestHandler, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
    request.send_response(status)
    for key, value in {**headers, "Content-Length": str(len(body))}.items():
        request.send_header(key, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


@contextmanager
def serving(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serve until the end of the block."""
    hub = Hub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.answer(self)

        def do_HEAD(self) -> None:
            hub.answer(self)

        def log_message(self, *words: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
