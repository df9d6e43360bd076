"""The agent: one small process on each node of a step, between srun and a role's own processes.

    srun ... python -m prime_hpc.supervisor.agent RUN_DIR LABEL LIFE

It says hello over the doorbell (host, free ports, GPUs), is told what to start, starts it, and ends it with everything
it started: when it is told to, when its supervisor has been silent for `fence_s`, or when a newer life of the run has
begun. So a node that was cut off, or whose batch host died, never works on beside a new life. SIGTERM ends nothing:
Slurm sends it to all processes of the job at once, or (a preemption with grace) to the steps alone, and the supervisor,
who is told of it, may still want a save.
Started by `steps.StepRole`; imports nothing heavy.

Messages, all on the doorbell:
    agent -> hub   "agent"       {label, life, key, event: hello|beat|exited, ...}
    hub -> agents  "go/<label>"  an Order as JSON
    hub -> agents  "end/<label>" {life, grace_s};  "pulse" every few seconds
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from loguru import logger

from prime_hpc.observe.context import LED, RoleContext
from prime_hpc.store.doorbell import Doorbell
from prime_hpc.store.errors import FencedError, StoreError
from prime_hpc.store.layout import RunPaths, check_incarnation
from prime_hpc.supervisor import ports
from prime_hpc.supervisor.caches import node_caches
from prime_hpc.supervisor.devices import visible_gpus
from prime_hpc.supervisor.orphan import give_back
from prime_hpc.supervisor.processes import become_subreaper, die_with_parent, end_families, end_strays

BEAT_S = 2.0
FENCE_LOOK_S = 10.0
TICK_S = 0.1
NUM_PORTS = 4
FENCE = "PRIMEHPC_FENCE_S"
HELLO_AGAIN_S = 5.0
EXIT_FENCED = 76
"""The agent ended its role because nobody led it any more."""


@dataclass(frozen=True)
class Order:
    """What the agents of one step are to start. `{node_rank}`, `{local_rank}` and `{rank}` are put in by each."""

    life: int
    nodes: list[str]
    """Hosts in rank order."""
    commands: list[list[str]]
    """One for all nodes, or one a node."""
    environment: dict[str, str] = field(default_factory=dict)
    tasks_per_node: int = 1
    gpus: list[int] | None = None
    """Positions among the node's GPUs; None: hide them all. With several tasks a node each takes its share."""
    grace_s: float = 5.0


