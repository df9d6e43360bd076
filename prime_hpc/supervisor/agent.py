"""The agent: one small process on each node of a step, between srun (or a pod) and a role's own processes.

    srun ... python -m prime_hpc.supervisor.agent RUN_DIR LABEL START_NUMBER

It says hello over the bus (host, free ports, GPUs), is told what to start, starts it, and ends it with everything
it started: when it is told to, when its supervisor has been silent for `fence_s`, or when a newer attempt of the run
has begun. So a node that was cut off, or whose batch host died, never works on beside a new attempt. SIGTERM and
SIGUSR1 end nothing: Slurm sends them to all processes of the job at once, or (a preemption with grace, `scancel -s
USR1`) to the steps alone, and the supervisor, who is told of it, may still want a save.

    thread "voice"     beats, hears, counts the supervisor's silence; touches no file, so that a file system that
                       hangs on this node (or on all) is no death; stopped processes count nothing
    thread "fence"     looks for a newer attempt; a look that hangs is none
    main thread        starts the role, waits for it, ends it, may hang with the file system
    thread "gpus"      of a node's first agent whose role has GPUs: samples their use now and then
    threads "output"   hand on what the role prints; "say" what the agent itself has to say

Started by `roles.slurm_step.StepRole`; imports nothing heavy.

Messages, all on the bus:
    agent -> hub   "agent"       {label, start_number, key, event: hello|started|beat|adopted|
                                looked|gpus|warned|replaced|exited, ...}
    hub -> agents  "launch/<label>"  a LaunchOrder as JSON
    hub -> agents  "end/<label>" {start_number, grace_s};  "pulse" every few seconds;
                   "adopt/<label>" {start_number, incarnation}: the run's next attempt takes this server over;
                   "look" {asked}: why does the step stand still?
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from loguru import logger

from prime_hpc.config.errors import ConfigError
from prime_hpc.runtime import activity
from prime_hpc.runtime.clock import STOPPED_S, AwakeClock
from prime_hpc.runtime.gpus import stated_devices, visible_gpus
from prime_hpc.runtime.host_memory import RecentOomKills
from prime_hpc.runtime.limits import lift_limits
from prime_hpc.runtime.process_tree import become_subreaper, end_families, end_strays
from prime_hpc.runtime.role_context import LED, LOCAL_TASK, NODE, NODE_PORTS, RoleContext
from prime_hpc.runtime.slurm_warning import WARNINGS
from prime_hpc.runtime.tied_process import tied
from prime_hpc.slurm.gpu_split import gpu_environment
from prime_hpc.store.errors import FencedError, StoreError
from prime_hpc.store.messaging.bus import BusClient
from prime_hpc.store.messaging.network import ENGINES_PORT, NUM_ENGINE_PORTS, SERVER_PORTS, Network, network_environment
from prime_hpc.store.messaging.sockets import ALL
from prime_hpc.store.run_paths import RunPaths, check_incarnation
from prime_hpc.supervisor.attempt.lost_batch_host import requeue_orphaned_job
from prime_hpc.supervisor.gpu_watch import EVENT, sample_forever
from prime_hpc.supervisor.roles import ports
from prime_hpc.supervisor.roles.caches import node_caches
from prime_hpc.supervisor.stalls.collect import LOOK_TOPIC, look_here, shortened

BEAT_S = 2.0
FENCE_LOOK_S = 10.0
TICK_S = 0.1
PORTS = {"trainer": 1, "orchestrator": 0}
"""Ports that the first agent of each node finds for its role; for others, a server's."""
FENCE = "PRIMEHPC_FENCE_S"
HELLO_AGAIN_S = 5.0
FLUSH_TIMEOUT_S = 2.0
MOST_FAILURES = 3
"""So often in a row a process that can be replaced is started again; then its end is the role's."""
STEADY_S = 60.0
"""A process that ran for so long had started well."""
REPLACE_PAUSE_S = 1.0
EXIT_MISUSED = 2
"""Of a process that cannot do what its command line says: another start changes nothing."""
EXIT_FENCED = 76
"""The agent ended its role because nobody led it any more."""


