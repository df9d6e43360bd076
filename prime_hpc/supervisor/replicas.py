"""Servers whose node was lost in a packed job: on a spare node at once, or on their own later.

Used by the supervisor.
"""

import time
from collections.abc import Callable, Sequence

from loguru import logger

from prime_hpc.supervisor.role import Role
from prime_hpc.supervisor.steps import StepRole


class Replicas:
    """Which servers are away and when they are tried again.

    Args:
        retry_s: pause between attempts on a node that was lost.
        spares: nodes that no role uses.
    """

    def __init__(self, retry_s: float, spares: list[str]) -> None:
        self._retry_s = retry_s
        self._spares = list(spares)
        self._due: dict[str, float] = {}

    def send_away(self, role: StepRole, lost: Sequence[str]) -> str:
        """Take a server out of the run; returns what will become of it, for people."""
        role.state = "away"
        if len(self._spares) >= len(lost):
            taken = [self._spares.pop(0) for _ in lost]
            swap = dict(zip(lost, taken, strict=True))
            role.hosts = [swap.get(host, host) for host in role.hosts]
            self._due[role.spec.label] = 0.0
            return f"its server is started on the spare node {', '.join(taken)}"
        self._due[role.spec.label] = time.monotonic() + self._retry_s
        return f"its server is tried again every {self._retry_s:.0f} s"

    def bring_back(self, roles: Sequence[Role], restart: Callable[[Role], None]) -> None:
        """Start those whose time has come."""
        for role in roles:
            due = self._due.get(role.spec.label)
            if role.state == "away" and due is not None and time.monotonic() >= due:
                del self._due[role.spec.label]
                assert isinstance(role, StepRole)
                logger.info(f"{role.spec.label} is started again on {', '.join(role.hosts)}")
                restart(role)
