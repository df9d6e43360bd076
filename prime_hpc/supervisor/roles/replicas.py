"""Servers whose node was lost in a homogeneous job: on a spare node at once, or on their own later."""

from collections.abc import Callable, Sequence

from loguru import logger

from prime_hpc.supervisor.roles.process import Role


class Replicas:
    """Servers that are away, and when they are tried again.

    Args:
        retry_s: pause between attempts on a node that was lost.
        spares: nodes that no role uses.
    """

    def __init__(self, retry_s: float, spares: list[str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._retry_s = retry_s
        self._spares = list(spares)
        self._replaced: dict[str, str] = {}
        self._due: dict[str, float] = {}
        self._on_trial: set[str] = set()
        self._num_tries: dict[str, int] = {}
        self._said: dict[str, str] = {}
        """By elastic server: the last word of its last job that never had a node."""

    def invite(self, role: Role) -> None:
        """Have an elastic server queue for a node."""
        role.state, role.is_substitute_job = "away", True
        self._due[role.spec.label] = 0.0

    def awaiting_recovery(self, role: Role) -> bool:
        """Return whether the server was lost with its node and has not served since."""
        return role.spec.label in self._on_trial and not self._served_since(role)

    def _served_since(self, role: Role) -> bool:
        if role.state == "ready":
            self._on_trial.discard(role.spec.label)
            self._num_tries.pop(role.spec.label, None)
        return role.state == "ready"

    def can_replace(self, role: Role, lost: Sequence[str]) -> bool:
        """Return whether spare nodes can take the place of a server's lost ones."""
        return bool(lost) and not role.is_substitute_job and self._lacks(lost) <= len(self._spares)

    def _lacks(self, lost: Sequence[str]) -> int:
        return sum(host not in self._replaced for host in lost)

    def take_spares(self, lost: Sequence[str]) -> dict[str, str] | None:
        """Return a spare node for each lost one, the same for all roles of a node; None: there are too few."""
        if self._lacks(lost) > len(self._spares):
            return None
        self._replaced |= {host: self._spares.pop(0) for host in lost if host not in self._replaced}
        return {host: self._replaced[host] for host in lost}

    def mark_lost(self, role: Role, lost: Sequence[str]) -> str:
        """Take a server out of the run; returns what will become of it, for people."""
        role.state = "away"
        self._on_trial.add(role.spec.label)
        # a stand-in leaves the job's nodes to others: it would take one and go on as a job of its own
        swap = self.take_spares(lost) if self.can_replace(role, lost) else None
        if swap is not None:
            role.hosts = [swap.get(host, host) for host in role.hosts]
            self._due[role.spec.label] = 0.0
            return f"its server is started on the spare node {', '.join(swap.values())}"
        tries = self._num_tries.get(role.spec.label, 0)
        if tries and role.can_be_substituted:
            role.is_substitute_job = True  # the job no longer holds the node
        self._num_tries[role.spec.label] = tries + 1
        self._due[role.spec.label] = self._clock() + self._retry_s
        how = "as a job of its own" if role.is_substitute_job else "on its node"
        return f"its server is tried again {how} in {self._retry_s:.0f} s"

    def restart_lost(self, roles: Sequence[Role], restart: Callable[[Role], None]) -> None:
        """Start those whose time has come."""
        for role in roles:
            if role.state == "away" and role.is_substitute_job and role.is_alive:
                self._on_substitute_started(role)
                continue
            due = self._due.get(role.spec.label)
            if role.state == "away" and due is not None and self._clock() >= due:
                del self._due[role.spec.label]
                self._say_why_refused(role)
                where = "in a job of its own" if role.is_substitute_job else f"on {', '.join(role.hosts)}"
                logger.info(f"{role.spec.label} is started again {where}")
                restart(role)
                if role.is_substitute_job:
                    role.state = "away"  # until it has got a node, which may take as long as it takes
                    self._due[role.spec.label] = self._clock() + self._retry_s  # should its job fail

    def _say_why_refused(self, role: Role) -> None:
        """Say, once for each reason, that Slurm gave an elastic server no node."""
        if not role.spec.is_elastic or not role.was_started or role.has_node:
            return
        label, said = role.spec.label, role.log_excerpt().strip().rpartition("\n")[2]
        if self._said.get(label) != said:
            self._said[label] = said
            logger.warning(f"the job of {label} ended before it had a node: {said}; it is sent again and again")

    def _on_substitute_started(self, role: Role) -> None:
        """Hold a stand-in that has got its node to the deadlines of a start."""
        if role.has_node:
            role.state, role.started = "starting", self._clock()
            self._due.pop(role.spec.label, None)
            logger.info(f"{role.spec.label} has got node {', '.join(role.hosts)} as a job of its own")
