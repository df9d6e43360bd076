"""The process of a pod that serves a run: starts the agents that the supervisor asks for, as slurmd does for srun.

    python -m prime_hpc.kubernetes.pod

Messages over one connection each, after both ends have proved to know the run's key:

    supervisor -> pod   {"what": "hello"}                          -> {"ready": true}
                        {"what": "start", "label", "incarnation", "tasks", "arguments", "environment_file"}
                                                                   -> {"out": text} ..., {"code": n}
                        {"what": "end"} on the same connection     ends what it started
                        {"what": "over"}                           -> {"over": true}; the pod's container is complete

Agents of an older incarnation, and earlier ones of the same label, are ended before new ones start. An agent whose
supervisor has gone ends itself (`slurm.restart.fence_s`). SIGTERM, by which Kubernetes announces that the pod goes, is
handed to the agents, who tell the supervisor: it saves. The exit code is then 143, so that the Job makes the pod again.

Exit codes: 0 the run is over, or no supervisor came for `PRIMEHPC_POD_IDLE_S`; 2 no key; 143 told to go.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from prime_hpc.config.errors import ConfigError
from prime_hpc.kubernetes.connection import ADDRESS, PORT, PURPOSE, messages, read_key, say
from prime_hpc.runtime.role_context import LOCAL_TASK, NODE
from prime_hpc.store.messaging.auth import MAX_UNPROVEN, check

IDLE = "PRIMEHPC_POD_IDLE_S"
IDLE_S = 3600.0
GRACE_S = 10.0
"""From SIGINT to SIGKILL of an agent that stands in the way of a new one."""
READ_S = 60.0
"""So long a file that the supervisor has just written may take to be seen here."""
OWN = (NODE, ADDRESS, "HOSTNAME", "NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables of a pod that those of the supervisor's do not replace."""
EXIT_TOLD = 143
SUPERSEDED = {"out": "a newer attempt of this run has begun in this pod\n", "code": 76}
"""Answer to a start that comes, or is ready, too late."""


@dataclass
class Started:
    """The agents of one start of one role."""

    label: str
    incarnation: int
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while they are started: one that is to end meanwhile is known by then, or never starts."""
    is_ended: bool = False

    def signal(self, number: int) -> None:
        """Send a signal to those that live."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def end(self, grace_s: float = GRACE_S) -> None:
        """End them, with all they started: politely, then at once. Those not started yet never are."""
        with self.lock:
            self.is_ended = True
        self.signal(signal.SIGINT)
        deadline = time.monotonic() + grace_s
        for process in self.processes:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()  # what it started dies with it (PR_SET_PDEATHSIG)
                process.wait()


