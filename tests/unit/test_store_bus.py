"""The bus: late joiners, lost connections, dead clients, nonsense on the wire; and life without it."""

import json
import socket
import threading
import time
from functools import partial
from typing import Any

import pytest

from prime_hpc.store.errors import StoreError
from prime_hpc.store.messaging import last_words
from prime_hpc.store.messaging.auth import prove
from prime_hpc.store.messaging.bus import BusClient, BusServer
from prime_hpc.store.messaging.json_lines import Peer, parse_address
from prime_hpc.store.messaging.run_bus import RunBusClient
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.store.waiting import ArtifactWatch
from tests.support.buses import WAIT_S, until
from tests.support.runs import free_port


def test_everybody_hears_also_the_one_who_spoke(hub, bus):
    one, two = bus(hub.address, "trainer"), bus(hub.address, "orchestrator")
    one.publish("weights", version=3, path="p")
    for end in (one, two):
        assert end.wait("weights", lambda m: m["version"] == 3, WAIT_S) == {"version": 3, "path": "p"}
        assert end.latest("weights")["version"] == 3
    assert hub.latest("weights") == {"version": 3, "path": "p"}
    assert one.latest("batch") is None
    assert hub.latest("batch") is None


def test_late_joiner_gets_the_last_of_each_topic(hub, bus):
    early = bus(hub.address)
    for version in range(5):
        early.publish("weights", version=version)
    early.publish("batch", step=7)
    early.wait("batch", lambda m: m["step"] == 7, WAIT_S)
    late = bus(hub.address)
    heard: list[dict[str, Any]] = []
    late.subscribe("weights", heard.append)
    assert late.wait("batch", lambda m: m["step"] == 7, WAIT_S)
    assert late.wait("weights", lambda m: m["version"] == 4, WAIT_S)
    until(lambda: heard)
    assert heard == [{"version": 4}]


def test_late_joiners_and_late_subscribers_get_the_last_word_about_each_server(hub, bus):
    """Also after a connection that broke: every word is heard once."""

    def say(index, state, role="inference"):
        hub.publish("server", role=role, index=index, state=state)

    for word in ((0, "lost"), (1, "lost"), (0, "starting"), (0, "lost", "teacher")):
        say(*word)
    late = bus(hub.address)
    heard: list[tuple[Any, ...]] = []
    late.subscribe("server", lambda m: heard.append((m["index"], m["state"], m["role"])))
    expected = [(0, "starting", "inference"), (1, "lost", "inference"), (0, "lost", "teacher")]
    until(lambda: len(heard) == 3)
    assert sorted(heard) == sorted(expected)
    assert late.wait("server", lambda m: m["index"] == 1, WAIT_S)["state"] == "lost"
    assert hub.latest("server")["role"] == late.latest("server")["role"] == "teacher"
    again: list[tuple[Any, ...]] = []
    late.subscribe("server", lambda m: again.append((m["index"], m["state"], m["role"])))
    until(lambda: len(again) == 3)
    before = late._peer
    before.sock.shutdown(socket.SHUT_RDWR)  # a cut cable
    say(1, "starting")
    until(lambda: late._peer not in (None, before))
    late.publish("served", version=1)  # its echo comes after all that the hub repeats to a new connection
    assert late.wait("served", lambda m: True, WAIT_S)
    assert heard[3:] == again[3:] == [(1, "starting", "inference")]


