"""Roles that outlive an attempt, in the same job: the servers, and the orchestrator where only the trainer crashed."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from loguru import logger

from prime_hpc.config.engine_groups import ENGINE_ROLES
from prime_hpc.runtime.clock import AwakeClock
from prime_hpc.store.attempts import Attempt
from prime_hpc.store.io import files
from prime_hpc.store.run_paths import RunPaths
from prime_hpc.supervisor.heartbeat import Pulse
from prime_hpc.supervisor.hub import Hubs
from prime_hpc.supervisor.reaper import Reaper
from prime_hpc.supervisor.roles.process import Role, end_roles
from prime_hpc.supervisor.roles.replicas import Replicas
from prime_hpc.supervisor.roles.spec import RoleSpec

ADOPTION_S = 20.0
"""So long the agents have to say that they belong to the next attempt."""


@dataclass(frozen=True)
class Held:
    """An orchestrator's word that it writes nothing until it hears of the next attempt."""

    first_batch: int
    """It can commit batches from here to `last_batch` again."""
    last_batch: int
    """The newest that it has written."""

    def why_not(self, step: int) -> str | None:
        """Return why it cannot go on in an attempt that resumes at `step`, None where it can: it must have the batches
        of all the steps that are taken again."""
        if self.first_batch <= step + 1 <= self.last_batch + 1:
            return None
        return f"it has batches {self.first_batch} to {self.last_batch}, and {step + 1} is the next one"


@dataclass
class KeptRoles:
    """The servers of a job between two of its attempts, maybe the orchestrator, and all by which they are led."""

    roles: list[Role]
    """In order; none in a run without servers."""
    swap: dict[str, str]
    """Lost node of the trainer or the orchestrator -> the spare node that takes its place."""
    replicas: Replicas
    hubs: Hubs
    pulse: Pulse
    reaper: Reaper
    clock: AwakeClock
    statuses: dict[tuple[str, int], dict[str, Any]]
    """The last word of each role's processes."""
    held: Held | None = None
    """Of the orchestrator, which is among the roles."""

    @property
    def no_servers(self) -> list[str]:
        """Names of those that are none."""
        return [role.spec.name for role in self.roles if not role.is_server]

    def placed(self, specs: Sequence[RoleSpec]) -> list[RoleSpec]:
        """Return the next attempt's roles but for servers, on the nodes that there are."""
        others = [spec for spec in specs if not spec.is_server]
        return [replace(spec, hosts=tuple(self.swap.get(host, host) for host in spec.hosts)) for spec in others]

    def add_orchestrator(self, role: Role, held: Held) -> None:
        """Keep the orchestrator too, until the attempt turns out not to be its own."""
        self.roles.append(role)
        self.held = held

    def release_orchestrator(self, why: str, grace_s: float) -> None:
        """End the orchestrator: the attempt begins with a new one."""
        over = [role for role in self.roles if not role.is_server]
        logger.info(f"the orchestrator starts again too: {why}")
        end_roles(over, grace_s, tick=self.pulse.tick)
        for role in over:
            role.reap()
            self.reaper.forget(role.pid)
        self.roles = [role for role in self.roles if role.is_server]
        self.held = None

    def forget_others(self) -> None:
        """Forget what roles said that do not go on."""
        names = {role.spec.name for role in self.roles} | set(ENGINE_ROLES)
        for key in list(self.statuses):  # of a hub's thread, which may add to them
            if key[0] not in names:
                self.statuses.pop(key, None)

    def hand_over(self, incarnation: int) -> list[str]:
        """Tell the roles' agents which incarnation they belong to, before it begins: it would fence them.

        Returns:
            labels of the roles whose agents did not answer in time.
        """
        served = [role for role in self.roles if role.state != "away"]
        for role in self.roles:
            role.offer_to(incarnation)
        end = self.clock.now() + ADOPTION_S
        while self.clock.now() < end and not all(role.belongs_to(incarnation) for role in served):
            self.pulse.tick()
            time.sleep(0.05)
        return [role.spec.label for role in served if not role.belongs_to(incarnation)]

    def go_on(self, attempt: Attempt, hub: str) -> None:
        """Tell the orchestrator, if it is kept, of the attempt, and where (host:port) its roles meet."""
        if self.held is not None:
            step = attempt.resume_step or 0
            self.hubs.publish("go_on", incarnation=attempt.incarnation, step=step, hub=hub)

    def take_into(self, attempt: Attempt, paths: RunPaths) -> None:
        """Let the attempt's logs of these roles be those that they write to, and note them as its own."""
        for role in self.roles:
            own = paths.logs(attempt.attempt, role.spec.name)
            if not own.exists():
                files.make_dir(own.parent)
                files.replace_link(own, os.path.relpath(role.log_dir, own.parent))
            attempt.nodes[role.spec.label] = list(role.hosts)
            attempt.kept.append(role.spec.label)

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
) -> KeptRoles | None:
    """Return the servers among the roles of an attempt that is over, if the next one can do with them.

    Args:
        roles: of the attempt, all in Slurm steps.
        lost: nodes of the trainer or the orchestrator, which spare nodes are to replace.
        statuses: the last word of each role's processes.
        replicas, hubs, pulse, reaper, clock: by which they are led.

    Returns:
        None where a server never served, had a part of its own on a lost node, or too few nodes are spare.
    """
    servers = [role for role in roles if role.is_server]
    if not all(role.was_ready and not set(role.hosts) & set(lost) for role in servers):
        return None
    swap = replicas.take_spares(lost)
    if swap is None:
        return None
    return KeptRoles(servers, swap, replicas, hubs, pulse, reaper, clock, statuses)