class Pod:
    """The agents of this pod. One thread a connection."""

    def __init__(self, key: str, environ: Mapping[str, str]) -> None:
        self._key = key
        self._environ = dict(environ)
        self._started: list[Started] = []
        self._newest = 0
        """Incarnation of the newest attempt that started anything here."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._told_to_go = False
        self._unproven = threading.BoundedSemaphore(MAX_UNPROVEN)
        self._last_message_at = time.monotonic()

    def serve(self, listener: socket.socket, idle_s: float) -> int:
        """Answer until the run is over, nobody came for `idle_s`, or the pod is told to go. Returns the exit code."""
        signal.signal(signal.SIGTERM, self._on_term)
        listener.settimeout(0.5)
        while not self._over.is_set():
            if self._told_to_go and not self._is_busy():
                return EXIT_TOLD
            if not self._is_busy() and time.monotonic() - self._last_message_at > idle_s:
                print(f"no supervisor has come for {idle_s:.0f} s: the pod's GPUs are given back", flush=True)
                return 0
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
        for started in self._all():
            started.end()
        return 0

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        self._told_to_go = True
        for started in list(self._started):
            started.signal(signal.SIGTERM)

    def _all(self) -> list[Started]:
        with self._lock:
            return list(self._started)

    def _is_busy(self) -> bool:
        return any(process.poll() is None for started in self._all() for process in started.processes)

    def _answer(self, connection: socket.socket) -> None:
        """One connection, from the proof to its end."""
        with connection, contextlib.suppress(OSError, ValueError, KeyError):
            if not self._unproven.acquire(blocking=False):
                return
            try:
                check(connection, self._key, PURPOSE)
            finally:
                self._unproven.release()
            connection.settimeout(None)
            self._last_message_at = time.monotonic()
            incoming = messages(connection)
            first = next(incoming, {})
            if first.get("what") == "hello":
                say(connection, {"ready": True})
            elif first.get("what") == "over":
                say(connection, {"over": True})
                self._over.set()
            elif first.get("what") == "start":
                self._run(connection, first, incoming)
                connection.shutdown(socket.SHUT_RDWR)  # the thread that hears an end still reads from it

    def _forget(self, started: Started) -> None:
        with self._lock:
            self._started = [other for other in self._started if other is not started]

    def _run(self, connection: socket.socket, order: dict[str, Any], incoming: Any) -> None:
        started = Started(str(order["label"]), int(order["incarnation"]))
        with self._lock:
            is_late = started.incarnation < self._newest
            self._newest = max(self._newest, started.incarnation)
            known = self._started
            if not is_late:
                self._started = [*known, started]
        if is_late:
            say(connection, SUPERSEDED)
            return
        for other in known:
            if other.incarnation < started.incarnation or other.label == started.label:
                other.end()
        try:
            sent = _read_environment(Path(order["environment_file"]))
        except (OSError, ValueError) as error:
            self._forget(started)
            say(connection, {"out": f"{order['environment_file']} cannot be read in this pod: {error}\n", "code": 74})
            return
        own = {name: self._environ[name] for name in OWN if name in self._environ}
        base = {**self._environ, **{k: v for k, v in sent.items() if k not in OWN}, **own}
        lock = threading.Lock()
        readers = []
        with started.lock:
            # the environment may have been awaited until a newer start ended this one
            for task in range(0 if started.is_ended else int(order["tasks"])):
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", *map(str, order["arguments"])],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    env={**base, LOCAL_TASK: str(task)},
                    start_new_session=True,
                )
                started.processes.append(process)
                reader = threading.Thread(target=_hand_on, args=(process, connection, lock), daemon=True)
                reader.start()
                readers.append(reader)
        if not started.processes:
            self._forget(started)
            say(connection, SUPERSEDED)
            return
        threading.Thread(target=_wait_for_end, args=(incoming, started), daemon=True).start()
        codes = [process.wait() for process in started.processes]
        for reader in readers:
            reader.join(timeout=5.0)
        self._forget(started)
        with lock:
            say(connection, {"code": next((code for code in codes if code), 0)})


def _read_environment(path: Path) -> dict[str, str]:
    """Read what the supervisor wrote for its agents. Raises OSError, ValueError."""
    deadline = time.monotonic() + READ_S
    while path.name not in {found.name for found in path.parent.iterdir()} and time.monotonic() < deadline:
        time.sleep(0.2)  # listed, never looked up too early: an NFS client remembers the miss
    content = json.loads(path.read_text(encoding="utf-8"))
    return {str(name): str(value) for name, value in content.items()}


def _hand_on(process: "subprocess.Popen[bytes]", connection: socket.socket, lock: threading.Lock) -> None:
    """Send a process's output to the supervisor, and show it as the pod's own where the supervisor has gone."""
    assert process.stdout is not None
    is_heard = True
    while data := os.read(process.stdout.fileno(), 1 << 16):
        text = data.decode(errors="replace")
        try:
            if is_heard:
                with lock:
                    say(connection, {"out": text})
        except OSError:
            is_heard = False
        if not is_heard:
            sys.stdout.write(text)
            sys.stdout.flush()


def _wait_for_end(incoming: Any, started: Started) -> None:
    """End what was started once the supervisor says so; its silence says nothing."""
    with contextlib.suppress(OSError, ValueError):
        for message in incoming:
            if message.get("what") == "end":
                started.end()
                return


def main() -> None:
    """Entry point of a pod."""
    try:
        pod = Pod(read_key(), os.environ)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    address = os.environ.get(ADDRESS, "")
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, PORT), family=family, backlog=64)
    print(f"pod {os.environ.get(NODE, socket.gethostname())} waits for its supervisor", flush=True)
    sys.exit(pod.serve(listener, float(os.environ.get(IDLE, IDLE_S))))


if __name__ == "__main__":
    main()
