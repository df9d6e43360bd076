"""Health checks of servers: each is asked only so often, and the time that asking takes is told."""

from collections.abc import Callable

from prime_hpc.supervisor.roles.process import Role

START_INTERVAL_S = 0.5
INTERVAL_S = 5.0
UNWELL_LIMIT_S = 90.0
"""A server whose health route fails for so long is ended and started again."""


class HealthChecks:
    """Asks servers how they are."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next: dict[str, float] = {}
        self._asking_s = 0.0

    def take_asking_s(self) -> float:
        """Return the seconds that asking took since the last call: a server that does not answer holds nobody up."""
        seconds, self._asking_s = self._asking_s, 0.0
        return seconds

    def is_ready(self, role: Role) -> bool:
        """Return whether a server that starts answers by now."""
        return self._is_due(role, START_INTERVAL_S) and self._is_healthy(role)

    def has_failed(self, role: Role) -> bool:
        """Return whether a server that served has not answered for `UNWELL_LIMIT_S`."""
        is_well = not self._is_due(role, INTERVAL_S) or self._is_healthy(role)
        return not is_well and role.unhealthy_s() > UNWELL_LIMIT_S

    def _is_healthy(self, role: Role) -> bool:
        began = self._clock()
        well = role.healthy()
        self._asking_s += self._clock() - began
        return well

    def _is_due(self, role: Role, interval_s: float) -> bool:
        now = self._clock()
        if now < self._next.get(role.spec.label, 0.0):
            return False
        self._next[role.spec.label] = now + interval_s
        return True
