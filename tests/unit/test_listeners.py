"""Listeners that were made deaf, in each of the ways: nobody connects, and who was connected goes on."""

import socket
from collections.abc import Callable

import pytest

from prime_hpc.store.messaging import listeners

WAYS = [listeners._drop_everything, listeners._require_signature]


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    return socket.create_connection((host, port), timeout_s)


@pytest.mark.parametrize("way", WAYS, ids=["filter", "signature"])
@pytest.mark.parametrize("bound, hosts", [("127.0.0.1", ["127.0.0.1"]), ("::", ["127.0.0.1", "::1"])])
def test_no_stranger_connects_and_what_is_connected_stays(
    way: Callable[[socket.socket], None], bound: str, hosts: list[str]
) -> None:
    with socket.socket(socket.AF_INET6 if ":" in bound else socket.AF_INET) as listener:
        try:
            listener.bind((bound, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        listener.listen()
        port = listener.getsockname()[1]
        with connect(hosts[0], port, 30) as early, listener.accept()[0] as served:
            try:
                way(listener)
            except PermissionError as error:
                pytest.skip(f"this kernel asks for CAP_NET_ADMIN: {error}")
            for host in hosts:
                with pytest.raises(TimeoutError):
                    connect(host, port, 0.2)
            early.sendall(b"still here")
            assert served.recv(10) == b"still here"


def test_where_the_first_way_is_refused_the_second_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(sock: socket.socket) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(listeners, "_drop_everything", refused)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert listeners._shut(listener)
        with pytest.raises(TimeoutError):
            connect("127.0.0.1", listener.getsockname()[1], 0.2)
        monkeypatch.setattr(listeners, "_require_signature", refused)
        assert not listeners._shut(listener)
