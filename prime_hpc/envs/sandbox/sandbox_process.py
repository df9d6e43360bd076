"""One sandbox as the host sees it: started by bubblewrap with the guest as its first process, asked over a socket.

The guest holds a command's deadline and limits; this side has the last word: a guest that does not answer in time is
ended from outside, and with it everything inside.
"""

import asyncio
import contextlib
import marshal
import os
import signal
import socket
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_hpc.config.sections.orchestrator import SandboxConfig
from prime_hpc.envs.sandbox.bubblewrap import Stage
from prime_hpc.envs.sandbox.makers import MAKERS
from prime_hpc.runtime.slurm_warning import WARNED_WITHIN_S, WARNINGS, is_led, was_warned_since

GRACE_S = 5.0
"""How long after a deadline the guest may take to say so, and how long a sandbox may take to end by itself."""
MARSHAL = 4
"""Version of the format: an image's Python may be older than this one."""
MOST_ANSWER = 1 << 28
"""Bytes of an answer at most."""
PER_SANDBOX_PROCESSES = (5, 14)
"""Linux release since which the kernel counts a user's processes in each user namespace by themselves."""


class SandboxFailed(RuntimeError):
    """A sandbox did not start, is gone, or refuses a file: the fault is not that of a command in it."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Exit code; minus the signal that ended it."""
    ended_by: str
    """The limit: `wall`, `cpu`, `memory`, `processes`, `files`, `hidden` (it kept from being looked at), `gone` (it
    took the sandbox with it); empty: none."""
    stdout: bytes
    stderr: bytes
    dropped: int
    """Bytes of output beyond the limit."""
    verdict: str
    """Of a Python program that came to its end: `passed`, or how it failed."""


BOOT = (
    "import marshal, os\n"
    "size, data = int.from_bytes(os.read(0, 4), 'big'), b''\n"
    "while len(data) < size:\n"
    "    data += os.read(0, size - len(data)) or os._exit(1)\n"
    "code, limits = marshal.loads(data)\n"
    "scope = {'__name__': 'guest'}\n"
    "exec(code, scope)\n"
    "scope['main'](limits)"
)
"""The first process's command line: takes its program from the host, by which it is of the same release of Python."""


def guest_limits(config: SandboxConfig) -> dict[str, int]:
    """Return what the guest holds, in bytes and numbers."""
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    counted = release >= PER_SANDBOX_PROCESSES
    return {
        "memory": config.memory_mib << 20,
        "disk": config.disk_mib << 20,
        "files": config.files,
        "processes": config.processes,
        "kernel_processes": config.processes + 1 if counted else 0,
        "open_files": config.open_files,
        "output": config.output_kib << 10,
    }


