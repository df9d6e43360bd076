"""Topics of several runs on one doorbell: each run has its own, a few mean everybody."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prime_hpc.store.messaging.bus import Doorbell, Payload

SHARED = frozenset({"stop", "save", "server", "pulse", "run"})
"""Topics that mean everybody, also where several runs share a hub; all others are a run's own (see `Doorbell`)."""


def scoped(prefix: str, topic: str) -> str:
    """Return a topic's name on the wire."""
    return topic if topic in SHARED else f"{prefix}{topic}"


class RunBell:
    """One run's view of a doorbell that several runs of a process share (`Doorbell.of_run`)."""

    def __init__(self, bell: "Doorbell", run: str) -> None:
        self._bell, self._prefix = bell, f"{run}/"

    def _own(self, topic: str) -> str:
        return scoped(self._prefix, topic)

    @property
    def closed(self) -> bool:
        """True if the doorbell behind it was closed."""
        return self._bell.closed

    @property
    def connected(self) -> bool:
        """True if the hub can be reached now."""
        return self._bell.connected

    @property
    def secret(self) -> str:
        """As `Doorbell.secret`."""
        return self._bell.secret

    @property
    def hub_host(self) -> str | None:
        """As `Doorbell.hub_host`."""
        return self._bell.hub_host

    @property
    def own_host(self) -> str | None:
        """As `Doorbell.own_host`."""
        return self._bell.own_host

    def ring(self, topic: str, /, **payload: Any) -> None:
        """Announce for this run."""
        self._bell.ring(self._own(topic), **payload)

    def latest(self, topic: str) -> "Payload | None":
        """Return the last message of this run's topic."""
        return self._bell.latest(self._own(topic))

    def wait(self, topic: str, predicate: "Callable[[Payload], bool]", timeout_s: float) -> "Payload | None":
        """As `Doorbell.wait`."""
        return self._bell.wait(self._own(topic), predicate, timeout_s)
