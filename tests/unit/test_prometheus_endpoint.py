"""The endpoint of a run's figures: it answers to its token alone, which only the user may read."""

import contextlib
import gzip
import http.client
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from prime_hpc.supervisor.prometheus import endpoint
from prime_hpc.supervisor.prometheus.endpoint import Endpoint
from prime_hpc.supervisor.prometheus.folder import FOLDER, TOKEN, read_token, take_token

WAIT_S = 280


# ------------------------------------------------------------------------------------------------ the endpoint


@contextlib.contextmanager
def serve() -> Iterator[tuple[int, Endpoint]]:
    """The port of an endpoint of the run `demo`."""
    listener = socket.create_server(("127.0.0.1", 0))
    with contextlib.closing(Endpoint(listener, "secret", "demo", lambda: "figure 1\n")) as found:
        yield listener.getsockname()[1], found


@pytest.fixture
def served() -> Iterator[tuple[int, Endpoint]]:
    with serve() as found:
        yield found


def ask(port: int, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, gzip.decompress(body) if answer.headers.get("Content-Encoding") == "gzip" else body


def test_who_has_the_token_is_answered(served: tuple[int, Endpoint]) -> None:
    port, _ = served
    assert ask(port, Authorization="Bearer secret") == (200, b"figure 1\n")
    assert ask(port, "/metrics?run=demo", Authorization="bearer secret", Accept_Encoding="gzip") == (200, b"figure 1\n")
    assert ask(port, "/metrics?run=other", Authorization="Bearer secret")[0] == 404
    assert ask(port, "/", Authorization="Bearer secret")[0] == 404
    assert ask(port, method="POST", Authorization="Bearer secret")[0] == 405


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer wrong", "Bearer secre", "Bearer secrett", "Basic secret", "secret"]
)
@pytest.mark.parametrize(("method", "path"), [("GET", "/metrics"), ("POST", "/metrics"), ("GET", "/x?run=other")])
def test_strangers_are_told_nothing(served: tuple[int, Endpoint], given: str, method: str, path: str) -> None:
    headers = {"Authorization": given} if given else {}
    assert ask(served[0], path, method, **headers) == (401, b"")


def test_two_tokens_are_none(served: tuple[int, Endpoint]) -> None:
    with socket.create_connection(("127.0.0.1", served[0]), timeout=WAIT_S) as sock:
        both = "Authorization: Bearer wrong\r\nAuthorization: Bearer secret\r\n"
        sock.sendall(f"GET /metrics HTTP/1.1\r\n{both}\r\n".encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("sent", [b"", b"GET", b"\x16\x03\x01 TLS\r\n\r\n", b"GET / FTP/1\r\n\r\n", b"x" * 20_000])
def test_who_sends_no_request_is_hung_up_on(
    served: tuple[int, Endpoint], sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_S", 0.2)
    with socket.create_connection(("127.0.0.1", served[0]), timeout=WAIT_S) as sock:
        sock.sendall(sent)
        try:
            assert sock.recv(100) == b""
        except ConnectionResetError:  # with bytes that were not read
            pass


def test_idle_strangers_keep_nobody_out(served: tuple[int, Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "REQUEST_S", float(WAIT_S))
    idle = [socket.create_connection(("127.0.0.1", served[0]), timeout=WAIT_S) for _ in range(100)]
    try:
        assert ask(served[0], Authorization="Bearer secret")[0] == 200
        gone = 0
        for sock in idle[: 100 - endpoint.MOST_CONNECTIONS - 1]:
            gone += sock.recv(1) == b""
        assert gone == 100 - endpoint.MOST_CONNECTIONS - 1
    finally:
        for sock in idle:
            sock.close()


# ------------------------------------------------------------------------------------------------ the token


def test_runs_that_begin_at_once_share_a_token(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: take_token(tmp_path / FOLDER), range(16)))
    assert len(tokens) == 1 and len(tokens.pop()) >= 32
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [TOKEN]
    assert (tmp_path / FOLDER / TOKEN).stat().st_mode & 0o777 == 0o600


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    take_token(tmp_path)
    (tmp_path / TOKEN).chmod(0o640)
    with pytest.raises(OSError, match="not this user's alone"):
        take_token(tmp_path)
    (tmp_path / TOKEN).unlink()
    (tmp_path / TOKEN).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        take_token(tmp_path)
    (tmp_path / TOKEN).unlink()
    (tmp_path / TOKEN).touch(0o600)
    with pytest.raises(OSError, match="is empty"):
        read_token(tmp_path)
