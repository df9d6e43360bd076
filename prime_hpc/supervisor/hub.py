"""The hub at which all roles of an attempt meet."""

from collections.abc import Callable, Mapping
from typing import Any

from prime_hpc.runtime.role_context import NODE
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.bus import BusServer
from prime_hpc.store.messaging.network import Network


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


def open_hub(
    environment: Mapping[str, str],
    incarnation: int,
    on_message: Callable[[str, dict[str, Any]], None],
    *,
    on_nodes: bool,
) -> BusServer:
    """Open the hub: on this machine alone, or (`on_nodes`) on the network that the config names for it.

    Raises:
        ConfigError: no port that it may use, no such network on this node.
        StoreError: it cannot listen.
    """
    network = Network.from_env(environment)
    host, own = host_of_hub(network, environment, on_nodes=on_nodes)
    return BusServer(host, on_message=on_message, incarnation=incarnation, ports=network.ports, advertise=own)
