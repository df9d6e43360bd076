"""One role's process: started in its own session with its own log, asked how it is, ended with all it started; and
several of them: the order in which they start, and their common end."""

import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import psutil

from prime_hpc.client.http import ask
from prime_hpc.inference.backend import death_reason
from prime_hpc.observe.role_status import read_status
from prime_hpc.runtime.process_tree import alive, end_families, end_strays, family, marked, send
from prime_hpc.supervisor.roles.caches import node_caches
from prime_hpc.supervisor.roles.last_words import exception_of, native_reason
from prime_hpc.supervisor.roles.spec import RoleSpec, Urls

MARK = "PRIMEHPC_ROLE_MARK"
"""In the environment of everything that one start of a role starts: which start it was."""
GONE_S = 10.0
"""A killed process that holds much GPU memory takes seconds to give it back."""
State = Literal["waiting", "starting", "ready", "done", "dead", "away"]
"""`waiting`: not started, see `RoleSpec.after`; `away`: a server whose node was lost, and without which the run goes
on."""
_TORCHRUN_RANK = re.compile(r"rank\s*:\s*(\d+)")
_TORCHRUN_EXIT = re.compile(r"exitcode\s*:\s*(-?\d+)")
_COMMAND_LINE = re.compile(r"^(?:\d+: )?(?:\[\S+\] )?\$ ", re.MULTILINE)
"""With which a start begins in a log, here and on other nodes."""
_LOST_A_PEER = re.compile(r"Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|ended by SIGTERM")
"""In the words of a rank that only ended because another one did."""
Spec = TypeVar("Spec", bound=RoleSpec)


class Death(NamedTuple):
    """How a role ended that should not have."""

    cause: str
    permanent: bool = False
    """The process whose words these are knows that it would end so again."""
    code: int = 1
    """The exit code that it wants for the attempt."""

    @classmethod
    def of(cls, cause: str, status: Mapping[str, Any]) -> "Death":
        """As a process reported it."""
        return cls(cause, status.get("permanent", False), status.get("exit_code", 1))


