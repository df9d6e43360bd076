"""The hub at which all roles of an attempt meet, beside those of earlier attempts at which servers still are."""

from collections.abc import Callable, Mapping
from typing import Any

from prime_hpc.config.engine_groups import ENGINE_ROLES
from prime_hpc.runtime.role_context import NODE
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.bus import BusServer
from prime_hpc.store.messaging.network import Network

Listener = Callable[[str, dict[str, Any]], None]


def host_of_hub(network: Network, environment: Mapping[str, str], *, on_nodes: bool) -> tuple[str, str | None]:
    """Return the address on which the supervisor listens, and the name by which others reach it where that is every
    address of the node.

    Raises:
        ConfigError: no such network on this node.
    """
    host = sockets.loopback()
    if on_nodes:
        place = network.place("control")
        host = sockets.ALL if place is None else place.address
    return host, environment.get(NODE) if sockets.is_wildcard(host) else None


class Hubs:
    """One hub an attempt of this job. Servers that outlive their attempt stay at its hub; everybody else who is still
    there belongs to an attempt that is over and is not heard."""

    def __init__(self) -> None:
        self._open: list[BusServer] = []
        self._newest = object()
        self._listener: Listener = lambda topic, payload: None

    def open(
        self, environment: Mapping[str, str], incarnation: int, listener: Listener, *, on_nodes: bool
    ) -> BusServer:
        """Open the hub of an attempt: on this machine alone, or (`on_nodes`) on the network that the config names.

        Args:
            environment: of the roles.
            incarnation: of the attempt; who states a lower one is not heard.
            listener: called with (topic, payload) of each message from now on, in a hub's thread.

        Raises:
            ConfigError: no port that it may use, no such network on this node.
            StoreError: it cannot listen.
        """
        network = Network.from_env(environment)
        host, own = host_of_hub(network, environment, on_nodes=on_nodes)
        for over in self._open[1:]:  # nobody is there any more: servers are those of the first attempt
            over.close()
        newest = self._newest = object()

        def hear(topic: str, payload: dict[str, Any]) -> None:
            if self._newest is newest or _is_of_server(topic, payload):
                self._listener(topic, payload)

        hub = BusServer(host, on_message=hear, incarnation=incarnation, ports=network.ports, advertise=own)
        self._listener, self._open = listener, [*self._open[:1], hub]
        return hub

    def publish(self, topic: str, /, **payload: Any) -> None:
        """Tell everybody. Never raises, never blocks."""
        for hub in self._open:
            hub.publish(topic, **payload)

    def close(self) -> None:
        """Close them all."""
        for hub in self._open:
            hub.close()


def _is_of_server(topic: str, payload: Mapping[str, Any]) -> bool:
    """Return whether a server, or its agent, speaks."""
    name = payload.get("label") if topic == "agent" else payload.get("role") if topic == "status" else None
    return str(name).split("[")[0] in ENGINE_ROLES