def test_the_words_of_runs_that_come_and_go_do_not_pile_up(hub, bus, monkeypatch):
    """Who joined a hub of thousands of runs was sent megabytes, and of more than its backlog not the newest."""
    monkeypatch.setattr(last_words, "MOST_OF_RUNS", 20)
    early = bus(hub.address)
    until(lambda: early.connected)
    hub.publish("stop", save=True)
    for index in range(3):
        hub.publish("server", role="inference", index=index, state="starting")
    hub.publish("launch/trainer", start_number=1)
    for number in range(100):
        for topic in ("batch", "weights"):
            hub.publish(f"run_{number}/1/{topic}", step=number)
    late = bus(hub.address)
    for client in (early, late):
        until(lambda: client.latest("run_99/1/weights") is not None)  # noqa: B023
        assert client.latest("run_99/1/batch") == {"step": 99} and client.latest("run_0/1/batch") is None
        assert client.latest("stop") == {"save": True} and len(client._latest.of("server")) == 3
        assert client.latest("launch/trainer") == {"start_number": 1}
        assert len(list(client._latest)) <= 22
    assert len(list(hub._latest)) <= 22


def test_the_hub_speaks_and_listens(bus):
    heard = []
    hub = BusServer(on_message=lambda topic, payload: heard.append((topic, payload)))
    try:
        one = bus(hub.address)
        one.publish("status", role="trainer", index=0, state="ready")
        until(lambda: heard)
        assert heard == [("status", {"role": "trainer", "index": 0, "state": "ready"})]
        hub.publish("stop", reason="user", save=True)
        assert one.wait("stop", lambda m: m["save"], WAIT_S)["reason"] == "user"
        assert bus(hub.address).wait("stop", lambda m: True, WAIT_S)
    finally:
        hub.close()


def test_subscribers_see_every_message_once_in_order_even_across_a_reconnection(hub, bus):
    one, two = bus(hub.address), bus(hub.address)
    heard = []
    two.subscribe("batch", lambda m: heard.append(m["step"]))
    until(lambda: two.connected)
    for step in range(50):
        one.publish("batch", step=step)
    until(lambda: len(heard) == 50)
    before = two._peer
    before.sock.shutdown(socket.SHUT_RDWR)  # a cut cable
    until(lambda: two._peer not in (None, before))
    two.publish("served", version=1)  # its echo comes after all that the hub repeats to a new connection
    assert two.wait("served", lambda m: True, WAIT_S)
    one.publish("batch", step=50)
    until(lambda: 50 in heard)
    assert heard == list(range(51))


def test_a_late_subscriber_hears_the_latest(hub, bus):
    one = bus(hub.address)
    one.publish("batch", step=3)
    one.wait("batch", lambda m: True, WAIT_S)
    heard: list[dict[str, Any]] = []
    one.subscribe("batch", heard.append)
    until(lambda: heard)
    assert heard == [{"step": 3}]


def test_wait_sees_a_message_that_was_followed_at_once(hub, bus):
    one, two = bus(hub.address), bus(hub.address)
    found = []
    thread = threading.Thread(target=lambda: found.append(two.wait("batch", lambda m: m["step"] == 17, WAIT_S)))
    thread.start()
    until(lambda: two.connected and two._changed._waiters)  # the thread waits
    for step in range(40):
        one.publish("batch", step=step)
    thread.join()
    assert found == [{"step": 17}]


def test_wait_ends_by_its_deadline_or_when_closed(hub, bus):
    one = bus(hub.address)
    assert one.wait("batch", lambda m: True, 0.05) is None
    results = []
    thread = threading.Thread(target=lambda: results.append(one.wait("batch", lambda m: True, 60)))
    thread.start()
    until(lambda: one._changed._waiters)
    one.close()
    thread.join(WAIT_S)
    assert results == [None]
    one.publish("batch", step=1)  # closed: silent
    one.close()


def test_messages_before_the_hub_is_there_arrive(bus):
    port = free_port()
    one = bus(f"s3cret@127.0.0.1:{port}")
    one.publish("batch", step=1)
    time.sleep(0.1)
    hub = BusServer(port=port, secret="s3cret")
    try:
        assert one.wait("batch", lambda m: m["step"] == 1, WAIT_S)
    finally:
        hub.close()


