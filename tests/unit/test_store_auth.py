"""Who may talk to a run's own servers: nobody without the secret, and few of those at once, briefly."""

import contextlib
import json
import resource
import socket
import threading
import time

import pytest

from prime_hpc.store.batch.rank_files import write_batch
from prime_hpc.store.manifest import MANIFEST
from prime_hpc.store.messaging import auth
from prime_hpc.store.messaging.auth import (
    MAX_UNPROVEN,
    AuthenticationError,
    Challenge,
    PendingClients,
    new_secret,
    prove,
)
from prime_hpc.store.messaging.bus import BusClient, BusServer
from prime_hpc.store.messaging.file_transfer import HandoverServer
from prime_hpc.store.messaging.json_lines import parse_address
from prime_hpc.store.run_paths import RunPaths
from tests.support.buses import WAIT_S, until
from tests.unit.test_store_batches import make_rank

WORDS = [
    b"",
    b"\n",
    b'{"topic": "stop", "payload": {"reason": "mischief"}}\n',
    b'{"topic": "stop", "payload": {"reason": "mischief"}, "secret": ""}\n',
    b'{"artifact": "rollouts/step_000001", "file": "manifest.json"}\n',
    b'{"nonce": "x"}\n{"proof": "x"}\n{"topic": "stop", "payload": {}}\n',
    b'{"nonce": null}\n',
    b'{"nonce": "\\ud800"}\n',
    b"GET / HTTP/1.1\r\n\r\n",
    b"x" * 100_000,
]


@pytest.fixture
def hub():
    heard: list[str] = []
    hub = BusServer(on_message=lambda topic, payload: heard.append(topic))
    hub.heard = heard  # type: ignore[attr-defined]
    hub.publish("server", url="http://gpu17:1234/v1")
    yield hub
    hub.close()


@pytest.fixture
def handing(tmp_path, hub):
    """A server that hands out a batch; its address."""
    bus = BusClient(hub.address, "orchestrator")
    until(lambda: bus.connected)
    paths = RunPaths(tmp_path)
    write_batch(paths, 1, [make_rank([4], [1])], state={})
    server = HandoverServer(bus)
    yield parse_address(server.offer(paths.rollouts_step(1)) or "")
    server.close()
    bus.close()


@pytest.fixture(params=["bus", "handover"])
def address(request, hub, handing):
    return parse_address(hub.address) if request.param == "bus" else handing


