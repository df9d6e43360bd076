"""Processes of `python -m MODULE` that begin at once: forks of a server that has imported everything (`fork_server`).

One server per process of pytest, started when first asked for, ended with it. What is started are real processes of
their own; only `psutil`'s command line of theirs is the server's.
"""

import array
import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
START_S = 240.0
WORKER_SERVER = "PRIME_HPC_TEST_WORKER_SERVER"
"""Names the socket of the process whose forks pytest's workers are (see `tests/support/worker_server.py`)."""

_running: list[tuple["subprocess.Popen[bytes]", Path]] = []
"""This process's server, and its socket."""


def roles_path(workers: Path) -> Path:
    """Beside the socket of pytest's workers, that of the process whose forks start what tests start."""
    return workers.with_name("r")


def start_server() -> Path:
    """The socket of this process's server, which listens.

    Another is started where the last one is gone: a supervisor that a test runs in this very process ends, when it is
    done, all that this process has started.
    """
    if _running and _running[-1][0].poll() is None:
        return _running[-1][1]
    folder = Path(tempfile.mkdtemp(prefix="fork-", dir="/tmp"))  # socket paths must stay short
    path = folder / "s"
    log = (folder / "log").open("wb")
    ready = os.environ.get(WORKER_SERVER)  # it has a fork that has imported everything: one of that begins at once
    start = [str(ROOT / "tests/support/worker_start.py"), str(roles_path(Path(ready)))] if ready else []
    process = subprocess.Popen(
        [sys.executable, *start, "-m", "tests.support.fork_server", str(path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    deadline = time.monotonic() + START_S
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(path))
                _running.append((process, path))
                return path
        except OSError:
            text = (folder / "log").read_text(errors="replace")
            assert process.poll() is None, f"the fork server ended with {process.returncode}:\n{text[-3000:]}"
            assert time.monotonic() < deadline, f"no fork server after {START_S:g} s:\n{text[-3000:]}"
            time.sleep(0.05)


class ForkedProcess:
    """As `subprocess.Popen([sys.executable, "-m", *command], env=..., stdout=..., stderr=...)`, of open files."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[bytes] | IO[str],
        stderr: IO[bytes] | IO[str],
        new_session: bool = False,
        passed: Sequence[int] = (),
    ) -> None:
        """`passed`: descriptors that it inherits besides; where the command names one, as `@0` for the first."""
        self.args = [sys.executable, "-m", *command]
        self.returncode: int | None = None
        self._received = b""
        request = {"command": list(command), "env": dict(env), "cwd": str(ROOT), "new_session": new_session}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(start_server()))
        fds = array.array("i", [*passed, stdout.fileno(), stderr.fileno()])
        data = json.dumps(request).encode() + b"\n"
        sent = self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        self._socket.sendall(data[sent:])
        self.pid = int(self._line(None) or 0)
        assert self.pid, f"the fork server could not start {command}"

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self._code(0)

    def wait(self, timeout: float | None = None) -> int:
        """Until it ends. Raises subprocess.TimeoutExpired."""
        code = self._code(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _code(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            try:
                line = self._line(timeout)
            except (TimeoutError, BlockingIOError):
                return None
            self.returncode = int(line) if line else -signal.SIGKILL  # the server is gone, and all with it
            self._socket.close()
        return self.returncode

    def _line(self, timeout: float | None) -> bytes:
        """An answer, without its newline; empty where the server has gone."""
        self._socket.settimeout(timeout)
        while b"\n" not in self._received:
            more = self._socket.recv(64)
            if not more:
                return b""
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return line

    def send_signal(self, number: int) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def so_far(file: IO[Any]) -> bytes:
    """Return what a file holds into which a process writes: to move the place that both share would have it write over
    its own words."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)


class HostProcess(ForkedProcess):
    """As `subprocess.Popen(...)` of `prime_hpc.envs.workers.host_link`, in whose place `forked_hosts` puts it."""

    def __init__(
        self, args: Sequence[str], *, stdout: Any, pass_fds: Sequence[int], env: Mapping[str, str], **_: Any
    ) -> None:
        words = {str(fd): f"@{index}" for index, fd in enumerate(pass_fds)}
        command = [words.get(word, word) for word in args[args.index("-m") + 1 :]]
        with open(1, "wb", closefd=False) as ours:
            out = stdout or ours
            super().__init__(command, env=env, stdout=out, stderr=out, new_session=True, passed=pass_fds)


class TalkingProcess(ForkedProcess):
    """One in a session of its own; as `subprocess.Popen(..., stdout=PIPE, stderr=STDOUT, text=True)`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process is asked
        super().__init__(command, env=env, stdout=self._output, stderr=self._output, new_session=True)

    def said(self) -> str:
        """Its output so far."""
        return so_far(self._output).decode(errors="replace")

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for its end; what it said. Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        return self.said(), None


def run(
    command: Sequence[str], *, env: Mapping[str, str], timeout: float = 200.0
) -> "subprocess.CompletedProcess[str]":
    """As `subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, ...)`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = ForkedProcess(command, env=env, stdout=out, stderr=err, new_session=True)
        try:
            code = process.wait(timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(process.args, code, out.read(), err.read())


def start(command: Sequence[str], *, env: Mapping[str, str]) -> ForkedProcess:
    """One in a session of its own, whose output nobody reads."""
    with open(os.devnull, "wb") as nothing:  # noqa: PTH123
        return ForkedProcess(command, env=env, stdout=nothing, stderr=nothing, new_session=True)


@contextmanager
def background(program: str, *arguments: object, log: Path, env: Mapping[str, str]) -> Iterator[ForkedProcess]:
    """A console script that runs beside the test, and all that it starts; interrupted at the end, or killed."""
    with log.open("wb") as file:
        command = ["tests.faults.entry", program, *map(str, arguments)]
        process = ForkedProcess(command, env=env, stdout=file, stderr=file, new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
