"""The steps of one preflight round: started through the caller's `run_step`, listened to, ended.

A node's word may come through its step's standard output (where that is a pipe) and through its files; either is
enough. A launcher's exit code is never trusted.
"""

import json
import os
import re
import selectors
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from prime_hpc.supervisor.preflight.node import MARK

RunStep = Callable[[list[str], list[str], int], "subprocess.Popen[Any]"]
"""`run_step(argv, hosts, component)`: start `argv` once on each host, all of one component. Best with
`stdout=PIPE, stderr=STDOUT`: then a node that does not share the file system can still say so."""

END_GRACE_S = 3.0
KEPT_LINES = 200
_WORD = re.compile(r"[\w.-]+")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Apptainer's errors are red in a file, too."""
_BOUND = re.compile(rb"(cpu|mem|gpu)-bind[=:]")
"""Begins a task's line on its CPUs, where a site has them told (`--cpu-bind=verbose`): it names the node, and no
fault."""
_EXITED = "Exited with exit code"
"""In srun's line on a task that failed."""


@dataclass
class Message:
    """A line that a node said, and when it arrived by the supervisor's clock."""

    arrived: float
    data: dict[str, Any]


@dataclass
class Step:
    """One launched step."""

    hosts: list[str]
    component: int
    launched: float
    """Epoch seconds just before its launch."""
    process: "subprocess.Popen[Any]"
    noise: list[str] = field(default_factory=list)
    """Last lines that are not messages: the launcher's own errors."""
    words: set[str] = field(default_factory=set)
    """Everything in them that may be a host's name."""
    buffers: dict[int, bytes] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        """True if the launcher is gone."""
        return self.process.poll() is not None


class Steps:
    """Steps that run at the same time. `close` ends what still runs."""

    def __init__(self, run_step: RunStep) -> None:
        self._run_step = run_step
        self._selector = selectors.DefaultSelector()
        self.steps: list[Step] = []

    def start(self, argv: list[str], hosts: list[str], component: int) -> Step:
        """Launch a step. Raises OSError: the launcher itself cannot be started."""
        launched = time.time()
        step = Step(hosts, component, launched, self._run_step(argv, hosts, component))
        for stream in (step.process.stdout, step.process.stderr):
            if stream is not None:
                os.set_blocking(stream.fileno(), False)
                self._selector.register(stream.fileno(), selectors.EVENT_READ, step)
        self.steps.append(step)
        return step

    def listen(self, timeout_s: float) -> list[Message]:
        """Messages that arrive within `timeout_s`; returns as soon as there are some."""
        if not self._selector.get_map():
            time.sleep(timeout_s)
            return []
        found: list[Message] = []
        for key, _ in self._selector.select(timeout_s):
            try:
                data = os.read(key.fd, 1 << 16)
            except BlockingIOError:
                continue
            arrived = time.time()
            step: Step = key.data
            if not data:
                self._selector.unregister(key.fd)
            text = step.buffers.get(key.fd, b"") + (data or b"\n")
            *lines, step.buffers[key.fd] = text.split(b"\n")
            for line in lines:
                message = parse_line(line.decode(errors="replace"), arrived)
                if message is not None:
                    found.append(message)
                elif line.strip() and not _BOUND.match(line):
                    text_line = _COLOUR.sub("", line.decode(errors="replace")).strip()
                    step.noise = [*step.noise[1 - KEPT_LINES :], text_line]
                    step.words.update(_words(text_line))
        return found

    def silent_end(self, step: Step) -> bool:
        """Return whether a step is over and everything that it said was read."""
        open_streams = any(key.data is step for key in self._selector.get_map().values())
        return step.ended and not open_streams

    def mentions(self, host: str) -> bool:
        """Return whether a launcher's line names a host."""
        return any(host in step.words for step in self.steps if host in step.hosts)

    def words_about(self, host: str) -> str:
        """Return what launchers said about a host: lines that name it, else the last lines of its steps. That its task
        ended is no reason: the program's own last words, which name no host, come before that."""
        steps = [step for step in self.steps if host in step.hosts]
        lines = [(line, _words(line)) for step in steps for line in step.noise]
        own = [line for line, words in lines if host in words]
        if own and all(_EXITED in line for line in own):
            hosts = {name for step in steps for name in step.hosts}
            said = dict.fromkeys(line for line, words in lines if not words & hosts and _EXITED not in line)
            own = [*[*said][-2:], *own]
        return " / ".join(dict.fromkeys((own or [line for line, _ in lines])[-3:]))[:600]

    def close(self) -> None:
        """End the launchers that still run (srun then ends its tasks), and close all pipes."""
        running = [step.process for step in self.steps if not step.ended]
        for process in running:
            process.terminate()
        end = time.monotonic() + END_GRACE_S
        for process in running:
            try:
                process.wait(timeout=max(0.05, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._selector.close()
        for step in self.steps:
            for stream in (step.process.stdout, step.process.stderr):
                if stream is not None:
                    stream.close()


def _words(line: str) -> set[str]:
    """All in a line that may be a host's name."""
    return {word.strip(".") for word in _WORD.findall(line)}


def module_arguments(argv: list[str]) -> list[str]:
    """Return the module's name and its own arguments, of an `argv` that names an interpreter, its options and `-m`.

    A launcher chooses the interpreter itself: inside a container it is another one.
    """
    return argv[argv.index("-m") + 1 :]


def parse_line(line: str, arrived: float) -> Message | None:
    """Return the message in a line, whatever label its launcher put before it; None where it is no message."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return Message(arrived, data) if isinstance(data, dict) and "host" in data and "phase" in data else None
