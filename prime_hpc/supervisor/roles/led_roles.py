"""The roles of a job and all by which they are led. Some outlive an attempt, in the same job: the servers, and the
orchestrator where only the trainer crashed."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loguru import logger

from prime_hpc.config.run_files import ENGINE_ROLES
from prime_hpc.config.sections.slurm import RestartConfig
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
class LedRoles:
    """The roles of an attempt, and all by which they are led: what the next attempt in the same job goes on with."""

    replicas: Replicas
    hubs: Hubs
    pulse: Pulse
    reaper: Reaper
    clock: AwakeClock
    statuses: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """The last word of each role's processes."""
    roles: list[Role] = field(default_factory=list)
    """In order; where an attempt begins, those that the one before has left."""
    swap: dict[str, str] = field(default_factory=dict)
    """Lost node of the trainer or the orchestrator -> the spare node that takes its place."""
    held: Held | None = None
    """Of the orchestrator, where it was left."""

    @classmethod
    def begin(cls, config: RestartConfig, spares: Sequence[str]) -> "LedRoles":
        """Return those of a job's first attempt: no roles yet, but a sign of life.

        Args:
            config: how long the supervisor may stand, and when lost servers are tried again.
            spares: nodes that no role uses.
        """
        clock, hubs = AwakeClock(), Hubs()
        pulse = Pulse(lambda: hubs.publish("pulse", time=time.time()), clock, config.stall_s)
        return cls(Replicas(config.replica_retry_s, list(spares), clock.now), hubs, pulse, Reaper(), clock)

    def on_message(self, topic: str, payload: dict[str, Any]) -> None:
        """Take the word of a role ("status") or of an agent, in a hub's thread."""
        if topic == "status" and {"role", "index", "time", "state"} <= payload.keys():
            self.statuses[payload["role"], payload["index"]] = payload
        for role in self.roles if topic == "agent" else ():
            if role.spec.label == payload.get("label"):
                role.on_message(payload)

    def start(self, role: Role) -> None:
        """Start a role, for the first time or again; it ends with the supervisor."""
        role.start()
        self.reaper.watch(role.pid)

    def kill(self, role: Role, *, reap: bool = False) -> None:
        """End a role at once; `reap`: and wait until it has given everything back."""
        role.kill()
        if reap:
            role.reap()
        self.reaper.forget(role.pid)

    def let_go(self, role: Role, cause: str) -> bool:
        """Go on without an elastic server, which may get another node; False: it is none."""
        if not role.spec.is_elastic:
            return False
        self.hubs.publish("server", role=role.spec.name, index=role.spec.index, state="lost", url=role.url)
        self.kill(role)
        logger.info(f"{role.spec.label} has left ({cause}); {self.replicas.mark_lost(role, [])}")
        return True

    def can_do_without(self, server: Role, lost: Sequence[str]) -> bool:
        """Return whether another server of its role serves, or soon does, or spare nodes can take the place of its lost
        ones."""
        others = [role for role in self.roles if role.spec.name == server.spec.name and role is not server]
        if any(role.state in ("ready", "starting") for role in others):
            return True
        return self.replicas.can_replace(server, lost)

    def servers_without(self, lost: Sequence[str]) -> "LedRoles | None":
        """Return the servers alone, if the next attempt can do with them.
        `lost`: nodes of the trainer or the orchestrator, which spare nodes are to replace.
        Returns None where a server never served, had a part of its own on a lost node, or too few nodes are spare."""
        servers = [role for role in self.roles if role.is_server]
        needed = [role for role in servers if not role.spec.is_elastic]
        if not all(role.was_ready and not set(role.hosts) & set(lost) for role in needed):
            return None
        swap = self.replicas.take_spares(lost)
        return None if swap is None else replace(self, roles=servers, swap=swap, held=None)

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
        logger.info(f"the orchestrator starts again too: {why}")
        self._end([role for role in self.roles if not role.is_server], grace_s)
        self.roles = [role for role in self.roles if role.is_server]
        self.held = None

    def _end(self, roles: Sequence[Role], grace_s: float) -> None:
        end_roles(roles, grace_s, tick=self.pulse.tick)
        for role in roles:
            role.reap()
            self.reaper.forget(role.pid)

    def forget_others(self) -> None:
        """Forget what roles said that do not go on."""
        names = {role.spec.name for role in self.roles} | set(ENGINE_ROLES)
        for key in list(self.statuses):  # of a hub's thread, which may add to them
            if key[0] not in names:
                self.statuses.pop(key, None)

    def hand_over(self, incarnation: int) -> list[str]:
        """Tell the roles' agents which incarnation they belong to, before it begins: it would fence them.
        Returns labels of the roles whose agents did not answer in time."""
        served = [role for role in self.roles if role.state != "away"]
        for role in self.roles:
            role.offer_to(incarnation)
        end = self.clock.now() + ADOPTION_S
        while self.clock.now() < end and not all(role.belongs_to(incarnation) for role in served):
            self.pulse.tick()
            time.sleep(0.05)
        return [role.spec.label for role in served if not role.belongs_to(incarnation)]

    def go_on(self, attempt: Attempt, hub: str) -> None:
        """Tell the orchestrator, if it was left, of the attempt, and where (host:port) its roles meet."""
        if self.held is not None:
            step = attempt.resume_step or 0
            self.hubs.publish("go_on", incarnation=attempt.incarnation, step=step, hub=hub)

    def take_into(self, attempt: Attempt, paths: RunPaths) -> None:
        """Let the attempt's logs of these roles be those that they write to, and note them as its own."""
        for role in self.roles:
            own = paths.logs(attempt.attempt, role.spec.name)
            if not own.exists():
                files.make_dir(own.parent)
                if not files.replace_link(own, os.path.relpath(role.log_dir, own.parent)):
                    logger.warning(f"{role.spec.label} goes on writing its log in {role.log_dir}")
            attempt.nodes[role.spec.label] = list(role.hosts)
            attempt.kept.append(role.spec.label)

    def end(self, grace_s: float) -> None:
        """End them and all by which they were led: nobody takes them over."""
        self._end(self.roles, grace_s)
        self.close()

    def close(self) -> None:
        """Fall silent."""
        self.pulse.close()
        self.hubs.close()
        self.reaper.close()