class Output:
    """The role's output and the agent's own, on its way to srun.

    A step may outlive its srun, which gets Slurm's SIGTERM too: from then on everything goes to a file, and nobody dies
    of a broken pipe in the middle of a save.
    """

    def __init__(self, fallback: Path) -> None:
        self._fallback = fallback
        self._descriptor = 1
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """One line of the agent's own."""
        self.write((text + "\n").encode())

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
                self._descriptor = os.open(self._fallback, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
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

    def __init__(self, run_dir: Path, label: str, life: int, environ: dict[str, str]) -> None:
        self._label, self._life = label, life
        self._environ = environ
        self._context = RoleContext.from_env("agent", run_dir, environ=environ)
        self._paths = RunPaths(run_dir)
        self._fence_s = float(environ.get(FENCE, "60"))
        self._host = environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._local = int(environ.get("SLURM_LOCALID", "0"))
        self._inbox: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self._told_to_end = False
        self._warned = False
        self._newer_life = False
        self._is_led_by_nobody = False
        self._child: subprocess.Popen[bytes] | None = None
        self._forwarding: threading.Thread | None = None
        role = label.split("[")[0]
        log_dir = self._paths.logs(self._context.attempt, role)
        self._output = Output(log_dir / f"{label}_{self._host}_{self._local}.log")
        self._heard_at = time.monotonic()
        self._next_beat = self._next_hello = self._next_fence_look = 0.0
        self._grace_s = 5.0
        self._bell = Doorbell(self._context.doorbell_address, f"agent-{label}", incarnation=self._context.incarnation)
        for topic in (f"go/{label}", f"end/{label}", "pulse"):
            self._bell.subscribe(topic, lambda message, topic=topic: self._inbox.put((topic, message)))  # type: ignore[misc]

    def run(self) -> int:
        """Live until the role's process ends or must end; returns the agent's exit code."""
        become_subreaper()
        signal.signal(signal.SIGTERM, self._on_warning)
        signal.signal(signal.SIGINT, self._on_signal)
        code = 1
        try:
            while True:
                ending = self._why_end()
                if ending is not None:
                    code = self._end(*ending)
                    break
                if self._child is not None and self._child.poll() is not None:
                    code = self._child.returncode
                    break
                self._talk()
                self._read()
        finally:
            end_strays(os.getpid(), [], grace_s=1.0)
            if self._forwarding is not None:
                self._forwarding.join(timeout=2.0)
            self._say("exited", code=code)
            if self._is_led_by_nobody or (code and self._is_not_heard()):
                give_back(self._paths.root, self._environ, self._host, self._is_led_again, self._output.say)
            self._bell.close()
        return code if 0 <= code < 256 else 128 - code

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._told_to_end = True

    def _on_warning(self, _number: int, _frame: FrameType | None) -> None:
        self._warned = True

    def _say(self, event: str, **facts: Any) -> None:
        key = f"{self._host}/{self._local}"
        self._bell.ring("agent", label=self._label, life=self._life, key=key, host=self._host, event=event, **facts)

    def _talk(self) -> None:
        """Hello until there is an order, then a beat now and then."""
        if self._warned:
            self._warned = False
            self._say("warned")
        now = time.monotonic()
        if self._child is None and now >= self._next_hello:
            self._next_hello = now + HELLO_AGAIN_S
            self._say("hello", **self._facts())
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._say("beat")

    def _facts(self) -> dict[str, Any]:
        base = ports.run_base(self._paths.root, self._environ.get("SLURM_JOB_ID"))
        return {
            "address": socket.gethostname(),
            "ports": ports.choose(NUM_PORTS, base + NUM_PORTS * self._local, "0.0.0.0"),
            "gpus": visible_gpus(self._environ),
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
        self._heard_at = time.monotonic()
        if topic.startswith("go/") and message["life"] > self._life:
            self._newer_life = True
        elif topic.startswith("go/") and message["life"] == self._life and self._child is None:
            self._start(Order(**message))
        elif topic.startswith("end/") and message.get("life") == self._life:
            self._grace_s = float(message.get("grace_s", self._grace_s))
            self._told_to_end = True

    def _start(self, order: Order) -> None:
        self._grace_s = order.grace_s
        node_rank = order.nodes.index(self._host)
        rank = node_rank * order.tasks_per_node + self._local
        facts = {"node_rank": str(node_rank), "local_rank": str(self._local), "rank": str(rank)}
        template = order.commands[node_rank if len(order.commands) > 1 else 0]
        command = [_fill(token, facts) for token in template]
        environment = {**self._environ, **node_caches(self._environ)}
        environment |= {k: _fill(v, facts) for k, v in order.environment.items()}
        environment[LED] = "1"
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._own_gpus(order))
        self._output.say(f"[{self._host}] $ {' '.join(command)}")
        reader, writer = os.pipe()
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            env=environment,
            start_new_session=True,
            preexec_fn=_in_child,
        )
        os.close(writer)
        self._forwarding = self._output.forward(reader)
        self._say("started", child=self._child.pid)

    def _own_gpus(self, order: Order) -> list[str]:
        visible = visible_gpus(self._environ)
        if order.gpus is None:
            return []
        own = [visible[i] for i in order.gpus if i < len(visible)]
        share = len(own) // order.tasks_per_node
        return own if order.tasks_per_node == 1 else own[self._local * share : (self._local + 1) * share]

    def _why_end(self) -> tuple[str, int] | None:
        """Reason and exit code, once the role must end."""
        if self._told_to_end:
            return "told to end", 0
        if self._newer_life:
            return "this step was started again elsewhere", EXIT_FENCED
        now = time.monotonic()
        if now - self._heard_at > self._fence_s:
            self._is_led_by_nobody = True
            return f"no sign of the supervisor for {self._fence_s:.0f} s", EXIT_FENCED
        if now >= self._next_fence_look:
            self._next_fence_look = now + min(FENCE_LOOK_S, self._fence_s / 4)
            try:
                check_incarnation(self._paths, self._context.incarnation)
            except FencedError as error:
                return str(error), EXIT_FENCED
            except StoreError as error:  # the file system does not answer: the pulse still decides
                self._output.say(f"[{self._host}] agent: {error}")
        return None

    def _is_not_heard(self) -> bool:
        """After a role that failed, as one does whose batch host died: whether there is no supervisor to hear of it."""
        if "SLURM_JOB_ID" not in self._environ:
            return False
        self._is_led_again()  # what was heard before counts no longer
        while not self._is_led_again():
            if time.monotonic() - self._heard_at > self._fence_s:
                return True
            time.sleep(TICK_S)
        return False

    def _is_led_again(self) -> bool:
        """After its role's end: whether there is a supervisor after all, or somebody ends this agent."""
        topics = [self._inbox.get_nowait()[0] for _ in range(self._inbox.qsize())]
        return self._told_to_end or "pulse" in topics

    def _end(self, why: str, code: int) -> int:
        self._output.say(f"[{self._host}] agent of {self._label}: {why}")
        if self._child is not None and self._child.poll() is None:
            killed = end_families([self._child.pid], self._grace_s, signal.SIGINT)
            if killed:
                self._output.say(f"[{self._host}] agent of {self._label}: had to kill {len(killed)} processes")
            self._child.wait(timeout=10)
        return code


def _in_child() -> None:
    """Between fork and exec: dies with the agent, and is deaf to Slurm's SIGTERM until it has a handler of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent()


def _fill(text: str, facts: dict[str, str]) -> str:
    for name, value in facts.items():
        text = text.replace("{" + name + "}", value)
    return text


def order_message(order: Order) -> dict[str, Any]:
    """The payload of `go/<label>`."""
    return asdict(order)


def main() -> None:
    """Entry point of every task of a step."""
    if len(sys.argv) != 4:
        print("usage: python -m prime_hpc.supervisor.agent RUN_DIR LABEL LIFE", file=sys.stderr)
        sys.exit(2)
    run_dir, label, life = sys.argv[1:]
    logger.remove()  # what matters is said over the doorbell and through `Output`
    sys.exit(Agent(Path(run_dir), label, int(life), dict(os.environ)).run())


if __name__ == "__main__":
    main()