def test_client_outlives_its_hub_and_finds_the_next(bus):
    port = free_port()
    hub = BusServer(port=port)
    one = bus(hub.address)
    hub.publish("batch", step=1)
    assert one.wait("batch", lambda m: True, WAIT_S)
    hub.close()
    until(lambda: not one.connected)
    one.publish("batch", step=2)
    second = BusServer(port=port, secret=one.secret)
    try:
        assert one.wait("batch", lambda m: m["step"] == 2, WAIT_S)
        assert second.latest("batch") == {"step": 2}
    finally:
        second.close()


def test_last_words_are_delivered_before_closing(hub):
    heard = []
    hub._on_message = lambda topic, payload: heard.append(payload["n"])
    one = BusClient(hub.address, "trainer")
    until(lambda: one.connected)
    for n in range(30):
        one.publish("served", n=n, filler="x" * 100_000)  # more than a socket buffer
    one.close()
    until(lambda: len(heard) == 30)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\n\n\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff\xfe\x00\x01\n",
        b"[1, 2]\n7\nnull\n",
        b'{"topic": 3, "payload": {}}\n{"topic": "a"}\n{"payload": {}}\n{"topic": "a", "payload": []}\n',
        b"[" * 100_000 + b"\n",
        b'{"topic": "batch", "payload"',
        b"9" * 10_000 + b"\n",
    ],
)
def test_hub_survives_nonsense(hub, bus, nonsense):
    with socket.create_connection(parse_address(hub.address), 5) as raw:
        raw.sendall(nonsense)
    one = bus(hub.address)
    one.publish("batch", step=1)
    assert one.wait("batch", lambda m: m["step"] == 1, WAIT_S)
    until(lambda: hub.num_clients == 1)


def test_an_endless_line_is_cut_off(hub, bus):
    with socket.create_connection(parse_address(hub.address), 5) as raw, pytest.raises(OSError):
        raw.settimeout(WAIT_S)
        for _ in range(1000):
            raw.sendall(b"x" * 65536)
        raise AssertionError("the hub took 64 MiB without a line end")
    one = bus(hub.address)
    one.publish("batch", step=1)
    assert one.wait("batch", lambda m: True, WAIT_S)


def test_a_client_that_never_reads_does_not_slow_the_others(hub, bus):
    with socket.create_connection(parse_address(hub.address), 5) as deaf:
        prove(deaf, hub.address.partition("@")[0], "bus")
        one = bus(hub.address)
        until(lambda: hub.num_clients == 2)
        filler = "x" * 50_000
        for step in range(600):
            one.publish("batch", step=step, filler=filler)
            if step % 50 == 49:
                assert one.wait("batch", lambda m, step=step: m["step"] == step, WAIT_S)
        until(lambda: hub.num_clients == 1)  # the one that never read was let go


def test_for_a_word_to_the_hub_alone_the_other_clients_are_not_looked_at(bus, monkeypatch):
    """Of 2,000 ranks a word comes every few milliseconds: to look at them all for each is a few milliseconds, too."""
    heard, looks = [], []
    hub = BusServer(on_message=lambda topic, payload: heard.append(payload))
    try:
        clients = [bus(hub.address) for _ in range(30)]
        until(lambda: hub.num_clients == 30)
        hub.publish("pulse", n=1)
        assert all(client.wait("pulse", lambda m: m["n"] == 1, WAIT_S) for client in clients)

        def wants_write(peer):
            if threading.get_ident() == hub._thread.ident:
                looks.append(peer)
            return bool(peer._unsent)

        monkeypatch.setattr(Peer, "wants_write", property(wants_write))

        def said(n):
            return len(heard) == n

        for n in range(1, 101):
            clients[n % 30].publish("status", n=n)
            until(partial(said, n))
        assert len(looks) < 300  # it was 3,000
        hub.publish("pulse", n=2)
        assert all(client.wait("pulse", lambda m: m["n"] == 2, WAIT_S) for client in clients)
    finally:
        hub.close()