@dataclass(frozen=True)
class LaunchOrder:
    """Commands that the agents of one step are to start. `{node_rank}`, `{local_rank}`, `{rank}` and `{python}` are
    put in by each."""

    start_number: int
    nodes: list[str]
    """Hosts in rank order."""
    commands: list[list[str]]
    """One for all nodes, or one a node."""
    environment: dict[str, str] = field(default_factory=dict)
    tasks_per_node: int = 1
    gpus: list[int] | None = None
    """Positions among the node's GPUs; None: hide them all. With several tasks a node each takes its share."""
    grace_s: float = 5.0
    replaced: list[int] = field(default_factory=list)
    """Positions in `nodes` whose process can be started again without the others': where a signal or an error of its
    own ends it, its agent does so."""


class Output:
    """The role's output and the agent's own, on its way to srun.

    A step may outlive its srun, which gets Slurm's SIGTERM too: from then on everything goes to a file, and nobody dies
    of a broken pipe in the middle of a save.
    """

    def __init__(self, fallback: Path) -> None:
        self._fallback = fallback
        self._descriptor = 1
        self._lock = threading.Lock()
        self._words: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._speaker = threading.Thread(target=self._speak, name="say", daemon=True)
        self._speaker.start()

    def write_line(self, text: str) -> None:
        """One line of the agent's own. Never blocks: srun may wait for the file system."""
        self._words.put((text + "\n").encode())

    def close(self) -> None:
        """Give what was said a moment to be written."""
        self._words.put(None)
        self._speaker.join(timeout=FLUSH_TIMEOUT_S)

    def _speak(self) -> None:
        while (words := self._words.get()) is not None:
            self.write(words)

    def write(self, data: bytes) -> None:
        """Never raises: what cannot be written anywhere is lost."""
        with self._lock, contextlib.suppress(OSError):
            try:
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError:
                if self._descriptor != 1:
                    raise
                self._fallback.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._fallback, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                os.write(self._descriptor, data)

    def forward(self, source: int) -> threading.Thread:
        """Copy a pipe until its end, in a thread of its own."""

        def run() -> None:
            while data := os.read(source, 1 << 16):
                self.write(data)
            os.close(source)

        thread = threading.Thread(target=run, name="output", daemon=True)
        thread.start()
        return thread


