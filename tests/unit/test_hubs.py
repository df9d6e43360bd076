"""The hubs of a job's attempts: servers stay where they are, everybody else meets at the newest."""

import time
from collections.abc import Callable
from typing import Any

from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.supervisor.hub import Hubs

WAIT_S = 200.0


def wait(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def keep_in(words: list[tuple[str, dict[str, Any]]]) -> Callable[[str, dict[str, Any]], None]:
    return lambda topic, said: words.append((topic, said))


def test_servers_of_the_first_attempt_are_heard_and_told_in_the_third() -> None:
    hubs = Hubs()
    heard: list[list[tuple[str, dict[str, Any]]]] = [[], [], []]
    addresses: list[str] = []
    clients: list[BusClient] = []
    try:
        for number in range(3):
            hub = hubs.open({}, number + 1, keep_in(heard[number]), on_nodes=False)
            addresses.append(hub.address)
            clients.append(BusClient(hub.address, "x", incarnation=number + 1))
            wait(lambda: clients[-1].connected)
        first, second, third = clients
        wait(lambda: not second.connected)  # closed: nobody is there any more
        first.publish("status", role="trainer", index=0, state="running", time=0.0)  # of an attempt that is over
        first.publish("agent", label="trainer", event="beat")
        first.publish("agent", label="inference[1]", event="beat")
        wait(lambda: heard[2])
        third.publish("status", role="trainer", index=0, state="ready", time=0.0)
        wait(lambda: len(heard[2]) == 2)
        assert [topic for topic, _ in heard[2]] == ["agent", "status"]
        assert heard[2][0][1]["label"] == "inference[1]" and heard[2][1][1]["state"] == "ready"
        assert heard[0] == heard[1] == []
        hubs.publish("pulse", time=1.0)
        wait(lambda: first.latest("pulse") and third.latest("pulse"))
    finally:
        for client in clients:
            client.close()
        hubs.close()
    assert len(set(addresses)) == 3


def test_a_role_that_outlives_its_attempt_is_heard_where_its_agent_is_and_moves_itself() -> None:
    hubs = Hubs()
    heard: list[list[tuple[str, dict[str, Any]]]] = [[], [], []]
    clients: list[BusClient] = []
    try:
        first = hubs.open({}, 1, keep_in(heard[0]), on_nodes=False)
        clients += [BusClient(first.address, name, incarnation=1) for name in ("orchestrator", "agent", "trainer")]
        role, agent, trainer = clients
        role.publish("weights", version=4)
        wait(lambda: role.latest("weights"))
        hubs.keep(["orchestrator"])
        second = hubs.open({}, 2, keep_in(heard[1]), on_nodes=False)
        agent.publish("agent", label="orchestrator", event="beat")
        trainer.publish("agent", label="trainer", event="beat")
        wait(lambda: heard[1])
        role.move(second.place, 2)
        assert role.latest("weights") is None, "announced in an attempt that is over"
        role.publish("status", role="orchestrator", index=0, state="ready", time=0.0)
        wait(lambda: len(heard[1]) == 2)
        second.publish("weights", version=3)
        wait(lambda: role.latest("weights") == {"version": 3})
        assert [payload.get("label") or payload["role"] for _, payload in heard[1]] == ["orchestrator"] * 2
        hubs.keep([])  # the third attempt starts another one
        hubs.open({}, 3, keep_in(heard[2]), on_nodes=False)
        wait(lambda: not role.connected)  # that hub is closed
        agent.publish("agent", label="orchestrator", event="beat")
        agent.publish("agent", label="inference[0]", event="beat")
        wait(lambda: heard[2])
        assert [payload["label"] for _, payload in heard[2]] == ["inference[0]"]
    finally:
        for client in clients:
            client.close()
        hubs.close()