def log_tail(path: Path, lines: int = 20, most_bytes: int = 64_000) -> str:
    """Return the last lines of a log, for the error that names its role."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most_bytes))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


class Role:
    """A role of one attempt. All methods return at once, except `end`."""

    has_agents = False
    """On the nodes of a job agents start, watch and end its processes; on this machine it is a process itself."""

    def __init__(
        self,
        spec: RoleSpec,
        log_dir: Path,
        environment: dict[str, str],
        bus_statuses: dict[tuple[str, int], dict[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        log_dir: where its log and status files are.
        bus_statuses: the last "status" message of each role process by (role, index), which the bus fills.
        clock: seconds during which the supervisor was running.
        """
        self._clock = clock
        self.spec = spec
        self._bus_statuses = bus_statuses if bus_statuses is not None else {}
        self.log_dir = log_dir
        suffix = f"_{spec.index}" if spec.index else ""
        self.log_file = log_dir / f"{spec.name}{suffix}.log"
        self.state: State = "waiting" if spec.after else "starting"
        self.restarts = 0
        self.was_ready = False
        self.hosts = list(spec.hosts)
        """Nodes that it is on now."""
        self.url: str | None = None
        """Of a server whose agents were told where to listen."""
        self.warned = 0
        """The signal that one of its nodes got and nobody has looked into; 0: none."""
        self.is_substitute_job = False
        """Whether it runs, or waits for a node, as a job of its own."""
        self.started = 0.0
        """By `clock`, of the last start: the clock on the wall may be set meanwhile, or differ between nodes."""
        self._before: dict[int, list[dict[str, Any]]] = {}
        """What each process's place said before the last start: words of a former attempt."""
        self._reports: dict[int, tuple[Any, float]] = {}
        """The last word of each process, and when it was noticed."""
        self._environment = environment
        self.command: list[str] = []
        """As it was started last."""
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self._killed: list[psutil.Process] = []
        self._healthy_at = 0.0

    @property
    def pid(self) -> int:
        """Process id of the role's leader."""
        assert self._process is not None
        return self._process.pid

    @property
    def was_started(self) -> bool:
        """True if it ever had a process."""
        return self._process is not None

    @property
    def running(self) -> bool:
        """True if the role is at work."""
        return self.is_alive

    @property
    def exit_code(self) -> int | None:
        """The leader's exit code; negative: ended by that signal."""
        return None if self._process is None else self._process.poll()

    @property
    def is_alive(self) -> bool:
        """True if the process that the supervisor started is still there."""
        return self._process is not None and self._process.poll() is None

    @property
    def health_url(self) -> str | None:
        """The address at which a server says how it is."""
        return self.spec.health_url

    @property
    def start_timeout_s(self) -> float:
        """Deadline of its readiness, from `started`."""
        return self.spec.start_timeout_s

    @property
    def is_server(self) -> bool:
        """True if it is asked for its health instead of for heartbeats."""
        return self.spec.is_server

    @property
    def can_be_substituted(self) -> bool:
        """True if a lost node can be replaced by a job of its own."""
        return False

    @property
    def has_node(self) -> bool:
        """True if a stand-in has got its node."""
        return False

    def start(self) -> None:
        """Start the process; its output is appended to the role's log."""
        self._launch(self.spec.command)

    def send_launch_order(self, urls: Urls) -> None:
        """Tell the role's agents what to do; a process of this machine has none."""

    def on_message(self, message: dict[str, Any]) -> None:
        """Take a message of one of its agents, in the bus's thread."""

    def agents(self) -> list[str]:
        """Return `label host/task` of the agents that have spoken and not ended."""
        return []

    def offer_to(self, incarnation: int) -> None:
        """Have its agents, and those of its later starts, belong to the run's next attempt."""

    def belongs_to(self, incarnation: int) -> bool:
        """Return whether all its agents have said so."""
        return True

    def silent_hosts(self, wait_s: float) -> list[str]:
        """Nodes of the role that say nothing within `wait_s`."""
        return []

    def lost_hosts(self, silence_s: float) -> list[str]:
        """Nodes of the role that fell silent; this machine is none of them."""
        return []

    def missing_hosts(self) -> list[str]:
        """Nodes of the role that never spoke."""
        return []

    def extend_deadlines(self, seconds: float) -> None:
        """Extend deadlines and silence by the time that the supervisor itself was held up, maybe with the role."""
        self.started += seconds
        self._healthy_at += seconds
        self._reports = {index: (mark, noticed + seconds) for index, (mark, noticed) in self._reports.items()}

    def forget_silence(self) -> None:
        """Begin all silence anew: the supervisor was stopped, and the role may be still."""
        now = self._clock()
        self._healthy_at = max(self._healthy_at, now)
        self._reports = {index: (mark, now) for index, (mark, _) in self._reports.items()}

    def ask_to_end(self) -> None:
        """Politely and at once; `process_tree.end_families` does it for this machine's processes."""

    def _launch(self, command: list[str]) -> None:
        self.command = command
        self._reports = {}
        self._before = {index: self._read_statuses(index) for index in self._indices}
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._mark = f"{self.spec.label}/{uuid.uuid4().hex}"
        with self.log_file.open("ab") as log:
            between = "\n" if log.tell() else ""  # what ended before may have left half a line
            log.write(f"{between}$ {' '.join(command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **self._environment,
                    **node_caches(self._environment),
                    **self.spec.environment,
                    MARK: self._mark,
                },
                start_new_session=True,  # a Ctrl-C at the terminal reaches the supervisor alone
            )
        self.state = "starting"
        self.started = self._clock()
        self._healthy_at = self._clock()

    def statuses(self) -> list[dict[str, Any]]:
        """Return what the role's processes last said of themselves in this attempt."""
        newest = []
        for index in self._indices:
            rows = [row for row in self._read_statuses(index) if row not in self._before.get(index, [])]
            if not rows:
                continue
            word = max(rows, key=lambda row: row.get("count", 0))
            newest.append(word)
            mark = (word.get("count"), word["time"], word["state"])
            if index not in self._reports or self._reports[index][0] != mark:
                self._reports[index] = mark, self._clock()
        return newest

    @property
    def _indices(self) -> range:
        return range(self.spec.index, self.spec.index + self.spec.num_processes)

    def _read_statuses(self, index: int) -> list[dict[str, Any]]:
        """Read what a process has said of itself, in its file and on the bus."""
        reports = (read_status(self.log_dir, index), self._bus_statuses.get((self.spec.name, index)))
        return [report for report in reports if report is not None]

    def has_reported(self, state: str) -> bool:
        """Return whether all of the role's processes report this state (`done` counts as `ready` too)."""
        wanted = {state, "done"} if state == "ready" else {state}
        rows = self.statuses()
        return len(rows) == self.spec.num_processes and all(row["state"] in wanted for row in rows)

    def heartbeat_age_s(self) -> float:
        """Seconds since the oldest last word of the role's processes (since its start where none came)."""
        self.statuses()
        return self._clock() - min((noticed for _, noticed in self._reports.values()), default=self.started)

    def healthy(self, timeout_s: float = 2.0) -> bool:
        """Return whether the server answers its health route; True for roles without one."""
        if self.health_url is None:
            return not self.is_server
        try:
            ask(self.health_url, timeout_s=timeout_s)
            well = True
        except OSError:
            well = False
        if well:
            self._healthy_at = self._clock()
        return well

    def unhealthy_s(self) -> float:
        """Seconds since the server last answered well."""
        return self._clock() - self._healthy_at

    def death(self) -> Death:
        """Why the role ended: the first process to fail, in its own words where it left any."""
        rows = {row["index"] - self.spec.index: row for row in self.statuses() if row["state"] == "failed"}
        words = {rank: str(row["error"]) for rank, row in rows.items()}
        first = self._first_failed_rank()
        if self.spec.num_processes > 1:
            if first is not None and first[0] not in words:
                return Death(f"{self.spec.label} rank {first[0]} {self._end_of(*first)}")
            # Ranks that lost another end within the same second; torchrun may have seen one of them first.
            own = [rank for rank in words if not _LOST_A_PEER.search(words[rank])]
            if words:
                rank = first[0] if first is not None else min(words)
                if own and rank not in own:
                    rank = min(own, key=lambda r: rows[r]["time"])
                told = words[rank].removeprefix(f"rank {rank}: ")
                return Death.of(f"{self.spec.label} rank {rank}: {told}", rows[rank])
        elif words:
            told = words[0]
            if self.is_server:  # each worker of an engine tells its whole traceback, the first of them the cause
                last_start = self._said_since_start(20_000, 2_000_000)
                told = death_reason(self.spec.backend, words[0], last_start)
            return Death.of(f"{self.spec.label}: {told}", rows[0])
        code = self.exit_code
        if code == 1 and first is not None:  # torchrun's own, whatever its only rank died of
            code = first[1]
        return Death(f"{self.spec.label} {self._end_of(0, code) if code is not None else 'fell silent'}")

    def _end_of(self, rank: int, code: int) -> str:
        """Say how a process ended that left no word, and why where its log or its standard error knows."""
        told = native_reason(log_tail(self._stderr_of(rank), 1000)) if self.spec.name == "trainer" else None
        if told is None and code > 0:
            told = exception_of(self._said_since_start(1000))
        return ending(code) + (f": {told}" if told else "")

    def _said_since_start(self, lines: int, most_bytes: int = 64_000) -> str:
        """Return the end of its log, without what an earlier start left there."""
        return _COMMAND_LINE.split(log_tail(self.log_file, lines, most_bytes))[-1]

    def _stderr_of(self, rank: int) -> Path:
        return self.log_dir / f"rank_{rank}.stderr.log"

    def log_excerpt(self) -> str:
        """Return the end of the role's log, and of the standard error of the rank that failed first: native code says
        there why it aborted."""
        words, first = log_tail(self.log_file), self._first_failed_rank()
        of_rank = self._stderr_of(first[0] if first is not None else 0)
        native = log_tail(of_rank, 10) if self.spec.name == "trainer" else ""
        return f"{words}\n--- end of {of_rank} ---\n{native}" if native else words

    def _first_failed_rank(self) -> tuple[int, int] | None:
        """Rank and exit code of torchrun's root cause, which closes its log; that of an earlier start is none."""
        tail = self._said_since_start(60)
        ranks, codes = _TORCHRUN_RANK.findall(tail), _TORCHRUN_EXIT.findall(tail)
        return (int(ranks[-1]), int(codes[-1])) if ranks and codes else None

    def kill(self) -> None:
        """SIGKILL the whole family at once, and what its leader left behind when it died: engines hold their GPUs for
        as long as they live, and the next server would find no memory."""
        if self._process is not None:
            self._killed = list({*family(self.pid), *self._marked()})
            send(self._killed, 9)

    def _marked(self) -> list[psutil.Process]:
        return marked(os.getpid(), MARK, self._mark) if self._mark else []

    def reap(self) -> None:
        """Collect the exit code so that no zombie stays, and wait until what `kill` ended has given everything back."""
        deadline = time.monotonic() + GONE_S
        # one that is about to end shows no environment any more, and still has its GPU
        while alive([*self._killed, *self._marked()]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._process is not None:
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.kill(self._process.pid, 9)


def ending(code: int) -> str:
    """Say how a process ended, by its exit code."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def one_after_another(specs: Sequence[Spec]) -> list[Spec]:
    """Fill in `after` of the specs: the servers that come before in the list and share a GPU.

    vLLM measures how much of a GPU is free at its start and after a trial pass: what another process takes or gives
    back in between makes it end, or gives it too small a KV cache. Once an engine serves, its memory stays as it is.
    """
    ordered: list[Spec] = []
    for spec in specs:
        before = [other.label for other in ordered if other.is_server and spec.held_gpus & other.held_gpus]
        ordered.append(replace(spec, after=tuple(before)))
    return ordered


def known_urls(stated: Urls, roles: Sequence[Role]) -> Urls:
    """Return the URLs of the servers that were told where to listen, in order, after those that are stated; not of
    elastic ones."""
    urls = {name: list(known) for name, known in stated.items()}
    for role in roles:
        if role.is_server and role.url and not role.spec.is_elastic:
            urls.setdefault(role.spec.name, []).append(role.url)
    return urls


def may_start(role: Role, roles: Sequence[Role]) -> bool:
    """Return whether all servers that a waiting role starts after are ready, or are not to come."""
    return all(other.state in ("ready", "done", "away") for other in roles if other.spec.label in role.spec.after)


def end_roles(
    roles: Sequence[Role], grace_s: float, more: Iterable[int] = (), tick: Callable[[], None] | None = None
) -> list[int]:
    """End the processes, steps and stand-ins of roles: politely, then through Slurm, then by signals.

    Args:
        grace_s: from the polite end to the kill.
        more: leaders of other families of this machine that end with them.
        tick: called while steps are waited for.

    Returns:
        ids of the processes of this machine that had to be killed.
    """
    for role in roles:
        role.ask_to_end()
    steps = [role for role in roles if role.has_agents]
    deadline = time.monotonic() + grace_s + 3.0
    while time.monotonic() < deadline and any(role.is_alive for role in steps):
        if tick is not None:
            tick()
        time.sleep(0.1)
    for role in steps:
        role.kill()
    return end_families([*(role.pid for role in roles if role.was_started), *more], grace_s)


def reap_roles(roles: Sequence[Role], others: Iterable[int]) -> list[int]:
    """Collect what has ended, and end what it left behind.
    `others`: families of this process that have nothing to do with them.
    Returns ids of the processes that had to be killed."""
    for role in roles:
        role.reap()
    return end_strays(os.getpid(), others, grace_s=1.0)
