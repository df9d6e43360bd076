"""The hub at which all roles of an attempt meet, beside those of earlier attempts at which servers still are."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from prime_hpc.config.run_files import ENGINE_ROLES
from prime_hpc.runtime.role_context import NODE
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.auth import new_secret
from prime_hpc.store.messaging.bus import BusServer
from prime_hpc.store.messaging.network import Network

Listener = Callable[[str, dict[str, Any]], None]


def host_of_hub(network: Network, environment: Mapping[str, str], *, on_nodes: bool) -> tuple[str, str | None]:
    """Return the address on which the supervisor listens, and the name by which others reach it where that is every
    address of the node. Raises ConfigError: no such network on this node."""
    host = sockets.loopback()
    if on_nodes:
        place = network.place("control")
        host = sockets.ALL if place is None else place.address
    return host, environment.get(NODE) if sockets.is_wildcard(host) else None


class Hubs:
    """One hub an attempt of this job, all of one secret. Servers, and agents of other roles that outlive their attempt,
    stay at its hub; everybody else who is still there belongs to an attempt that is over and is not heard."""

    def __init__(self) -> None:
        self._secret = new_secret()
        self._open: list[BusServer] = []
        self._kept: list[set[str]] = []
        """Of each hub, the roles there that outlived its attempt, beside the servers."""
        self._newest: set[str] = set()
        self._listener: Listener = lambda topic, payload: None

    def open(
        self, environment: Mapping[str, str], incarnation: int, listener: Listener, *, on_nodes: bool
    ) -> BusServer:
        """Open the hub of an attempt: on this machine alone, or (`on_nodes`) on the network that the config names.

        Args:
            incarnation: of the attempt; who states a lower one is not heard.
            listener: called with (topic, payload) of each message from now on, in a hub's thread.

        Raises:
            ConfigError: no port that it may use, no such network on this node.
            StoreError: it cannot listen.
        """
        network = Network.from_env(environment)
        host, own = host_of_hub(network, environment, on_nodes=on_nodes)
        kept = self._newest = set()

        def hear(topic: str, payload: dict[str, Any]) -> None:
            if self._newest is kept or _speaker(topic, payload) in {*ENGINE_ROLES, *kept}:
                self._listener(topic, payload)

        hub = BusServer(
            host,
            on_message=hear,
            incarnation=incarnation,
            ports=network.ports,
            advertise=own,
            secret=self._secret,
        )
        self._close_deserted()
        self._listener = listener
        self._open.append(hub)
        self._kept.append(kept)
        return hub

    def keep(self, roles: Collection[str]) -> None:
        """Hear these roles, all that outlive this attempt beside servers, also where they are now, once the next hub is
        open."""
        for kept in self._kept:
            kept.intersection_update(roles)
        self._newest.update(roles)

    def _close_deserted(self) -> None:
        """Close the hubs at which nobody is heard any more; servers are at the first."""
        for i in reversed(range(1, len(self._open))):
            if not self._kept[i]:
                self._open.pop(i).close()
                self._kept.pop(i)

    def publish(self, topic: str, /, **payload: Any) -> None:
        """Tell everybody. Never raises, never blocks."""
        for hub in self._open:
            hub.publish(topic, **payload)

    def close(self) -> None:
        """Close them all."""
        for hub in self._open:
            hub.close()


def _speaker(topic: str, payload: Mapping[str, Any]) -> str | None:
    """Return the role that speaks of itself, or whose agent does."""
    name = payload.get("label") if topic == "agent" else payload.get("role") if topic == "status" else None
    return None if name is None else str(name).split("[")[0]
