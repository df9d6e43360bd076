"""Sockets that a run listens on: IPv4 and IPv6 addresses, and ports that nobody else on the node has or is promised.

A role binds its port long after it was chosen (a server after its start, torch's store after minutes of imports).
Until then the port is *reserved*: a name in the node's abstract socket namespace, which has the extent of its ports
(the network namespace), is seen by all users' processes, and goes with the process that holds it.
"""

import contextlib
import errno
import ipaddress
import os
import socket
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.config.errors import ConfigError, Problem
from prime_hpc.runtime.failures import NodeError

ALL = "::"
"""Binds every address of both families."""
_WILDCARDS = ("", "0.0.0.0", ALL)
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_BACKLOG = 1024
_reserved: dict[int, socket.socket | None] = {}


class NoFreePort(ConfigError, NodeError):
    """Every port that may be used is taken."""


@dataclass(frozen=True)
class PortRange:
    """Ports from `first` to `last`, both included."""

    first: int
    last: int
    key: str | None = None
    """Config key that states it; None: the built-in one."""

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __contains__(self, port: int) -> bool:
        return self.first <= port <= self.last

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @classmethod
    def parse(cls, text: str, key: str | None = None) -> "PortRange":
        """Read "FIRST-LAST". Raises ValueError: not of that form, or not 1 <= FIRST <= LAST <= 65535."""
        first, dash, last = text.strip().partition("-")
        if not (dash and first.strip().isdigit() and last.strip().isdigit()):
            raise ValueError(f"{text!r} is no port range; write FIRST-LAST, for instance 20000-20999")
        low, high = int(first), int(last)
        if not 1 <= low <= high <= 65535:
            raise ValueError(f"{text!r}: ports go from 1 to 65535, the lower one first")
        return cls(low, high, key)

    def from_seed(self, seed: str, stride: int = 1) -> int:
        """Return a port of the range that depends on the seed alone: different runs begin to search at different
        places."""
        return self.first + (zlib.crc32(seed.encode()) % max(1, len(self) // stride)) * stride

    def after(self, base: int) -> list[int]:
        """All ports once, from `base` upwards and around."""
        begin = base if base in self else self.first
        return [*range(begin, self.last + 1), *range(self.first, begin)]

    def full(self, wanted: int = 1) -> NoFreePort:
        """Return the error where it has no `wanted` ports left."""
        what = "no port" if wanted == 1 else f"no {wanted} neighbouring ports"
        remedy = "end what listens there, or widen the range" if self.key else "end what listens there"
        return NoFreePort(
            Problem(f"{self}: {what} of the {len(self)} is free on node {socket.gethostname()}; {remedy}", self.key)
        )


def join(host: str, port: int) -> str:
    """Write `host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def http_url(host: str, port: int, path: str = "/v1") -> str:
    """Of a server on `host`."""
    return f"http://{join(host, port)}{path}"


def is_wildcard(host: str) -> bool:
    """Return whether binding it means every address of the machine."""
    return host in _WILDCARDS


def name_of(host: str) -> str:
    """Return what others call the machine on which `host` is bound: by this address, or by its name where all are."""
    return socket.gethostname() if is_wildcard(host) else host


def is_loopback(host: str) -> bool:
    """Return whether it is reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def loopback() -> str:
    """127.0.0.1, or ::1 on a machine that has IPv6 alone."""
    for host in ("127.0.0.1", "::1"):
        with contextlib.suppress(OSError), _bound(host, 0):
            return host
    return "127.0.0.1"


def reached_at(host: str) -> str:
    """Address at which a process of this machine reaches what listens on `host`."""
    if not is_wildcard(host):
        return host
    return "127.0.0.1" if host == "0.0.0.0" else loopback()


def listen(host: str, port: int = 0, *, ports: PortRange | None = None, seed: str = "") -> socket.socket:
    """Return a listening socket.

    Args:
        host: address or name; "", "::": every address of both families.
        port: 0 takes any, or any of `ports`.
        ports: with port 0, the ones to choose from.
        seed: where in `ports` to begin.

    Raises:
        OSError: the port is taken or the address is not this machine's.
        NoFreePort: all of `ports` are taken.
    """
    for number in [port] if port or ports is None else ports.after(ports.from_seed(seed or str(os.getpid()))):
        if number != port and _is_promised(number):
            continue
        try:
            sock = _bound(host, number, reuse=True)
            try:
                sock.listen(_BACKLOG)
            except OSError:
                sock.close()
                raise
            return sock
        except OSError as error:
            if number == port or error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    assert ports is not None
    raise ports.full()


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that holds the port and does not listen yet: connections to it are refused.
    Raises OSError: the port is taken or the address is not this machine's."""
    try:
        return _bound(host, port)  # nobody else can bind it any more, whatever options he sets
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not is_free(port, host, but_reserved=True):
            raise
    return _bound(host, port, reuse=True)  # connections of an earlier server are still being forgotten


def is_free(port: int, host: str = "127.0.0.1", *, but_reserved: bool = False, untouched: bool = False) -> bool:
    """Return whether a server could listen on `host:port` now.

    A port on which nobody listens yet is not free when somebody has bound it or has reserved it.

    Args:
        but_reserved: reservations do not matter.
        untouched: a port on which connections of an ended server linger is not free either.
    """
    if not but_reserved and _is_promised(port):
        return False
    try:
        _bound(host, port).close()
        return True
    except OSError as error:
        if error.errno != errno.EADDRINUSE or untouched:
            return False
    try:  # as a server does that comes back to its port
        with _bound(host, port, reuse=True) as probe:
            probe.listen(1)
    except OSError:
        return False
    return _lingers(port)


def reserve(port: int) -> bool:
    """Promise the port to this process, or to one that it starts; False where another has the promise already."""
    if port in _reserved:
        return False
    if not sys.platform.startswith("linux"):  # no abstract names: only this process knows
        _reserved[port] = None
        return True
    name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        name.bind(f"\0prime-hpc-port-{port}")
    except OSError:
        name.close()
        return False
    _reserved[port] = name
    return True


def release(ports: list[int]) -> None:
    """Give up reservations of this process; those that it does not hold are left alone."""
    for port in ports:
        name = _reserved.pop(port, None)
        if name is not None:
            name.close()


def reserved() -> list[int]:
    """Ports that this process has reserved."""
    return sorted(_reserved)


def _is_promised(port: int) -> bool:
    if port in _reserved or not reserve(port):
        return True
    release([port])
    return False


def _bound(host: str, port: int, *, reuse: bool = False) -> socket.socket:
    if host in ("", ALL):
        try:
            return _bound_to(socket.AF_INET6, (ALL, port), reuse, both=True)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise
        return _bound_to(socket.AF_INET, ("0.0.0.0", port), reuse)  # a kernel without IPv6
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    failure: OSError | None = None
    for family, _, _, _, address in found:
        try:
            return _bound_to(family, address, reuse)
        except OSError as error:
            failure = failure or error
    raise failure or OSError(errno.EADDRNOTAVAIL, f"{host} has no address")


def _bound_to(family: int, address: tuple[Any, ...], reuse: bool, both: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if both else 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _lingers(port: int) -> bool:
    """Return whether connections of this local port are known to the kernel, who knows nothing of sockets merely
    bound."""
    tables = [table for table in map(Path, _TABLES) if table.exists()]
    return not tables or any(
        int(row.split()[1].rpartition(":")[2], 16) == port
        for table in tables
        for row in table.read_text().splitlines()[1:]
    )
