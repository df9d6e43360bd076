"""A role as a step of a Slurm job: one srun over its nodes, an agent on each, the role's processes below the agents.

`StepRole` is to the supervisor what `Role` is on one machine. srun's own exit code is never trusted (it is 0 for tasks
that never ran): what counts is what the agents and the role's processes say.
"""

import contextlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loguru import logger

from prime_hpc.runtime.role_context import ATTEMPT, INCARNATION
from prime_hpc.slurm.allocation import Allocation
from prime_hpc.slurm.client import SlurmError, clean_environment, run_slurm
from prime_hpc.slurm.containers import Container, one_node_srun
from prime_hpc.slurm.hostlist import compress_hosts, expand_hosts
from prime_hpc.slurm.termination import parse_words
from prime_hpc.store.messaging.sockets import http_url
from prime_hpc.supervisor.agent import LaunchOrder
from prime_hpc.supervisor.roles.process import Death, Role, ending
from prime_hpc.supervisor.roles.spec import RoleSpec, Urls
from prime_hpc.supervisor.roles.srun_environment import SET_BY_SBATCH

HELLO_TIMEOUT_S = 180.0
SCANCEL_TIMEOUT_S = 10.0
SRUN_GRACE_S = 2.0
WITHOUT_SRUN_S = 8.0
"""Agents whose srun is gone are gone too once they have been silent for so long."""
_TASKS_ENDED = re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: (.+)$", re.MULTILINE)
_OUT_OF_MEMORY = "Out Of Memory"
_STEP_CANCELLED = re.compile(r"\*\*\* STEP \S+ ON \S+ CANCELLED AT [^\s*]+(.*?) \*\*\*")

Hellos = Mapping[str, dict[str, Any]]
"""First words of the agents, by `host/local rank`."""


@dataclass(frozen=True)
class StepSpec(RoleSpec):
    """A role on nodes of the allocation."""

    component: int = 0
    tasks_per_node: int = 1
    order: Callable[["StepSpec", Hellos, Urls], LaunchOrder | None] = field(default=lambda *_: None)
    """The commands that the agents are to start, from their hellos and the servers' URLs; None: not yet."""
    gpus: tuple[int, ...] | None = None
    """Positions of its GPUs on each node."""
    is_on_gpus: bool = False
    """True if it computes on them."""
    options: Mapping[str, str | bool] = field(default_factory=dict)
    """sbatch options of a job of its own: those that decide on its component's nodes, for a stand-in."""
    port: int | None = None
    """Of a server: HTTP port that its section states; None: its first agent has found one."""

    @property
    def held_gpus(self) -> frozenset[Hashable]:
        """By host and position."""
        return frozenset((host, gpu) for host in self.hosts for gpu in self.gpus or ())

    @property
    def device_words(self) -> str:
        """As for `RoleSpec`."""
        return f"GPUs {', '.join(map(str, self.gpus))} of each node" if self.gpus and self.is_on_gpus else "cpu"


def http_port(spec: StepSpec, first: Mapping[str, Any]) -> int:
    """Find where a server listens, by its first agent's hello."""
    return spec.port or int(first["ports"][0])


