"""`python -m prime_hpc.envs.workers.host --fd N`: starts and ends the workers of the orchestrator that has started it;
with `--listen HOST:PORT` those of any that proves to know the key in `$PRIMEHPC_ENV_SERVER_KEY`, until it is ended.

It imports verifiers and everything else that episodes need once (seconds), then forks: a worker is there in
milliseconds, and shares the memory of the imports. An environment's own code runs in the workers alone. It has no
thread and no event loop, so a fork is safe; it waits for the orchestrator's orders and for the workers' ends:

    orchestrator -> host  {"op": "start", "worker": K, "label": ..., "log": PATH, "memory": BYTES, "loads": what it will
                          (`Fleet`)} and a descriptor,
                          {"op": "kill", "worker": K, "why": ...}
    host -> orchestrator  {"op": "gone", "worker": K, "code": exit code or -signal, "episode": id or 0, "why": ...}

Over a network each worker has a connection of its own, which begins with the order `start` (with the `session` of the
control connection, which began with `control`) and the answer `started`. Where the orchestrator is gone, so are its
workers, and the host that it started, within moments: the sockets end.
"""

import argparse
import contextlib
import mmap
import os
import selectors
import signal
import socket
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prime_hpc.config.sections.orchestrator import EnvServersConfig
from prime_hpc.envs.workers.episode_mark import read_mark
from prime_hpc.envs.workers.frames import PURPOSE, Unpacker, pack
from prime_hpc.envs.workers.host_link import ONE_THREAD
from prime_hpc.runtime import slurm_warning
from prime_hpc.runtime.process_memory import freeze_gc, resident_bytes
from prime_hpc.runtime.process_tree import become_subreaper, die_with_parent, marked, send
from prime_hpc.runtime.role_context import BUS
from prime_hpc.store.messaging import sockets
from prime_hpc.store.messaging.accept_clients import Admission
from prime_hpc.store.messaging.json_lines import parse_address
from prime_hpc.store.model.tokenizer import is_noted

TICK_S = 0.2
FAREWELL_S = 5.0
"""How long workers may take to end once the orchestrator is gone."""
ALONE_S = 3.0
"""After which a host of a job ends whose orchestrator is gone."""
IO_TIMEOUT_S = 5.0
"""Longest wait for an orchestrator that does not read."""
MARK = "PRIMEHPC_ENV_WORKER"
"""In the environment of everything that one worker starts: which one it was."""


@dataclass
class _Worker:
    pid: int
    mark: str
    episode: mmap.mmap
    memory: int
    """Bytes at which it is ended; 0: no limit."""
    why: str = ""
    """Of its end, where this host ended it."""

    def kill(self, why: str) -> None:
        """End it at once."""
        self.why = self.why or why
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def is_gone(self) -> bool:
        """Return whether it has ended; collects it."""
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        return True

    def kill_leftovers(self) -> None:
        """End what it started, and its own copies: one of these would hold its connection open."""
        send(marked(os.getpid(), MARK, self.mark, session=self.pid), signal.SIGKILL)


