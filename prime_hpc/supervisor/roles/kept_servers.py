"""Servers that outlive an attempt: trainer and orchestrator begin the next one beside them, in the same job."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.config.engine_groups import ENGINE_ROLES
from prime_hpc.runtime.clock import AwakeClock
from prime_hpc.store.io import files
from prime_hpc.supervisor.heartbeat import Pulse
from prime_hpc.supervisor.hub import Hubs
from prime_hpc.supervisor.reaper import Reaper
from prime_hpc.supervisor.roles.ending import end_roles
from prime_hpc.supervisor.roles.process import Role
from prime_hpc.supervisor.roles.replicas import Replicas
from prime_hpc.supervisor.roles.slurm_step import StepRole

ADOPTION_S = 20.0
"""So long the servers' agents have to say that they belong to the next attempt."""


@dataclass
class KeptServers:
    """The servers of a job between two of its attempts, and all by which they are led."""

    roles: list[StepRole]
    """In order; none in a run without servers."""
    swap: dict[str, str]
    """Lost node of the trainer or the orchestrator -> the spare node that takes its place."""
    replicas: Replicas
    hubs: Hubs
    pulse: Pulse
    reaper: Reaper
    clock: AwakeClock
    statuses: dict[tuple[str, int], dict[str, Any]]
    """The last word of each server's processes."""

    def hand_over(self, incarnation: int) -> list[str]:
        """Tell the servers' agents which incarnation they belong to, before it begins: it would fence them.

        Returns:
            labels of the servers whose agents did not answer in time.
        """
        served = [role for role in self.roles if role.state != "away"]
        for role in self.roles:
            role.offer_to(incarnation)
        end = self.clock.now() + ADOPTION_S
        while self.clock.now() < end and not all(role.belongs_to(incarnation) for role in served):
            self.pulse.tick()
            time.sleep(0.05)
        return [role.spec.label for role in served if not role.belongs_to(incarnation)]

    def link_logs(self, logs: Path, attempt: int) -> dict[str, list[str]]:
        """Let the attempt's logs of these servers be those that they write to; returns their hosts by label."""
        for role in self.roles:
            own = logs / f"attempt_{attempt}" / role.spec.name
            if not own.exists():
                files.make_dir(own.parent)
                files.replace_link(own, os.path.relpath(role.log_dir, own.parent))
        return {role.spec.label: list(role.hosts) for role in self.roles}

    def end(self, grace_s: float) -> None:
        """End them and all by which they were led: nobody takes them over."""
        end_roles(self.roles, grace_s)
        for role in self.roles:
            role.reap()
        self.close()

    def close(self) -> None:
        """Fall silent."""
        self.pulse.close()
        self.hubs.close()
        self.reaper.close()


def keep_servers(
    roles: Sequence[Role],
    lost: Sequence[str],
    statuses: dict[tuple[str, int], dict[str, Any]],
    replicas: Replicas,
    hubs: Hubs,
    pulse: Pulse,
    reaper: Reaper,
    clock: AwakeClock,
) -> KeptServers | None:
    """Return the servers among the roles of an attempt that is over, if the next one can do with them.

    Args:
        roles: of the attempt, all in Slurm steps.
        lost: nodes of the trainer or the orchestrator, which spare nodes are to replace.
        statuses: the last word of each role's processes; of the servers' it stays.
        replicas, hubs, pulse, reaper, clock: by which they are led.

    Returns:
        None where a server never served, had a part of its own on a lost node, or too few nodes are spare.
    """
    servers = [role for role in roles if isinstance(role, StepRole) and role.is_server]
    if not all(role.was_ready and not set(role.hosts) & set(lost) for role in servers):
        return None
    swap = replicas.take_spares(lost)
    if swap is None:
        return None
    for key in list(statuses):  # of a hub's thread, which may add to them
        if key[0] not in ENGINE_ROLES:
            statuses.pop(key, None)
    return KeptServers(servers, swap, replicas, hubs, pulse, reaper, clock, statuses)