@dataclass(frozen=True)
class StepContext:
    """Facts that all steps of a job share."""

    allocation: Allocation
    run_dir: Path
    no_kill: bool
    """Homogeneous jobs: a step outlives a lost node."""
    srun_args: tuple[str, ...] = ()
    container: Container | None = None
    python: Sequence[str] = (sys.executable,)
    """Begins the command of a process outside of the container: Python, or what becomes it on the node."""

    @property
    def hello_timeout_s(self) -> float:
        """Deadline of the agents' first word: on a node that has no image yet, of the image too."""
        return HELLO_TIMEOUT_S if self.container is None else HELLO_TIMEOUT_S + self.container.config.start_timeout_s

    def srun(
        self,
        hosts: list[str],
        component: int,
        tasks_per_node: int,
        name: str,
        arguments: list[str],
        *,
        quiet: bool = False,
        outside: bool = False,
    ) -> list[str]:
        """Return the command that runs `python -m ARGUMENTS` on the hosts: nodes of a job, or pods.

        Args:
            component: of a het job.
            arguments: the module's name, and its own.
            quiet: without task numbers in its output.
            outside: not in the container, where there is one.

        `--overlap` because steps share nodes and because a step that failed to start would otherwise hold its nodes
        until the job ends; which GPUs a role uses is decided by its agents.
        """
        if not self.allocation.by_slurm:
            step = ["--hosts", ",".join(hosts), "--tasks", str(tasks_per_node), "--label", name]
            return [sys.executable, "-P", "-m", "prime_hpc.kubernetes.start", *step, *arguments]
        command = ["srun"]
        if self.allocation.is_het:
            command.append(f"--het-group={component}")
        command += ["--overlap", f"--nodes={len(hosts)}", f"--ntasks={len(hosts) * tasks_per_node}"]
        command += [f"--ntasks-per-node={tasks_per_node}", f"--nodelist={compress_hosts(hosts)}", "--cpu-bind=none"]
        # a site may have had the job sent with --export=NONE, which srun would take over
        command += ["--kill-on-bad-exit=0", "--unbuffered", "--input=none", "--export=ALL", f"--job-name={name}"]
        if self.no_kill:
            command.append("--no-kill")
        if len(hosts) * tasks_per_node > 1 and not quiet:
            command.append("--label")
        command += self.srun_args
        if self.container is None or outside:
            return [*command, *self.python, "-P", "-m", *arguments]
        return [*command, *self.container.srun_args(), *self.container.command(), "-P", "-m", *arguments]

    def substitute_command(
        self, options: Mapping[str, str | bool], name: str, log: Path, arguments: list[str]
    ) -> list[str]:
        """Return the command that runs `python -m ARGUMENTS` on a node of another, one-node job, and waits for its end.

        A job that has lost a node cannot get it back; a job of its own can take its place.
        """
        command = ["sbatch", "--parsable", "--wait", "--nodes=1", "--ntasks-per-node=1", "--no-requeue", "--export=ALL"]
        command += [f"--{k}" if v is True else f"--{k}={v}" for k, v in options.items() if v is not False]
        command += [f"--job-name={name}", f"--output={str(log).replace('%', '%%')}", "--open-mode=append"]
        if self.container is None:
            return [*command, f"--wrap=exec {shlex.join([*self.python, '-P', '-m', *arguments])}"]
        box = replace(self.container, name=None)  # the name is of this job's containers
        step = one_node_srun([*self.srun_args, *box.srun_args()], SET_BY_SBATCH)
        return [*command, f"--wrap=exec {step} {shlex.join([*box.command(), '-P', '-m', *arguments])}"]


