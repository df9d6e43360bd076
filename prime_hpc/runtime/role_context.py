"""Facts of the attempt that a role process belongs to. Every role's main reads them first.

The supervisor writes these facts into the environment of the roles it starts (`role_environment`);
a role started by hand finds none of them and gets the defaults.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BUS = "PRIMEHPC_BUS"
ATTEMPT = "PRIMEHPC_ATTEMPT"
INCARNATION = "PRIMEHPC_INCARNATION"
RESUME_STEP = "PRIMEHPC_RESUME_STEP"
INFERENCE_URLS = "PRIMEHPC_INFERENCE_URLS"
TEACHER_URLS = "PRIMEHPC_TEACHER_URLS"
JUDGE_URLS = "PRIMEHPC_JUDGE_URLS"
URL_VARIABLES = {"inference": INFERENCE_URLS, "teacher": TEACHER_URLS, "judge": JUDGE_URLS}
"""Group of engines -> the variable with `http://host:port/v1` of each of its servers."""
NOWHERE = "http://127.0.0.1:9/"
"""Begins what stands in the place of the URL of a server that has no node yet, and may never get one."""
ENV_HOSTS = "PRIMEHPC_ENV_HOSTS"
"""`host:port` of the job's nodes that play episodes for the orchestrator."""
ENV_KEY = "PRIMEHPC_ENV_SERVER_KEY"
"""The key that the orchestrator and these nodes prove to each other to have."""
NODE_PORTS = "PRIMEHPC_NODE_PORTS"
"""How many ports the agents of a step find on each node, where that is not its role's own number."""
RUN = "PRIMEHPC_RUN"
"""Set for a role of one of several runs that share a message bus: the run's id."""
LED = "PRIMEHPC_LED"
"""Set by an agent: SIGTERM is Slurm's warning to the whole job and no order; the agent ends its role by SIGINT."""
NODE = "PRIMEHPC_NODE"
"""Name by which this node is known to the run and reached by its other nodes, where that is not the host's own: a pod's
in its headless service."""
LOCAL_TASK = "PRIMEHPC_LOCAL_TASK"
"""Number of an agent among those that a pod runs for one step."""
RANKS_FILE = "PRIMEHPC_RANKS_FILE"
"""Meeting point of a trainer's ranks on one node; absent: as torch's own variables say."""
RANKS_PREFIX = "prime-hpc-ranks-"
"""Of the names of the folders of such points, in /tmp."""


def this_node() -> str:
    """Return this node's name, as the run knows it."""
    return os.environ.get(NODE) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


@dataclass(frozen=True)
class RoleContext:
    """One role process of one attempt of a run."""

    role: str
    run_dir: Path
    index: int = 0
    attempt: int = 1
    incarnation: int = 0
    bus_address: str | None = None
    resume_step: int | None = None
    inference_urls: list[str] = field(default_factory=list)
    teacher_urls: list[str] = field(default_factory=list)
    judge_urls: list[str] = field(default_factory=list)
    env_hosts: list[str] = field(default_factory=list)
    run: str = ""
    """One of several runs of one trainer; "" where there is only one."""

    @property
    def bus_incarnation(self) -> int | None:
        """The incarnation that its messages state: a child's attempts are counted apart from those of the hub."""
        return None if self.run else self.incarnation

    @property
    def bus_run(self) -> str:
        """The run whose topics are its own on a bus that several runs share: those of this attempt of its run. What
        was announced in an earlier attempt is kept there for as long as the hub lives, and holds no longer."""
        return f"{self.run}/{self.incarnation}" if self.run else ""

    @property
    def log_dir(self) -> Path:
        """Directory of this role's logs and status in this attempt."""
        return self.run_dir / "logs" / f"attempt_{self.attempt}" / self.role

    @classmethod
    def from_env(
        cls, role: str, run_dir: Path | str, index: int = 0, environ: Mapping[str, str] = os.environ
    ) -> "RoleContext":
        """Read the supervisor's facts from `environ`; absent ones take the defaults."""
        resume = environ.get(RESUME_STEP)
        return cls(
            role=role,
            run_dir=Path(run_dir),
            index=index,
            attempt=int(environ.get(ATTEMPT, "1")),
            incarnation=int(environ.get(INCARNATION, "0")),
            bus_address=environ.get(BUS) or None,
            resume_step=int(resume) if resume else None,
            inference_urls=_split(environ.get(INFERENCE_URLS, "")),
            teacher_urls=_split(environ.get(TEACHER_URLS, "")),
            judge_urls=_split(environ.get(JUDGE_URLS, "")),
            env_hosts=_split(environ.get(ENV_HOSTS, "")),
            run=environ.get(RUN, ""),
        )


def _split(urls: str) -> list[str]:
    return [url for url in urls.split(",") if url]


def role_environment(
    *,
    bus_address: str,
    attempt: int,
    incarnation: int,
    resume_step: int | None,
    urls: Mapping[str, Sequence[str]],
    run: str = "",
) -> dict[str, str]:
    """Return the environment variables from which `RoleContext.from_env` reads the same facts.
    `urls`: of each group of engines, as far as they are known."""
    env = {
        BUS: bus_address,
        ATTEMPT: str(attempt),
        INCARNATION: str(incarnation),
        **{name: ",".join(urls.get(role, ())) for role, name in URL_VARIABLES.items()},
    }
    if resume_step is not None:
        env[RESUME_STEP] = str(resume_step)
    if run:
        env[RUN] = run
    return env