class Agent:
    """One node's (or one rank's) part of a step."""

    def __init__(self, run_dir: Path, label: str, start_number: int, environ: dict[str, str]) -> None:
        self._label, self._start_number = label, start_number
        self._environ = environ
        self._context = RoleContext.from_env("agent", run_dir, environ=environ)
        self._incarnation = self._context.incarnation
        """Of the newest attempt that it belongs to: a server may outlive its own."""
        self._paths = RunPaths(run_dir)
        self._fence_s = float(environ.get(FENCE, "60"))
        self._reached_at = environ.get(NODE) or socket.gethostname()
        self._host = environ.get("SLURMD_NODENAME") or self._reached_at
        self._local = int(environ.get(LOCAL_TASK) or environ.get("SLURM_LOCALID", "0"))
        self._inbox: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[LaunchOrder] = queue.SimpleQueue()
        self._told_to_end = False
        self._warnings: list[int] = []
        self._has_newer_start = False
        self._has_lost_supervisor = False
        self._fenced: str | None = None
        self._has_order = False
        self._order: LaunchOrder | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._child_since, self._failures = 0.0, 0
        self._forwarding: threading.Thread | None = None
        role = label.split("[")[0]
        log_dir = self._paths.logs(self._context.attempt, role)
        self._network = Network.from_env(environ)
        self._reach: dict[str, Any] | None = None
        self._num_ports = int(environ.get(NODE_PORTS) or PORTS.get(role, SERVER_PORTS)) if self._local == 0 else 0
        if role not in PORTS and self._network.ports is not None:
            self._num_ports += NUM_ENGINE_PORTS
        self._output = Output(log_dir / f"{label}_{self._host}_{self._local}.log")
        self._clock = AwakeClock()
        self._last_message_at = self._clock.now()
        self._num_pulses = 0
        self._samples_gpus = False
        self._next_beat = self._next_hello = 0.0
        self._grace_s = 5.0
        self._oom_kills = RecentOomKills(self._clock.now)
        self._over = threading.Event()
        self._bus = BusClient(self._context.bus_address, f"agent-{label}", incarnation=self._context.incarnation)
        for topic in (f"launch/{label}", f"end/{label}", f"adopt/{label}", "pulse", LOOK_TOPIC):
            self._bus.subscribe(topic, lambda message, topic=topic: self._inbox.put((topic, message)))  # type: ignore[misc]

    def run(self) -> int:
        """Live until the role's process ends or must end; returns the agent's exit code."""
        become_subreaper()
        activity.introduce("agent", self._local, self._paths.root, label=self._label)
        for number in WARNINGS:
            signal.signal(number, self._on_warning)
        signal.signal(signal.SIGINT, self._on_signal)
        for name, target in (("voice", self._exchange_messages), ("fence", self._look_for_newer_attempt)):
            threading.Thread(target=target, name=name, daemon=True).start()
        code, problem = 1, None
        try:
            self._reach = self._find_reach()
            while True:
                ending = self._end_reason()
                if ending is not None:
                    code = self._end(*ending)
                    break
                if self._child is not None and self._child.poll() is not None:
                    code = self._child.returncode
                    if self._can_be_replaced(code):
                        self._replace(code)
                        continue
                    break
                self._oom_kills.look()
                with contextlib.suppress(queue.Empty):
                    self._start(self._orders.get(timeout=TICK_S))
        except ConfigError as error:  # no free port, not in a network that the config names, too few GPUs
            code, problem = 2, str(error)
            self._output.write_line(f"[{self._host}] agent of {self._label}: {error}")
        finally:
            end_strays(os.getpid(), [], grace_s=1.0)
            if self._forwarding is not None:
                self._forwarding.join(timeout=2.0)
            self._say("exited", code=code, problem=problem, oom_kills=self._oom_kills.count())
            if not self._is_superseded() and (self._has_lost_supervisor or self._is_orphaned()):
                say, now = self._output.write_line, self._clock.now
                requeue_orphaned_job(self._paths.root, self._environ, self._host, self._supervision_check(), say, now)
            self._over.set()
            self._bus.close()
            self._output.close()
        return code if 0 <= code < 256 else 128 - code

    def _find_reach(self) -> dict[str, Any]:
        """Find where others reach this node's part: addresses, and ports that are reserved until this agent ends.
        Raises ConfigError: no port is free, or this node is not in a network that the config names."""
        serving, collectives = self._network.place("serving"), self._network.place("collectives")
        within = self._network.ports or ports.BUILT_IN
        base = ports.run_base(self._paths.root, self._environ.get("SLURM_JOB_ID"), within)
        return {
            "address": serving.address if serving is not None else self._reached_at,
            "collectives": collectives.address if collectives is not None else self._reached_at,
            "ports": ports.choose(self._num_ports, base, ALL, within),
        }

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._told_to_end = True

    def _on_warning(self, number: int, _frame: FrameType | None) -> None:
        self._warnings.append(number)

    def _say(self, event: str, **facts: Any) -> None:
        key = f"{self._host}/{self._local}"
        self._bus.publish(
            "agent", label=self._label, start_number=self._start_number, key=key, host=self._host, event=event, **facts
        )

    # ---- the thread "voice": nothing here may touch a file

    def _exchange_messages(self) -> None:
        missed = self._clock.missed()
        while not self._over.is_set():
            self._talk()
            self._read()
            stopped, missed = self._clock.missed() - missed, self._clock.missed()
            if stopped > STOPPED_S:  # as the supervisor may be still: its silence begins anew
                self._last_message_at = self._clock.now()
            if self._clock.now() - self._last_message_at > self._fence_s:
                self._has_lost_supervisor = True

    def _talk(self) -> None:
        """Hello until there is an order, then a beat now and then."""
        while self._warnings:
            self._say("warned", signal=self._warnings.pop(0))
        now = self._clock.now()
        if self._reach is not None and not self._has_order and now >= self._next_hello:
            self._next_hello = now + HELLO_AGAIN_S
            self._say("hello", **self._reach, **self._facts())
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._say("beat")

    def _facts(self) -> dict[str, Any]:
        return {
            "step": self._environ.get("SLURM_STEP_ID"),
            "job_id": self._environ.get("SLURM_JOB_ID"),
            "pid": os.getpid(),
            "time": time.time(),
        }

    def _read(self) -> None:
        """Handle what came, sleeping a tick at most."""
        try:
            topic, message = self._inbox.get(timeout=TICK_S)
        except queue.Empty:
            return
        self._last_message_at = self._clock.now()
        if topic == "pulse":
            self._num_pulses += 1
        elif topic == LOOK_TOPIC:
            threading.Thread(target=self._look, args=(message.get("asked"),), name="look", daemon=True).start()
        elif topic.startswith("launch/") and message["start_number"] > self._start_number:
            self._has_newer_start = True
        elif topic.startswith("launch/") and message["start_number"] == self._start_number and not self._has_order:
            self._has_order = True
            self._orders.put(LaunchOrder(**message))
        elif topic.startswith("adopt/") and message.get("start_number") == self._start_number:
            self._incarnation = int(message["incarnation"])
            self._say("adopted", incarnation=self._incarnation)
        elif topic.startswith("end/") and message.get("start_number") == self._start_number:
            self._grace_s = float(message.get("grace_s", self._grace_s))
            self._told_to_end = True

    def _look(self, asked: Any) -> None:
        """Say what is seen of this node's part: the supervisor asks why a step stands still."""
        seen = shortened(look_here(self._paths.root, pids=[os.getpid()]))
        self._say("looked", asked=asked, seen=seen)

    # ---- the thread "fence"

    def _look_for_newer_attempt(self) -> None:
        look_s = min(FENCE_LOOK_S, self._fence_s / 4)
        while self._fenced is None and not self._over.wait(look_s):
            own = self._incarnation
            try:
                check_incarnation(self._paths, own)
            except FencedError as error:
                if own == self._incarnation:  # it was not adopted while it looked
                    self._fenced = str(error)
            except (StoreError, OSError) as error:  # the file system does not answer: the pulse still decides
                self._output.write_line(f"[{self._host}] agent: {error}")

    # ---- the main thread

    def _can_be_replaced(self, code: int) -> bool:
        """Return whether the role's process, which ended, is to be started again without those of other nodes."""
        order = self._order
        if order is None or code in (0, EXIT_MISUSED) or order.nodes.index(self._host) not in order.replaced:
            return False
        ran_s = self._clock.now() - self._child_since
        self._failures = 1 if ran_s > STEADY_S else self._failures + 1
        return self._failures <= MOST_FAILURES

    def _replace(self, code: int) -> None:
        """Start the role's process again, once nothing of the one that ended is left."""
        assert self._order is not None
        end_strays(os.getpid(), [], grace_s=1.0)
        if self._forwarding is not None:
            self._forwarding.join(timeout=FLUSH_TIMEOUT_S)
        self._say("replaced", code=code)
        time.sleep(REPLACE_PAUSE_S)
        self._start(self._order)

    def _start(self, order: LaunchOrder) -> None:
        self._order, self._child_since = order, self._clock.now()
        self._grace_s = order.grace_s
        node_rank = order.nodes.index(self._host)
        rank = node_rank * order.tasks_per_node + self._local
        facts = {
            "node_rank": str(node_rank),
            "local_rank": str(self._local),
            "rank": str(rank),
            "python": sys.executable,
        }
        template = order.commands[node_rank if len(order.commands) > 1 else 0]
        command = [_fill(token, facts) for token in template]
        environment = {**self._environ, **node_caches(self._environ)}
        environment |= {k: _fill(v, facts) for k, v in order.environment.items()}
        environment |= network_environment(self._network, environment, order.nodes, self._host)
        if len(own := (self._reach or {})["ports"]) > SERVER_PORTS:
            environment[ENGINES_PORT] = str(own[SERVER_PORTS])
        environment[LED] = "1"
        trains = self._label.split("[")[0] == "trainer"
        environment |= gpu_environment(self._task_gpus(order), environment, trains=trains)
        self._output.write_line(f"[{self._host}] $ {' '.join(command)}")
        # deaf to Slurm's signals until it has handlers of its own
        try:
            command = tied(command, environment, deaf_to=WARNINGS)
        except OSError as error:  # an interpreter of the servers' own, which this node does not have
            can = "is no program here" if isinstance(error, PermissionError) else "is not here"
            raise ConfigError(f"node {self._host} cannot start {self._label}: {command[0]} {can}") from error
        reader, writer = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, WARNINGS)
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            env=environment,
            start_new_session=True,
        )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WARNINGS)
        os.close(writer)
        self._forwarding = self._output.forward(reader)
        activity.doing("leading its role")
        if order.gpus and self._local == 0 and not self._samples_gpus:
            self._samples_gpus = True
            args = lambda gpus: self._say(EVENT, gpus=gpus), self._over, lambda: stated_devices(self._environ)
            threading.Thread(target=sample_forever, args=args, name="gpus", daemon=True).start()
        self._say("started", child=self._child.pid)

    def _task_gpus(self, order: LaunchOrder) -> list[str]:
        """GPUs of this task, as CUDA_VISIBLE_DEVICES takes them; [] on the CPU.
        Raises ConfigError: the node shows fewer than the plan gives this role."""
        if order.gpus is None:
            return []
        visible = visible_gpus(self._environ)
        if not all(i < len(visible) for i in order.gpus):
            named = self._environ.get("CUDA_VISIBLE_DEVICES")
            source = "nvidia-smi and /dev list" if named is None else f"CUDA_VISIBLE_DEVICES = {named!r} names"
            raise ConfigError(
                f"node {self._host} has too few GPUs for {self._label}: it is to use those at positions "
                f"{', '.join(map(str, order.gpus))}, but {source} {len(visible)}; ask for as many as are used "
                "(slurm.gpus_per_node), or exclude the node (slurm.exclude)"
            )
        own = [visible[i] for i in order.gpus]
        share = len(own) // order.tasks_per_node
        return own if order.tasks_per_node == 1 else own[self._local * share : (self._local + 1) * share]

    def _end_reason(self) -> tuple[str, int] | None:
        """Reason and exit code, once the role must end."""
        if self._told_to_end:
            return "told to end", 0
        if self._has_newer_start:
            return "this step was started again elsewhere", EXIT_FENCED
        if self._has_lost_supervisor:
            return f"no sign of the supervisor for {self._fence_s:.0f} s", EXIT_FENCED
        return None if self._fenced is None else (self._fenced, EXIT_FENCED)

    def _is_superseded(self) -> bool:
        """Return whether somebody leads: the supervisor, or a newer attempt, whose job this one must not
        come back beside."""
        return self._told_to_end or self._has_newer_start or self._fenced is not None

    def _is_orphaned(self) -> bool:
        """After its role's end: whether there is no supervisor to hear of it, as when the batch host died."""
        if "SLURM_JOB_ID" not in self._environ:
            return False
        is_supervised, began = self._supervision_check(), self._clock.now()  # what was heard before counts no longer
        while not is_supervised():
            if self._clock.now() - max(began, self._last_message_at) > self._fence_s:
                return True
            time.sleep(TICK_S)
        return False

    def _supervision_check(self) -> Callable[[], bool]:
        """Return whether, from now on, there is a supervisor after all, or somebody ends this agent."""
        before = self._num_pulses
        return lambda: self._is_superseded() or self._num_pulses > before

    def _end(self, why: str, code: int) -> int:
        self._output.write_line(f"[{self._host}] agent of {self._label}: {why}")
        if self._child is not None and self._child.poll() is None:
            killed = end_families([self._child.pid], self._grace_s, signal.SIGINT)
            if killed:
                self._output.write_line(f"[{self._host}] agent of {self._label}: had to kill {len(killed)} processes")
            self._child.wait(timeout=10)
        return code


def _fill(text: str, facts: dict[str, str]) -> str:
    for name, value in facts.items():
        text = text.replace("{" + name + "}", value)
    return text


def main() -> None:
    """Entry point of every task of a step."""
    if len(sys.argv) != 4:
        print("usage: python -m prime_hpc.supervisor.agent RUN_DIR LABEL START_NUMBER", file=sys.stderr)
        sys.exit(2)
    run_dir, label, start_number = sys.argv[1:]
    logger.remove()  # what matters is said over the bus and through `Output`
    lift_limits()
    sys.exit(Agent(Path(run_dir), label, int(start_number), dict(os.environ)).run())


if __name__ == "__main__":
    main()