class Session:
    """One orchestrator's workers."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self._unpacker = Unpacker()
        self._fds: deque[int] = deque()
        self._workers: dict[int, _Worker] = {}

    def obey(self, sockets_of_host: Iterable[socket.socket]) -> None:
        """Take orders. Raises OSError: the orchestrator is gone, or does not keep to the protocol."""
        if self.control.family == socket.AF_UNIX:
            data, fds, _, _ = socket.recv_fds(self.control, 1 << 16, 16)
            self._fds.extend(fds)
        else:
            data = self.control.recv(1 << 16)
        if not data:
            raise ConnectionError("closed")
        for message in self._unpacker.feed(data):
            if message["op"] == "start" and self._fds:
                self.start(message, self._fds.popleft(), sockets_of_host)
            elif message["op"] == "kill" and message["worker"] in self._workers:
                self._workers[message["worker"]].kill(str(message["why"]))

    def start(self, order: dict[str, Any], fd: int, sockets_of_host: Iterable[socket.socket]) -> None:
        """Fork a worker that serves the connection `fd`, and nothing else of the host's.
        Raises OSError: the orchestrator is gone."""
        _import_for(order.get("loads") or {})  # of an orchestrator of other code, which its worker will tell so
        try:
            episode = mmap.mmap(-1, mmap.PAGESIZE)
            pid = os.fork()
        except OSError as error:  # a limit of processes or memory: no fault of the workers that there are
            os.close(fd)
            why = f"no process can be had: {error}"
            self.control.sendall(pack("gone", worker=order["worker"], code=os.EX_OSERR, episode=0, why=why))
            return
        mark = uuid.uuid4().hex
        if pid == 0:
            try:
                _become_worker(order, fd, episode, mark, sockets_of_host)
            finally:
                os._exit(70)  # it leaves by itself
        os.close(fd)
        self._workers[order["worker"]] = _Worker(pid, mark, episode, int(order["memory"]))

    def look_after(self, codes: dict[int, int]) -> None:
        """Report the workers that ended, end those beyond their memory, which nothing that they run can prevent.
        `codes`: exit codes of the host's children that ended, by process id.
        Raises OSError: the orchestrator is gone."""
        for number, worker in list(self._workers.items()):
            if worker.pid in codes:
                del self._workers[number]
                worker.kill_leftovers()
                code, episode = codes[worker.pid], read_mark(worker.episode)
                self.control.sendall(pack("gone", worker=number, code=code, episode=episode, why=worker.why))
            elif worker.memory and not worker.why and (used := resident_bytes(worker.pid)) > worker.memory:
                worker.kill(f"it held {used / 2**30:.2f} GiB of memory")

    def end(self) -> None:
        """Let the workers end, then end them: the orchestrator is gone, and their own connections with it."""
        self.control.close()
        deadline = time.monotonic() + FAREWELL_S
        left = list(self._workers.values())
        while left and time.monotonic() < deadline:
            left = [worker for worker in left if not worker.is_gone()]
            time.sleep(0.02)
        for worker in left:
            worker.kill("the orchestrator is gone")
        for worker in self._workers.values():
            worker.kill_leftovers()


class Host:
    """The session of the orchestrator that started this host, or, where it listens, of all who know the key."""

    def __init__(
        self, control: socket.socket | None, admission: Admission | None = None, *, of_a_job: bool = False
    ) -> None:
        """`of_a_job`: once all of its sessions have ended for good, so does it."""
        self._of_a_job = of_a_job
        self._alone_since: float | None = None
        self._sessions: dict[str, Session] = {} if control is None else {"": Session(control)}
        self._admission = admission
        self._new: dict[socket.socket, Unpacker] = {}
        """Connections that gave their proof and have not said yet what they are for."""
        self._wakeup, self._alarm = socket.socketpair()
        for end in (self._wakeup, self._alarm):
            end.setblocking(False)

    def serve(self) -> None:
        """Until the orchestrator is gone, or SIGTERM came that is not Slurm's warning."""
        signal.set_wakeup_fd(self._alarm.fileno(), warn_on_full_buffer=False)
        told_to_end: list[int] = []
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to be woken
        if slurm_warning.is_led():
            slurm_warning.outlive()
        else:
            signal.signal(signal.SIGTERM, lambda signum, _: told_to_end.append(signum))
        if self._admission is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        else:
            signal.signal(signal.SIGINT, lambda signum, _: told_to_end.append(signum))
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ)
            for session in self._sessions.values():
                selector.register(session.control, selectors.EVENT_READ)
            while not told_to_end and (self._admission is not None or self._sessions) and not self._is_left_alone():
                self._turn(selector)
            if self._admission is not None:
                self._admission.close(selector)
        for session in self._sessions.values():
            session.end()

    def _is_left_alone(self) -> bool:
        """Return whether its orchestrator has come and gone; a connection that broke may come again."""
        if self._sessions or self._new:
            self._alone_since = None
        return self._of_a_job and self._alone_since is not None and time.monotonic() - self._alone_since > ALONE_S

    def _turn(self, selector: selectors.BaseSelector) -> None:
        """Wait a moment, then do what is due."""
        wait_s = TICK_S if self._admission is None else self._admission.tend(selector, TICK_S)
        ready = [key.fileobj for key, _ in selector.select(wait_s)]
        told = [session for session in self._sessions.values() if session.control in ready]
        for sock in ready:
            assert isinstance(sock, socket.socket)
            if sock is self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    sock.recv(4096)
            elif self._admission is not None and self._admission.concerns(sock):
                self._admit(selector, self._admission.handle(selector, sock))
            elif sock in self._new:
                self._introduce(selector, sock)
        codes = _reap()
        for name, session in list(self._sessions.items()):
            try:
                if session in told:
                    session.obey(self._sockets())
                session.look_after(codes)
            except OSError:
                self._end(selector, name)

    def _end(self, selector: selectors.BaseSelector, name: str) -> None:
        """End a session, whose orchestrator is gone."""
        session = self._sessions.pop(name)
        selector.unregister(session.control)
        session.end()
        self._alone_since = time.monotonic()

    def _admit(self, selector: selectors.BaseSelector, proven: tuple[socket.socket, bytes] | None) -> None:
        if proven is not None:
            sock, proof = proven
            sock.settimeout(IO_TIMEOUT_S)
            with contextlib.suppress(OSError):
                sock.sendall(proof)
                self._new[sock] = Unpacker()
                selector.register(sock, selectors.EVENT_READ)

    def _introduce(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        """Read from a connection what it is for: a session's orders, or one of its workers."""
        try:
            data = sock.recv(1 << 16)
            messages = self._new[sock].feed(data)
            if data and not messages:
                return
            selector.unregister(sock)
            del self._new[sock]
            message = messages[0] if len(messages) == 1 else {"op": "nothing"}
            if message["op"] == "control":
                name = str(message["session"])
                if name in self._sessions:  # its connection broke, of which nobody here has heard
                    self._end(selector, name)
                self._sessions[name] = Session(sock)
                selector.register(sock, selectors.EVENT_READ)
            elif message["op"] == "start" and message["session"] in self._sessions:
                sock.sendall(pack("started"))
                self._sessions[message["session"]].start(message, sock.detach(), self._sockets())
            else:
                sock.close()
        except (OSError, KeyError, TypeError):
            if sock in self._new:
                selector.unregister(sock)
                del self._new[sock]
            sock.close()

    def _sockets(self) -> list[socket.socket]:
        """Those that no worker may hold open."""
        listeners = [] if self._admission is None else self._admission.sockets()
        controls = [session.control for session in self._sessions.values()]
        return [self._wakeup, self._alarm, *controls, *self._new, *listeners]


def _become_worker(
    order: dict[str, Any], fd: int, episode: mmap.mmap, mark: str, sockets_of_host: Iterable[socket.socket]
) -> None:
    """In the child: nothing of the host stays open, and it dies with the host."""
    parent = os.getppid()
    die_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    if slurm_warning.is_led():
        slurm_warning.outlive()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    for end in sockets_of_host:
        end.close()
    if order["log"]:
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    os.environ[MARK] = mark

    from prime_hpc.envs.workers.worker import work

    work(socket.socket(fileno=fd), episode, str(order["label"]))


def _reap() -> dict[int, int]:
    """Collect the children that ended, orphans of workers too: exit codes by process id."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def _import_everything() -> None:
    """Import what every worker needs. None of it starts a thread, as long as libraries are told so (`host_link`)."""
    import math_verify  # noqa: F401
    import mcp  # noqa: F401
    from transformers import PreTrainedTokenizerFast  # noqa: F401

    import prime_hpc.envs.episode_runner
    import prime_hpc.envs.legacy.surface
    import prime_hpc.envs.workers.worker  # noqa: F401
    from prime_hpc.envs.workers.fingerprint import package_digest

    package_digest()
    freeze_gc()
    _tell_of_threads()


def _import_for(loads: dict[str, Any]) -> None:
    """Import what finds a tokenizer's class where nobody has yet, once for all workers."""
    tokenizer, trust = loads.get("tokenizer"), bool(loads.get("trust_remote_code"))
    if tokenizer and "torch" not in sys.modules and not is_noted(tokenizer, trust_remote_code=trust):
        _import_torch()


def _import_torch() -> None:
    from transformers import AutoTokenizer  # noqa: F401

    freeze_gc()
    _tell_of_threads()


def _tell_of_threads() -> None:
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    if threads > 1:
        print(f"{threads - 1} threads run beside the one that forks workers: a lock that one holds stays locked there")


def main() -> int:
    """Serve until the orchestrator is gone, or SIGTERM; exit code 2 where a host cannot listen or has no key."""
    parser = argparse.ArgumentParser(
        prog="python -m prime_hpc.envs.workers.host",
        description="Plays episodes for orchestrators, by worker processes.",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--listen", metavar="HOST:PORT", help="take orchestrators that know the key; port 0: any")
    parser.add_argument("--of-a-job", action="store_true", help="end some seconds after the orchestrator has")
    where.add_argument("--fd", type=int, help="socket of the orchestrator that starts this process")
    parser.add_argument(
        "--key-var", default=EnvServersConfig().key_var, help="environment variable with the key (%(default)s)"
    )
    asked = parser.parse_args()
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)
    control, admission = None, None
    key = os.environ.pop(asked.key_var, None)  # it is none of the environments' business
    os.environ.pop(BUS, None)  # nor are the run's messages
    if asked.listen and not key:
        print(f"{asked.key_var} is not set: whoever reaches this host could run what it imports", file=sys.stderr)
        return 2
    _import_everything()
    if asked.listen:
        assert key
        _import_torch()  # now, for it takes seconds in which nobody would be heard
        try:
            host, port = parse_address(asked.listen)
            listener = sockets.listen(host, port)
        except (ValueError, OSError) as error:
            print(f"--listen {asked.listen}: {error}", file=sys.stderr)
            return 2
        admission = Admission(listener, key, PURPOSE)
        print(f"listens on {sockets.join(host, listener.getsockname()[1])}", flush=True)
    else:
        control = socket.socket(fileno=asked.fd)
    become_subreaper()
    Host(control, admission, of_a_job=asked.of_a_job).serve()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