class StepRole(Role):
    """One role of the attempt on one or more nodes."""

    spec: StepSpec
    has_agents = True

    def __init__(
        self,
        spec: StepSpec,
        log_dir: Path,
        environment: dict[str, str],
        bus_statuses: dict[tuple[str, int], dict[str, Any]],
        context: StepContext,
        publish: Callable[..., None],
        grace_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        spec, log_dir, environment, bus_statuses: as for `Role`.
        grace_s: from the polite end of the role to its kill.
        """
        super().__init__(spec, log_dir, environment, bus_statuses, clock)
        self._context = context
        self._publish = publish
        self._grace_s = grace_s
        self.start_number = 0
        self._hellos: dict[str, dict[str, Any]] = {}
        self._exits: dict[str, int] = {}
        self._problems: dict[str, str] = {}
        self._oom_kills: dict[str, int] = {}
        """Of each agent, processes that the kernel ended on its node."""
        self._beats: dict[str, float] = {}
        self._ordered = False
        self._ending = False
        self._said_before: int | None = None
        """Size of the log when the stand-in was sent that may be there."""
        self._adopted: dict[str, int] = {}

    @property
    def health_url(self) -> str | None:
        """Of a server that was told where to listen."""
        return self.url and f"{self.url.removesuffix('/v1')}/health"

    @property
    def start_timeout_s(self) -> float:
        """As for `Role`; until its agents are all there, the image's deadline comes on top."""
        if self._ordered or self._context.container is None:
            return self.spec.start_timeout_s
        return self.spec.start_timeout_s + self._context.hello_timeout_s

    @property
    def running(self) -> bool:
        """True if its agents are at work; until they have spoken, whether srun lives.

        Slurm's SIGTERM ends srun, but not the tasks, which may still be saving.
        """
        codes = list(self._exits.values())  # the bus's thread adds to it
        if any(codes) or len(codes) == self._num_tasks > 0:
            return False
        if super().running:
            return True
        beats = list(self._beats.values())
        return len(beats) == self._num_tasks > 0 and self._clock() - min(beats) < WITHOUT_SRUN_S

    @property
    def exit_code(self) -> int | None:
        """The first failed part's, else srun's."""
        codes = list(self._exits.values())
        bad = [code for code in codes if code != 0]
        if bad:
            return bad[0]
        return 0 if len(codes) == self._num_tasks > 0 else super().exit_code

    @property
    def _num_tasks(self) -> int:
        return len(self.hosts) * self.spec.tasks_per_node

    def start(self) -> None:
        """Start the step's agents on its hosts; what they run follows with `send_launch_order`."""
        self._cancel_substitute()
        self.start_number += 1
        self._hellos, self._exits, self._beats, self._problems, self._adopted = {}, {}, {}, {}, {}
        self._oom_kills = {}
        self._ordered = self._ending = False
        arguments = ["prime_hpc.supervisor.agent", str(self._context.run_dir), self.spec.label, str(self.start_number)]
        if self.is_substitute_job:
            self.hosts = []  # nobody knows yet
            command = self._context.substitute_command(
                self.spec.options, self._substitute_name, self.log_file, arguments
            )
            self._environment = clean_environment(self._environment)
            self._said_before = self.log_file.stat().st_size if self.log_file.exists() else 0
            self._launch(command)
            return
        command = self._context.srun(
            self.hosts, self.spec.component, self.spec.tasks_per_node, self.spec.label, arguments
        )
        self._launch(command)

    @property
    def can_be_substituted(self) -> bool:
        """True if a lost node can be replaced by a job of its own; a lost pod is made again under its own name.

        Engines over several nodes are one group: a job of one node cannot be a part of it, nor the whole.
        """
        return self._context.allocation.by_slurm and (len(self.spec.hosts) == 1 or self.spec.is_elastic)

    @property
    def _substitute_name(self) -> str:
        return f"{self._context.run_dir.name}-{self.spec.label}-{self._environment.get(ATTEMPT)}-{self.start_number}"

    @property
    def substitute_job_id(self) -> str | None:
        """Job id of the stand-in that was sent last, from sbatch's answer in the log; None: it has not answered.

        Jobs of this name may be another run's: two sweeps can have points of one name.
        """
        if self._said_before is None:
            return None
        try:
            with self.log_file.open("rb") as file:
                file.seek(self._said_before)
                text = file.read(64_000).decode(errors="replace")
        except OSError:
            return None
        match = re.search(r"^(\d+)(?:;\S+)?$", text, re.MULTILINE)
        return match[1] if match else None

    @property
    def has_node(self) -> bool:
        """True if a stand-in has got its node."""
        return self.is_substitute_job and bool(self._hellos)

    def on_message(self, message: dict[str, Any]) -> None:
        """Take a message of one of its agents, in the bus's thread."""
        number = message.get("start_number")
        if number != self.start_number:
            if number is not None and number < self.start_number and message["event"] == "hello":
                # a step that srun, or a stand-in that sbatch had given up, and that has got its nodes all the same
                self._publish(f"end/{self.spec.label}", start_number=number, grace_s=self._grace_s)
            return
        if self.is_substitute_job and not self.hosts:
            self.hosts = [message["host"]]
        key, event = message["key"], message["event"]
        self._beats[key] = self._clock()
        if event == "hello":
            self._hellos[key] = message
        elif event == "adopted":
            self._adopted[key] = int(message["incarnation"])
        elif event == "warned" and self.is_substitute_job:  # the run outlives the end of that job
            if self.spec.is_elastic:
                self._publish("server", role=self.spec.name, index=self.spec.index, state="leaving", url=self.url)
        elif event == "warned":
            self.warned = int(message.get("signal", signal.SIGTERM))
        elif event == "replaced":
            who = f"the process of {self.spec.label} on {message['host']}"
            logger.warning(f"{who} {ending(int(message['code']))}: it alone is started again")
        elif event == "exited":
            if message.get("oom_kills") is not None:
                self._oom_kills[key] = int(message["oom_kills"])
            self._exits[key] = int(message["code"])
            if message.get("problem"):
                self._problems[key] = str(message["problem"])

    def agents(self) -> list[str]:
        """Return `label host/task` of the agents that have spoken and not ended."""
        return [f"{self.spec.label} {key}" for key in list(self._beats) if key not in self._exits]

    def send_launch_order(self, urls: Urls) -> None:
        """Give the agents their order once all are there and it can be given."""
        if self._ordered or len(self._hellos) < self._num_tasks or not self.hosts:
            return
        spec = replace(self.spec, hosts=tuple(self.hosts))
        order = self.spec.order(spec, self._hellos, urls)
        if order is None:
            return
        if self.spec.is_server:
            first = self._hellos[f"{self.hosts[0]}/0"]
            self.url = http_url(first["address"], http_port(spec, first))
            self._publish("server", role=self.spec.name, index=self.spec.index, state="starting", url=self.url)
        self._ordered = True
        if self._context.container is not None:
            self.started = self._clock()  # the image has had a deadline of its own
        self._publish(f"launch/{self.spec.label}", **{**vars(order), "start_number": self.start_number})

    def offer_to(self, incarnation: int) -> None:
        """Have its agents, and those of its later starts, belong to the run's next attempt."""
        self._environment = {**self._environment, INCARNATION: str(incarnation)}
        self._publish(f"adopt/{self.spec.label}", start_number=self.start_number, incarnation=incarnation)

    def belongs_to(self, incarnation: int) -> bool:
        """Return whether all its agents have said so."""
        return len(self._adopted) == self._num_tasks and set(self._adopted.values()) == {incarnation}

    def lost_hosts(self, silence_s: float) -> list[str]:
        """Hosts whose agents spoke once and have been silent for longer than `silence_s`."""
        now = self._clock()
        beats = list(self._beats.items())
        quiet = self._hosts_of(key for key, at in beats if key not in self._exits and now - at > silence_s)
        return self._without_ended(quiet)

    def silent_hosts(self, wait_s: float) -> list[str]:
        """Hosts whose agents neither beat nor report their end within `wait_s`. Waits for so long at most.

        A rank's "connection reset" comes before its dead peer's silence is long enough to be noticed.
        """
        began = self._clock()
        while True:
            beats = list(self._beats.items())
            quiet = self._hosts_of(key for key, at in beats if at <= began and key not in self._exits)
            if not quiet or self._clock() - began > wait_s:
                return self._without_ended(quiet)
            time.sleep(0.1)

    def _without_ended(self, quiet: list[str]) -> list[str]:
        """Of silent hosts leave out those on which Slurm ended the step, and take that for its agents' last word.

        Where one task ran out of memory a site may end all (`OOMKillStep`), and anybody may `scancel` a step: no node
        is lost by that. Elsewhere `Killed` proves nothing: a node that is shut down says so too.
        """
        text = self._said_since_start(1000) if quiet else ""
        ended = {host: how for hosts, how in _TASKS_ENDED.findall(text) for host in expand_hosts(hosts)}
        cancelled = _STEP_CANCELLED.search(text)
        words = parse_words(cancelled[1]) if cancelled else "NODE FAILURE"
        if words == "NODE FAILURE" and _OUT_OF_MEMORY not in ended.values():
            return quiet
        for key in list(self._beats):
            how = ended.get(key.split("/")[0])
            if how == _OUT_OF_MEMORY:
                self._oom_kills.setdefault(key, 1)  # the agent knows better, unless it died of it
            if how is None or key in self._exits:
                continue
            if words == "" and not self._ending:  # with a cause (time limit, preemption) the job's end counts
                self._problems[key] = "its step was cancelled: `scancel` of this one step, or a rule of the site"
            self._exits[key] = -signal.SIGKILL
        return [host for host in quiet if host not in ended]

    def missing_hosts(self) -> list[str]:
        """Hosts whose agents have not said hello though the deadline is over."""
        if self._clock() - self.started < self._context.hello_timeout_s:
            return []
        spoken = self._hosts_of(list(self._hellos))
        return [host for host in self.hosts if host not in spoken]

    def _hosts_of(self, keys: Iterable[str]) -> list[str]:
        """Return the hosts of some agents, in order."""
        found = {key.split("/")[0] for key in keys}
        return [host for host in self.hosts if host in found]

    def forget_silence(self) -> None:
        """As for `Role`; of the agents as well."""
        super().forget_silence()
        for key in list(self._beats):
            self._beats[key] = self._clock()

    def death(self) -> Death:
        """As for `Role`; a step whose agents never spoke is named with its hosts, and nodes without memory are."""
        self._without_ended(self.hosts)
        if self._problems:
            return Death(f"{self.spec.label}: {next(iter(self._problems.values()))}")
        if not self._hellos:
            return Death(f"{self.spec.label} could not be started on {', '.join(self.hosts)} (srun ended)")
        death = super().death()
        if hosts := self._hosts_of(key for key, count in list(self._oom_kills.items()) if count > 0):
            why = f"on {', '.join(hosts)} the kernel ended processes of the job for want of memory: more slurm.mem"
            return death._replace(cause=f"{death.cause}; {why}")
        return death

    def ask_to_end(self) -> None:
        """Politely: the agents end what they started. Returns at once."""
        if not self._ending:
            self._ending = True
            self._publish(f"end/{self.spec.label}", start_number=self.start_number, grace_s=self._grace_s)

    def _has_beats(self) -> bool:
        """Return whether an agent is alive, as far as is known: they may outlive their srun."""
        since = self._clock() - WITHOUT_SRUN_S
        return any(at > since and key not in self._exits for key, at in list(self._beats.items()))

    def kill(self) -> None:
        """End the step through Slurm, then srun itself."""
        if self._process is None:
            return
        if self._process.poll() is not None and self._said_before is None and not self._has_beats():
            return
        self.ask_to_end()
        self._cancel_substitute()  # whether or not its sbatch still waits for it
        steps = {
            f"{self._step_job(hello)}.{hello['step']}" for hello in list(self._hellos.values()) if hello.get("step")
        }
        for step in steps:
            with contextlib.suppress(SlurmError):  # the controller may be away: srun's own end reaches the nodes too
                run_slurm(["scancel", step], timeout_s=SCANCEL_TIMEOUT_S)
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=SRUN_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _cancel_substitute(self) -> None:
        """End the stand-in that was sent last, queued or at work."""
        job = self.substitute_job_id
        if job is not None:
            with contextlib.suppress(SlurmError):
                run_slurm(["scancel", job], timeout_s=SCANCEL_TIMEOUT_S)
                self._said_before = None

    def _step_job(self, hello: dict[str, Any]) -> str:
        """Job id under which Slurm's commands know the step: a stand-in's, or a het component's own."""
        if self.is_substitute_job:
            return str(hello["job_id"])
        if not self._context.allocation.is_het:
            return self._context.allocation.job_id
        return self._context.allocation.component_ids[self.spec.component]
