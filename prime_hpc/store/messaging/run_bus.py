"""One of several runs on a bus that they share: each has topics of its own, a few mean everybody (`bus.SHARED`)."""

from collections.abc import Callable
from typing import Any

from prime_hpc.store.messaging.bus import BusClient, Payload, scoped


class RunBusClient:
    """One run's view of a bus that several runs of a process share: the same connection, the run's own topics."""

    def __init__(self, bus: BusClient, run: str) -> None:
        self._bus, self._prefix = bus, f"{run}/"

    def _scoped(self, topic: str) -> str:
        return scoped(self._prefix, topic)

    @property
    def closed(self) -> bool:
        """True if the bus behind it was closed."""
        return self._bus.closed

    @property
    def connected(self) -> bool:
        """True if the hub can be reached now."""
        return self._bus.connected

    @property
    def secret(self) -> str:
        """As `BusClient.secret`."""
        return self._bus.secret

    @property
    def hub_host(self) -> str | None:
        """As `BusClient.hub_host`."""
        return self._bus.hub_host

    @property
    def local_host(self) -> str | None:
        """As `BusClient.local_host`."""
        return self._bus.local_host

    def publish(self, topic: str, /, **payload: Any) -> None:
        """Announce for this run."""
        self._bus.publish(self._scoped(topic), **payload)

    def latest(self, topic: str) -> Payload | None:
        """Return the last message of this run's topic."""
        return self._bus.latest(self._scoped(topic))

    def wait(self, topic: str, predicate: Callable[[Payload], bool], timeout_s: float) -> Payload | None:
        """As `BusClient.wait`."""
        return self._bus.wait(self._scoped(topic), predicate, timeout_s)


Bus = BusClient | RunBusClient
"""A role's end of the bus, be its run alone or one of several."""