def everything(raw: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    raw.settimeout(WAIT_S)
    answer = b""
    try:
        while data := raw.recv(4096):
            answer += data
    except ConnectionError:  # closed with words of ours unread
        pass
    return answer


@pytest.mark.parametrize("words", WORDS, ids=range(len(WORDS)))
def test_a_stranger_is_told_nothing_and_let_go(address, hub, words):
    with socket.create_connection(address, 5) as raw:
        try:
            raw.sendall(words)
        except ConnectionError:
            return
        answer = everything(raw)  # ends, so it was let go
    assert answer == b"" or set(json.loads(answer)) == {"nonce"}
    assert hub.heard == [] and hub.latest("stop") is None


def test_a_wrong_secret_and_a_replayed_proof_are_refused(address, hub):
    with socket.create_connection(address, 5) as raw, pytest.raises(AuthenticationError):
        prove(raw, "guess", "bus")
    secret = hub.address.partition("@")[0]
    for purpose in ("bus", "handover"):
        seen: list[bytes] = []

        class Tap:
            def __init__(self, sock):
                self.settimeout, self.recv, self._send = sock.settimeout, sock.recv, sock.sendall

            def sendall(self, data, seen=seen):
                seen.append(data)
                self._send(data)

        with socket.create_connection(address, 5) as raw:
            try:
                prove(Tap(raw), secret, purpose)  # type: ignore[arg-type]
            except AuthenticationError:
                continue  # the other server's: a proof for one is none for the other
        assert not any(secret.encode() in line for line in seen)
        with socket.create_connection(address, 5) as raw:
            raw.sendall(seen[0])
            assert b"nonce" in raw.recv(4096)
            raw.sendall(seen[1])
            assert everything(raw) == b""
        return
    raise AssertionError("no purpose fitted")


def test_a_false_server_learns_nothing_and_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bus = BusClient(f"s3cret@127.0.0.1:{listener.getsockname()[1]}", "trainer")
        bus.publish("weights", path="/somewhere")
        listener.settimeout(WAIT_S)
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(WAIT_S)
            sock.recv(4096)
            sock.sendall(b'{"nonce": "00"}\n')
            assert set(json.loads(sock.recv(4096))) == {"proof"}
            sock.sendall(b'{"proof": "00"}\n{"topic": "stop", "payload": {}, "hub": "x", "seq": 1}\n')
            assert everything(sock) == b""
        assert bus.latest("stop") is None and not bus.connected
        bus.close()


def comes_in(address, secret, purpose):
    """As those of the run do: again where it was let go, which on a busy machine an own one may be that spoke late."""
    deadline = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(AuthenticationError), socket.create_connection(address, WAIT_S) as raw:
            prove(raw, secret, purpose, WAIT_S)
            return
        assert time.monotonic() < deadline, "idle connections hold all places"


def test_a_thousand_idle_connections_hold_no_place(address, hub):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("a thousand connections from one process need more descriptors than its hard limit")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    idle: list[socket.socket] = []
    try:
        more = (socket.create_connection(address, WAIT_S) for _ in range(1000))
        flood = threading.Thread(target=idle.extend, args=(more,))
        flood.start()
        secret = hub.address.partition("@")[0]
        for _ in range(20):
            comes_in(address, secret, "bus" if address == parse_address(hub.address) else "handover")
        flood.join(WAIT_S)
        assert len(idle) == 1000
        for raw in idle:
            assert everything(raw) == b""
    finally:
        for raw in idle:
            raw.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_many_own_processes_come_in_at_once(hub):
    buses = [BusClient(hub.address, f"rank-{i}") for i in range(3 * MAX_UNPROVEN)]
    try:
        until(lambda: hub.num_clients == len(buses))
        assert all(bus.wait("server", bool, WAIT_S) for bus in buses)
    finally:
        closers = [threading.Thread(target=bus.close) for bus in buses]
        for thread in closers:
            thread.start()
        for thread in closers:
            thread.join()


def test_who_is_let_go_first(monkeypatch):
    now = [0.0]
    pending = PendingClients("bus", clock=lambda: now[0])
    socks = [socket.socket() for _ in range(MAX_UNPROVEN)]
    try:
        for i, sock in enumerate(socks):
            pending.add(sock, "10.0.0.1" if i < 3 else "10.0.0.2")
            now[0] += 0.001
        assert pending.is_full and pending.first_to_go() is None  # all too young: nobody is, an own one may be slow
        now[0] += 0.1
        assert pending.first_to_go() is socks[3]  # the oldest of the address with the most
        for sock in socks[3:]:
            pending.note_input(sock)
        assert pending.first_to_go() is socks[0]  # the silent first
        assert pending.overdue() == []
        now[0] += auth.PROOF_WITHIN_S
        assert len(pending.overdue()) == len(socks)
    finally:
        for sock in socks:
            sock.close()


def test_one_warning_a_minute(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(auth.logger, "warning", said.append)
    now = [0.0]
    pending = PendingClients("bus", clock=lambda: now[0])
    for second in range(120):
        now[0] = float(second)
        with socket.socket() as sock:
            pending.add(sock, "10.0.0.1")
            pending.refuse(sock, "no proof in time")
            pending.refuse(sock, "twice")
    assert len(said) == 2 and "60 from 10.0.0.1" in said[1]


def test_the_challenge_itself():
    secret = new_secret()
    assert len(secret) >= 32 and secret != new_secret() and "@" not in secret
    challenge = Challenge(secret, "bus")
    assert challenge.feed(b'{"nonce"') == b""
    answer = json.loads(challenge.feed(b': "abc"}\n'))
    right = auth._proof(secret, "bus", "client", "abc", answer["nonce"])
    with pytest.raises(AuthenticationError):  # what the server itself would answer is no client's proof
        Challenge(secret, "bus").feed(json.dumps({"proof": right}).encode() + b"\n")
    proof = json.loads(challenge.feed(json.dumps({"proof": right}).encode() + b"\n"))
    assert challenge.proven and proof["proof"] != right


def test_the_manifest_is_not_handed_to_strangers(handing, hub):
    with socket.create_connection(handing, 5) as raw:
        prove(raw, hub.address.partition("@")[0], "handover")
        raw.settimeout(WAIT_S)
        raw.sendall(json.dumps({"artifact": "rollouts/step_000001", "file": MANIFEST}).encode() + b"\n")
        assert "size" in json.loads(raw.makefile("rb").readline())