def first_inside(pid: int) -> int | None:
    """Return process 1 of the sandbox that a process has made; None: it has not come so far, or cannot be seen."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            told = Path(f"/proc/{child}/status").read_text(encoding="ascii", errors="replace")
            numbers = [line.split()[1:] for line in told.splitlines() if line.startswith("NSpid:")]
            found = int(child) if numbers and numbers[0][-1] == "1" else first_inside(int(child))
            if found is not None:
                return found
    return None


class Sandbox:
    """One sandbox, from its start to its end. One command at a time."""

    def __init__(self, config: SandboxConfig, program: str, stage: Stage) -> None:
        """`program`: that of the runtime, where `stage` finds what is shown."""
        self.config = config
        self._maker = MAKERS[config.runtime]
        self._argv = self._maker.command(program, config, stage, BOOT)
        self._env = self._maker.environment(config)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._turn = asyncio.Lock()
        self._num_orders = 0
        self._is_lost = False
        """True once an answer did not come or was none: the next one might be that to an earlier order."""
        self._ran = False
        """True once a command was begun in it: what goes wrong from then on may be its doing."""

    @property
    def pid(self) -> int:
        """Of the process that made it, for the tests' eyes."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until it answers. Raises SandboxFailed: it does not, within `start_s`; says why."""
        ours, theirs = socket.socketpair()
        errors = os.memfd_create("sandbox-errors")
        try:
            with theirs:
                # the parent of `die-with-parent` is this thread: the event loop's
                own = self._maker.own_environment()
                streams = {"stdin": theirs.fileno(), "stdout": errors, "stderr": errors}
                self._process = subprocess.Popen(self._argv, env=own, **streams)  # type: ignore[call-overload]
            ours.setblocking(False)
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            program = marshal.dumps((self._maker.guest(), guest_limits(self.config)), MARSHAL)
            self._writer.write(len(program).to_bytes(4, "big") + program)
            async with asyncio.timeout(self.config.start_s):
                await self._receive(0)
        except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
            ours.close()
            late = isinstance(error, TimeoutError)
            await self.stop(at_once=True)
            said = os.pread(errors, 2000, 0).decode(errors="replace").strip()
            if late:
                said = f"it did not answer within {self.config.start_s:g} s (sandbox.start_s). {said}".strip()
                raise SandboxFailed(f"a sandbox cannot be started: {said}") from error
            if isinstance(error, OSError) and self._process is None:
                said = str(error)
            raise SandboxFailed(f"a sandbox cannot be started: {self._maker.explain_refusal(said)}") from error
        except BaseException:
            ours.close()
            await self.stop(at_once=True)
            raise
        finally:
            os.close(errors)

    def is_alive(self) -> bool:
        """Return whether it still runs and can be asked."""
        return not self._is_lost and self._process is not None and self._process.poll() is None

    async def run(
        self,
        argv: list[str] | None = None,
        *,
        program: str = "",
        given: bytes = b"",
        env: dict[str, str] | None = None,
        may_exit: bool = False,
        wall_s: float | None = None,
        cpu_s: float | None = None,
        output_bytes: int = 0,
    ) -> Ended:
        """Run a command, or a Python program, and end whatever it has left behind.

        Once a command was begun, a sandbox that ends or does not work any more is that command's doing, and an outcome
        like any other: else what a model writes could have its episode not counted.

        A program has passed only where its process says so with a word that it was told for this time: one that ends
        its process before its checks has not. (The program could look for the word in its own interpreter, as it could
        tamper with the checks there.)

        Args:
            argv: the command; None: `program` is run, in a copy of the guest's interpreter.
            given: standard input.
            env: variables besides the sandbox's own.
            may_exit: whether `sys.exit(0)` is a program's end like any other.
            wall_s: deadline; default `command_s`.
            cpu_s: CPU time of all its processes; default `cpu_s` of the configuration.
            output_bytes: kept of its standard output, where that is more than `output_kib` of the configuration.

        Raises:
            SandboxFailed: the sandbox was gone before its first command began; or Slurm's warning came while a command
                ran that did not end well, and may have ended a part of it.
        """
        order: dict[str, Any] = {"op": "run", "env": {**self._env, **(env or {})}}
        order["wall_s"] = self.config.command_s if wall_s is None else wall_s
        order["cpu_s"] = self.config.cpu_s if cpu_s is None else cpu_s
        order["output"] = max(self.config.output_kib << 10, min(output_bytes, MOST_ANSWER >> 1))
        if argv is None:
            source = program.encode(errors="surrogatepass")
            order |= {"program": len(source), "word": os.urandom(16).hex(), "may_exit": may_exit}
            given = source + given
        else:
            order["argv"] = argv
        began = time.monotonic()
        ended = await self._run(order, given)
        if is_led() and (ended.code or ended.ended_by or (argv is None and ended.verdict != "passed")):
            if ended.code is not None and -ended.code in WARNINGS:
                await asyncio.sleep(WARNED_WITHIN_S)
            if was_warned_since(began):
                raise SandboxFailed("Slurm's warning (a signal to the whole job) came while a command ran")
        return ended

    async def _run(self, order: dict[str, Any], payload: bytes) -> Ended:
        """Carry out `run`'s order; a sandbox that does not work any more is an end like any other."""
        spoiled = self._ran
        try:
            lines, outputs = await self._ask(order, payload, order["wall_s"] + GRACE_S)
            if lines[0] == "error" and spoiled:
                raise ConnectionError(lines[1])
            if lines[0] == "ended":
                _, code, ended_by, split, dropped, verdict = lines
                out, err = outputs[: int(split)], outputs[int(split) :]
                return Ended(int(code), ended_by, out, err, int(dropped), verdict)
        except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
            if not self._ran:
                raise SandboxFailed(f"the sandbox was gone: {type(error).__name__}: {error}") from error
            await self.stop(at_once=True)
            return Ended(-signal.SIGKILL, "wall" if isinstance(error, TimeoutError) else "gone", b"", b"", 0, "")
        raise SandboxFailed(f"a command cannot be started in the sandbox: {' '.join(lines[1:])}")

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, relative to the folder of commands. Raises SandboxFailed: it cannot be written."""
        await self._file({"op": "write", "path": path}, data)

    async def read(self, path: str, most: int | None = None) -> bytes:
        """Return a regular file's content, its first `most` bytes. Raises SandboxFailed: it cannot be read."""
        order = {"op": "read", "path": path, "most": MOST_ANSWER >> 1 if most is None else most, "whole": most is None}
        return await self._file(order, b"")

    async def _file(self, order: dict[str, Any], data: bytes) -> bytes:
        try:
            lines, payload = await self._ask(order, data, self.config.command_s + GRACE_S)
        except (OSError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise SandboxFailed(f"{order['op']} {order['path']!r}: the sandbox is gone ({error})") from error
        if lines[0] != "ok":
            raise SandboxFailed(f"{order['op']} {order['path']!r}: {' '.join(lines[1:])}")
        return payload

    async def _ask(self, order: dict[str, Any], payload: bytes, seconds: float) -> tuple[list[str], bytes]:
        """Send an order and wait for the answer; where that does not come, also for a caller that is cancelled
        meanwhile, the sandbox is ended."""
        async with self._turn:
            if self._writer is None or not self.is_alive():
                raise ConnectionError("it has ended")
            self._num_orders += 1
            head = marshal.dumps({**order, "number": self._num_orders}, MARSHAL)
            try:
                async with asyncio.timeout(seconds):
                    self._writer.write(struct.pack(">II", len(head), len(payload)) + head + payload)
                    self._ran |= order["op"] == "run"
                    await self._writer.drain()
                    return await self._receive(self._num_orders)
            except BaseException:
                self._is_lost = True
                self.kill()
                raise

    async def _receive(self, number: int) -> tuple[list[str], bytes]:
        """Wait for the answer to an order: the lines of its head, and its bytes. Nothing in it is believed but as
        text."""
        assert self._reader is not None
        head, payload = struct.unpack(">II", await self._reader.readexactly(8))
        if head + payload > MOST_ANSWER:
            raise ValueError("an answer without end")
        told, *lines = (await self._reader.readexactly(head)).decode(errors="replace").split("\n", 6)
        if told != str(number):
            raise ValueError("an answer to another order")
        return lines, await self._reader.readexactly(payload)

    def kill(self) -> None:
        """End it from outside, with all that is in it; the process that made it ends when nothing is left inside."""
        if self._process is None or self._process.poll() is not None:
            return
        first = first_inside(self._process.pid)
        if first is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
        else:  # it has not come so far, or this kernel does not say
            self._process.kill()

    def _wait(self, seconds: float) -> bool:
        """Return whether it has ended; what made it ends last, once nothing is left inside."""
        assert self._process is not None
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    async def stop(self, *, at_once: bool = False) -> None:
        """End it and wait until nothing of it is left."""
        if self._writer is not None:
            self._writer.close()  # the guest ends, and with it everything else
            self._writer = None
        if self._process is None:
            return

        def end() -> None:
            if not at_once and self._wait(GRACE_S):
                return
            self.kill()
            if not self._wait(GRACE_S) and self._process is not None:
                self._process.kill()
                self._wait(GRACE_S)

        began = time.monotonic()
        await asyncio.to_thread(end)
        if self._process.poll() is None:
            raise SandboxFailed(f"process {self.pid} of a sandbox did not end in {time.monotonic() - began:.0f} s")
