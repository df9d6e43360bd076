"""A role's own word on how it is: its status file and the bus's "status" topic.

The supervisor trusts this file, never an exit code alone. Written by every role's main.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from loguru import logger

from prime_hpc.runtime.activity import now_doing
from prime_hpc.runtime.atomic_write import write_atomic
from prime_hpc.runtime.failures import is_permanent, missing_home
from prime_hpc.runtime.process_memory import resident_bytes
from prime_hpc.runtime.role_context import RoleContext

STATUS_FILE = "status.json"
FILE_EVERY_S = 60.0
"""How old the file may become while heartbeats go over the bus."""


class Publisher(Protocol):
    """The part that status needs of `store.messaging.bus.BusClient` (observe imports no room)."""

    @property
    def connected(self) -> bool:
        """True if somebody hears it now."""

    def publish(self, topic: str, /, **payload: Any) -> None:
        """Announce `payload` under `topic`."""


class Status(Protocol):
    """The receiver of a role's progress: a `RoleStatus`, or less."""

    def ready(self, **info: Any) -> None:
        """Start-up is over."""

    def beat(self, step: int | None = None, **info: Any) -> None:
        """Report that a step is done."""

    def note(self, step: int) -> None:
        """Keep a step that is done, for which another process speaks at once."""


def status_path(log_dir: Path, index: int) -> Path:
    """Status file of the role's `index`-th process."""
    return log_dir / (STATUS_FILE if index == 0 else f"status_{index}.json")


class RoleStatus:
    """Reports state changes and heartbeats; states: starting, ready, done, failed."""

    def __init__(self, context: RoleContext, bus: Publisher | None = None) -> None:
        self._context = context
        self._bus = bus
        self._path = status_path(context.log_dir, context.index)
        self._lock = threading.Lock()
        self._file_lock = threading.Lock()
        self._stopped = threading.Event()
        self._written = 0.0
        self._written_count = -1
        self._has_place = False
        self._ends_for: str | None = None
        self._row: dict[str, Any] = {
            "role": context.role,
            "index": context.index,
            "state": "starting",
            "step": None,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "incarnation": context.incarnation,
            "info": {},
            "error": None,
            "permanent": False,
            "exit_code": 1,
            "count": 0,
        }

    def starting(self) -> None:
        """Report that the process lives and prepares."""
        self._report(state="starting")

    def ready(self, **info: Any) -> None:
        """Start-up is over; `info` says what the supervisor may show (address, versions)."""
        self._report(state="ready", info=info)

    def beat(self, step: int | None = None, **info: Any) -> None:
        """Still alive; optionally at `step`, with figures for the console. `idle=True`: nobody asks for a step, so that
        none that takes long is a stall."""
        changes: dict[str, Any] = {"info": {**self._row["info"], **info}}
        if step is not None:
            changes["step"] = step
        self._report(**changes)

    def note(self, step: int) -> None:
        """Keep a step that is done for the next heartbeat: of a rank for which another speaks at once."""
        with self._lock:
            self._row["step"] = step

    def move(self, incarnation: int) -> None:
        """Report as a part of another attempt from now on."""
        self._report(incarnation=incarnation)

    def done(self) -> None:
        """Report that the role's work is complete."""
        self._stopped.set()
        self._report(state="done")

    def ends_for(self, reason: str) -> None:
        """Keep why the role will end, which `failed` reports whatever comes in between; until then it beats on."""
        self._ends_for = self._ends_for or reason

    def failed(self, error: BaseException | str, words: str | None = None) -> None:
        """Report that the role ends for this reason, whether it would end so again, and the exit code that its attempt
        gets. The first one stands: a SIGTERM that follows is a consequence.
        `words`: in place of an exception's own."""
        self._stopped.set()
        if self._row["state"] == "failed":
            return
        permanent, code = False, 1
        if isinstance(error, BaseException):
            permanent = self._ends_for is None and is_permanent(error)
            code = getattr(error, "attempt_exit_code", code) if self._ends_for is None else code
            error = words or missing_home(error) or f"{type(error).__name__}: {error}"
        self._report(state="failed", error=self._ends_for or error, permanent=permanent, exit_code=code)

    def start_heartbeat(self, interval_s: float = 5.0) -> None:
        """Beat from daemon threads until `done` or `failed`: one publishes and touches no file, one writes the file."""

        def every(act: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                while not self._stopped.wait(interval_s):
                    act()

            return run

        for name, act in (("heartbeat", self._say), ("heartbeat-file", self._beat_by_file)):
            threading.Thread(target=every(act), name=name, daemon=True).start()

    def heartbeat(self) -> None:
        """Say that the process lives, and nothing new.

        Over the bus where it is up: the files of hundreds of ranks every few seconds would be most of what a run
        asks of the file system. The file follows once a minute.
        """
        self._say()
        self._beat_by_file()

    def _beat_by_file(self) -> None:
        if not self._may_skip_file():
            self._write(self._say())

    def _report(self, **changes: Any) -> None:
        self._write(self._say(**changes))  # the bus first: the file may have to wait for the file system

    def _say(self, **changes: Any) -> dict[str, Any]:
        """Publish what is known now, in order; returns it."""
        with self._lock:
            self._row.update(changes)
            self._row["count"] += 1  # tells which word is newer also where the clock is set back
            used = {"memory_bytes": resident_bytes(os.getpid()), "cpu_s": round(time.process_time(), 2)}
            row = {**self._row, "doing": now_doing(), **used, "time": time.time()}
            if self._bus is not None:
                self._bus.publish("status", **row)
            return row

    def _write(self, row: dict[str, Any]) -> None:
        with self._file_lock:
            if row["count"] < self._written_count:  # another thread has written newer words meanwhile
                return
            self._written, self._written_count = time.monotonic(), row["count"]
            try:
                if not self._has_place:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._has_place = True
                write_atomic(self._path, json.dumps(row), sync=False)
            except OSError as error:  # a full disk must not silence the role: the bus still carries its word
                logger.warning(f"status file {self._path} could not be written: {error}")

    def _may_skip_file(self) -> bool:
        is_heard = self._bus is not None and self._bus.connected
        return is_heard and time.monotonic() < self._written + FILE_EVERY_S


def read_status(log_dir: Path, index: int = 0) -> dict[str, Any] | None:
    """Return the last report of a role's process, or None where it never wrote one."""
    try:
        return json.loads(status_path(log_dir, index).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):  # absent, half-visible on a network file system: no word yet
        return None
