"""Inference servers: who may get episodes, which version each serves, who takes the next group. Pure.

`weight_sync` decides when a server is ready again and which version it serves, `dispatcher` asks for a server and
reports errors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from prime_hpc.runtime.role_context import NOWHERE


@dataclass
class Server:
    """One server. Not ready: it is starting, restarting, or an episode just failed on it and nobody looked yet."""

    url: str
    ready: bool = False
    version: int = 0
    in_flight: int = 0
    limit: float = 0.0
    """Episodes that it should have at most, where `concurrency` finds that out; 0 of all where it does not."""
    not_ready_since: float = 0.0
    is_elastic: bool = False
    """It comes and goes (`slurm.elastic`), and has no node at first."""
    is_absent: bool = False
    """An elastic one without a node, or about to lose it: nobody asks it, or waits for it."""


class ServerTable:
    """All servers of the run, by index."""

    def __init__(self, urls: Sequence[str], now: float) -> None:
        assert urls, "a run needs at least one server"
        self.servers = [Server(url, not_ready_since=now, is_elastic=url.startswith(NOWHERE)) for url in urls]
        for server in self.servers:
            server.is_absent = server.is_elastic
        self._served = 0
        self._turn = 0

    @property
    def ready_indices(self) -> list[int]:
        """Servers that take episodes."""
        return [i for i, server in enumerate(self.servers) if server.ready]

    @property
    def any_ready(self) -> bool:
        """True where a server takes episodes."""
        return any(server.ready for server in self.servers)

    @property
    def served_version(self) -> int:
        """The oldest version that a new token can get: the minimum over ready servers, else the last known one."""
        versions = [server.version for server in self.servers if server.ready]
        if versions:
            self._served = min(versions)
        return self._served

    def pick(self) -> int | None:
        """Return the ready server with the most room: the fewest episodes in flight, or the farthest below its limit;
        in turn where several have as much. None without any."""
        ready = self.ready_indices
        if not ready:
            return None
        count = len(self.servers)
        best = min(ready, key=lambda i: (self.servers[i].in_flight - self.servers[i].limit, (i - self._turn) % count))
        self._turn = (best + 1) % count
        return best

    def mark_ready(self, index: int, version: int) -> None:
        """Note that the server answers and serves `version`."""
        server = self.servers[index]
        server.ready, server.version = True, version

    def mark_suspect(self, index: int, now: float) -> bool:
        """Send it nothing until it was looked at. Returns whether this is news."""
        server = self.servers[index]
        if not server.ready:
            return False
        server.ready, server.not_ready_since = False, now
        return True

    def all_down_since(self, now: float) -> float:
        """Seconds since which no server is ready; 0 while one is."""
        if self.any_ready:
            return 0.0
        return now - max(server.not_ready_since for server in self.servers)