def test_dead_clients_are_forgotten(hub, bus):
    for _ in range(20):
        raw = socket.create_connection(parse_address(hub.address), 5)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        raw.close()  # a reset, as of a killed process
    one = bus(hub.address)
    one.publish("batch", step=1)
    assert one.wait("batch", lambda m: True, WAIT_S)
    until(lambda: hub.num_clients == 1)


def test_a_failing_callback_ends_nobody(bus):
    def fail(*_):
        raise RuntimeError("a callback failed")

    hub = BusServer(on_message=fail)
    try:
        one = bus(hub.address)
        one.subscribe("batch", fail)
        for step in (1, 2):
            one.publish("batch", step=step)
            assert one.wait("batch", lambda m, step=step: m["step"] == step, WAIT_S)
    finally:
        hub.close()


def test_a_former_life_is_not_heard(bus):
    hub = BusServer(incarnation=2)
    try:
        old, new, unstated = (
            bus(hub.address, "a", incarnation=1),
            bus(hub.address, "b", incarnation=2),
            bus(hub.address, "c"),
        )
        old.publish("batch", step=666)
        until(lambda: old.connected and not old._outgoing)
        new.publish("batch", step=1)
        assert unstated.wait("batch", lambda m: m["step"] == 1, WAIT_S)
        unstated.publish("weights", version=1)
        assert new.wait("weights", lambda m: True, WAIT_S)
        assert hub.latest("batch") == {"step": 1}
    finally:
        hub.close()


def test_without_an_address_everything_is_silent(bus):
    one = bus(None)
    one.publish("batch", step=1, odd=object())
    one.subscribe("batch", print)
    assert one.latest("batch") is None
    start = time.monotonic()
    assert one.wait("batch", lambda m: True, 0.1) is None
    assert time.monotonic() - start >= 0.1  # or a waiting loop would spin
    one.close()


def test_messages_take_whatever_json_lacks(hub, bus):
    one = bus(hub.address)
    one.publish("served", path=RunPaths, number=float("inf"))
    assert "RunPaths" in one.wait("served", lambda m: True, WAIT_S)["path"]


def test_bad_addresses(hub):
    for address in ("nonsense", "host:", ":8000", "host:port"):
        with pytest.raises(ValueError, match="host:port"):
            BusClient(address, "trainer")
    with pytest.raises(StoreError, match=f"cannot listen on 127.0.0.1:{hub.address.rpartition(':')[2]}"):
        BusServer(port=int(hub.address.rpartition(":")[2]))


def test_wire_is_line_json(hub):
    hub.publish("batch", step=4)
    with socket.create_connection(parse_address(hub.address), 5) as raw:
        prove(raw, hub.address.partition("@")[0], "bus")
        raw.settimeout(WAIT_S)
        line = raw.makefile("rb").readline()
    message = json.loads(line)
    assert (message["topic"], message["payload"]) == ("batch", {"step": 4})


def test_what_an_earlier_life_of_a_run_announced_is_not_heard_by_its_next(hub, bus, tmp_path):
    trainer = bus(hub.address)
    first = bus(hub.address, "orchestrator", run="run_a/1")
    first.publish("batch", step=7)
    assert RunBusClient(trainer, "run_a/1").wait("batch", lambda m: m["step"] == 7, WAIT_S)
    second, rollouts = RunBusClient(trainer, "run_a/2"), RunPaths(tmp_path).rollouts
    rollouts.mkdir()
    watch = ArtifactWatch(rollouts / "step_000007", bus=second, topic="batch", key={"step": 7}, min_incarnation=2)
    assert watch.poll() is None and watch.found_at is None and watch.error is None
    again = bus(hub.address, "orchestrator", run="run_a/2")
    assert again.latest("batch") is None
    again.publish("stop", reason="everybody is meant")
    assert trainer.wait("stop", bool, WAIT_S) and second.latest("stop")
