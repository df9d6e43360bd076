"""By which of its addresses a node is reached, and on which ports a run may listen there.

The supervisor passes the `network` section to all processes of a run in one environment variable; each resolves it on
its own node.
"""

import contextlib
import ipaddress
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prime_hpc.config.errors import ConfigError
from prime_hpc.store.messaging.sockets import PortRange, is_loopback

VARIABLE = "PRIMEHPC_NETWORK"
KEY = "network"
GLOO = "GLOO_SOCKET_IFNAME"
ENGINES_PORT = "VLLM_PORT"
"""From which vLLM's engines count up to find ports for themselves."""
SERVER_PORTS = 2
"""Of a server: HTTP, and its data-parallel head."""
NUM_ENGINE_PORTS = 8
"""As many are kept for the engines of a server, where a range is stated; else the kernel gives them some."""
Traffic = Literal["control", "serving", "collectives"]


@dataclass(frozen=True)
class Place:
    """One address of this node."""

    interface: str
    address: str

    @property
    def is_ipv6(self) -> bool:
        """Its family."""
        return ":" in self.address


@dataclass(frozen=True)
class Network:
    """The `network` section as processes see it."""

    ports: PortRange | None = None
    """Once one is stated, nothing else is listened on, as far as the libraries can be told."""
    control: str | None = None
    serving: str | None = None
    collectives: str | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Network":
        """Read what the supervisor said; nothing stated where there is none."""
        return cls.of(json.loads(environ.get(VARIABLE) or "{}"))

    @classmethod
    def of(cls, stated: Mapping[str, str | None]) -> "Network":
        """Of the section's keys."""
        text = stated.get("port_range")
        ports = PortRange.parse(text, f"{KEY}.port_range") if text else None
        return cls(ports, stated.get("control"), stated.get("serving"), stated.get("collectives"))

    def to_env(self) -> dict[str, str]:
        """Return the environment from which `from_env` reads the same."""
        facts = {name: getattr(self, name) for name in ("control", "serving", "collectives") if getattr(self, name)}
        if self.ports is not None:
            facts["port_range"] = str(self.ports)
        return {VARIABLE: json.dumps(facts)} if facts else {}

    def place(self, traffic: Traffic) -> Place | None:
        """Return this node's address for a kind of traffic; None where the config names no network for it.
        Raises ConfigError: this node is not in the network, naming the key and what the node has."""
        wanted = getattr(self, traffic)
        return None if wanted is None else find_place(wanted, f"{KEY}.{traffic}")


def of_collectives(place: Place) -> dict[str, str]:
    """Return the variables that make NCCL, gloo and vLLM's engines use one of a node's networks."""
    return {
        "NCCL_SOCKET_IFNAME": f"={place.interface}",  # exactly this one: without the sign also those that begin so
        "NCCL_SOCKET_FAMILY": "AF_INET6" if place.is_ipv6 else "AF_INET",
        "GLOO_SOCKET_IFNAME": place.interface,
        "VLLM_HOST_IP": place.address,
    }


def network_environment(
    network: Network, environ: Mapping[str, str], nodes: Sequence[str], host: str
) -> dict[str, str]:
    """Return the variables that make a role's collectives use the right network of this node.
    `environ`: of the role, as it is without; an interface that it names for gloo wins over what is guessed here."""
    place = network.place("collectives")
    if place is not None:
        return of_collectives(place)
    if GLOO in environ:
        return {}
    if len(nodes) == 1:
        return on_loopback()
    if not _is_hostname_loopback():
        return {}
    # gloo would give its peers the address of its own name, which leads each of them back to itself
    peer = next(node for node in nodes if node != host)
    place = route_to(peer)
    return {} if place is None else {GLOO: place.interface}


def on_loopback() -> dict[str, str]:
    """For collectives within one machine: gloo's sockets ask nobody who he is, so nobody else shall reach them."""
    mine = next((place for place in local_places() if is_loopback(place.address)), None)
    return {} if mine is None else {GLOO: mine.interface}


def past_proxies(environ: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return `no_proxy` variables where a proxy is named: no program of a run may ask it for its own machine, nor for
    `hosts`. Where none is named, those alone that hold a word which httpx would raise for.

    Calls between the run's own processes never ask it. IPv6 addresses go without brackets, and IPv6 networks not at
    all: httpx, which most clients of models are made of, raises for these, proxy or not, and aiohttp and requests do
    not know them.
    """
    named = ",".join(environ.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    given = [word for word in map(str.strip, named.split(",")) if word]
    bare = [re.sub(r"^\[([^]]*)(\](:\d*)?)?", r"\1", word) for word in given]
    known = [word for word in bare if word and not re.fullmatch(r"[\da-fA-F.]*:[\da-fA-F:.]*/\d+", word)]
    if any(environ.get(name.lower()) or environ.get(name) for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")):
        known += ["localhost", "127.0.0.1", "::1", *hosts]
    elif known == given:
        return {}
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(dict.fromkeys(known)))


def route_to(host: str) -> Place | None:
    """Return the address of this machine that a packet to `host` would carry; None where it is not known."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                source = probe.getsockname()[0]
            return next((p for p in local_places() if p.address == source and not is_loopback(source)), None)
    return None


def _is_hostname_loopback() -> bool:
    try:
        return is_loopback(str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0]))
    except OSError:
        return True


def local_places() -> list[Place]:
    """Addresses of this node's interfaces, those of IPv4 first; no link-local ones, which need a scope."""
    import psutil

    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for interface, cards in psutil.net_if_addrs().items():
            found += [Place(interface, c.address) for c in cards if c.family == family and "%" not in c.address]
    return found


def find_place(wanted: str, key: str, places: list[Place] | None = None) -> Place:
    """Return the first of the named interfaces or networks that this node has.

    Args:
        wanted: names of interfaces, addresses or networks in CIDR form, separated by commas.
        key: of the config, for the error.

    Raises:
        ConfigError: it has none of them.
    """
    places = local_places() if places is None else places
    for word in (word.strip() for word in wanted.split(",")):
        for place in places:
            if _matches(word, place):
                return place
    has = ", ".join(f"{p.interface} {p.address}" for p in places) or "no address at all"
    raise ConfigError(f"{wanted}: node {socket.gethostname()} has no such interface or network; it has {has}", key)


def _matches(word: str, place: Place) -> bool:
    try:
        network = ipaddress.ip_network(word, strict=False)
    except ValueError:
        return word == place.interface
    return ipaddress.ip_address(place.address) in network
